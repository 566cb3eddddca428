"""What a job makes of a measured process's messages and of its end."""

from typing import Any

import pytest

from runners.channel import GarbageError
from runners.job import Assignment, Hearing, lost_and_left
from runners.process import Ending
from service.wire import Case, Measurement

CASES = [Case(tokens=n, vocabulary=8) for n in (1, 2, 3)]
ASSIGNMENT = Assignment("fused", "kernel", None, CASES)
STARTED = {
    "kind": "started",
    "environment": {"device_class": "cpu", "device": "test", "exact": {}, "numeric": {}, "timing": {}},
}
DONE = {"kind": "done"}


def begin(index: int) -> dict[str, Any]:
    return {"kind": "begin", "index": index}


def skipped(index: int) -> dict[str, Any]:
    return {"kind": "skipped", "index": index}


def measured(index: int, **changes: Any) -> dict[str, Any]:
    facts = Measurement(kernel="fused", case=CASES[index], values={"lp_abs_max": [0.5]}).model_dump(mode="json")
    return {"kind": "measurement", "index": index, "measurement": {**facts, **changes}}


def heard(*messages: dict[str, Any]) -> Hearing:
    hearing = Hearing(ASSIGNMENT, CASES, lambda _words: None)
    for message in messages:
        hearing.receive(message)
    return hearing


def lost(hearing: Hearing, outcome: Any, *, is_late: bool = False) -> tuple[list[tuple[int, str]], list[int]]:
    losses, left = lost_and_left(hearing, Ending(outcome, "because", b""), is_late=is_late)
    return [(case.tokens, outcome) for case, outcome, _ in losses], [case.tokens for case in left]


def test_a_measurement_gets_its_role_and_the_checks_that_only_the_job_can_make() -> None:
    hearing = heard(STARTED, begin(0), measured(0), begin(1), measured(1, outcome="raised", notes={"outcome": "a\0b"}))
    ok, raised = hearing.measurements
    assert ok.values == {"lp_abs_max": [0.5], "callable": [1.0], "completes": [1.0]}
    assert raised.values["completes"] == [0.0]
    assert raised.notes == {"outcome": "a\ufffdb"}
    control = Assignment("legacy", "control", None, CASES).without_result(CASES[0], "unmeasurable", "no such thing")
    assert (control.role, control.values) == ("control", {"callable": [0.0]})


def test_the_last_message_is_known_as_such() -> None:
    hearing = heard(STARTED, begin(0), measured(0), skipped(1), begin(2), measured(2))
    assert hearing.receive(DONE)
    assert [m.case.tokens for m in hearing.measurements] == [1, 3]
    assert lost(hearing, "done") == ([], [])


@pytest.mark.parametrize(
    "messages",
    [
        [begin(0)],
        [STARTED, STARTED],
        [STARTED, DONE],
        [STARTED, begin(1)],
        [STARTED, begin(0), begin(0)],
        [STARTED, begin(0), begin(1)],
        [STARTED, measured(0)],
        [STARTED, begin(0), measured(1)],
        [STARTED, begin(0), measured(0), measured(0)],
        [STARTED, begin(0), skipped(0)],
        [STARTED, begin(0), DONE],
        [STARTED, begin(0), measured(0), {"kind": "unmeasurable", "reason": "changed its mind"}],
        [STARTED, {"kind": "unmeasurable", "reason": "no"}, begin(0)],
        [STARTED, {"kind": "surprise"}],
        [STARTED, begin(0), {"kind": "garbage", "reason": "spoke out of turn"}],
        [STARTED, {"kind": "garbage", "reason": "before any case"}],
        [{"kind": "started", "environment": {"device_class": "tpu"}}],
        [STARTED, begin(0), measured(0, kernel="other")],
        [STARTED, begin(0), measured(0, case=CASES[1].model_dump(mode="json"))],
        [STARTED, begin(0), measured(0, outcome="killed", notes={"outcome": "by nobody"})],
        [STARTED, begin(0), measured(0, values={"lp_abs_max": [float("nan")]})],
        [STARTED, begin(0), measured(0, values={"surprise": [1.0]})],
        [STARTED, begin(0), {"kind": "measurement", "index": 0}],
    ],
)
def test_a_message_that_cannot_follow_is_garbage(messages: list[dict[str, Any]]) -> None:
    hearing = heard(*messages[:-1])
    with pytest.raises(GarbageError):
        hearing.receive(messages[-1])


def test_a_death_in_a_case_costs_that_case() -> None:
    assert lost(heard(STARTED, begin(0)), "killed") == ([(1, "killed")], [2, 3])
    assert lost(heard(STARTED, begin(0), measured(0), begin(1)), "garbage") == ([(2, "garbage")], [3])


def test_a_death_between_cases_costs_none() -> None:
    assert lost(heard(STARTED, begin(0), measured(0)), "exited") == ([], [2, 3])
    assert lost(heard(STARTED, begin(0), measured(0), skipped(1), begin(2), measured(2)), "killed") == ([], [])


def test_a_process_that_begins_nothing_is_the_last() -> None:
    everything = [(case.tokens, "unmeasurable") for case in CASES]
    assert lost(heard(STARTED), "timeout") == (everything, [])
    assert lost(heard(STARTED, {"kind": "unmeasurable", "reason": "no entry"}), "done") == (everything, [])


def test_cases_that_the_time_does_not_reach_are_timeouts() -> None:
    hearing = heard(STARTED, begin(0), measured(0), begin(1))
    assert lost(hearing, "timeout", is_late=True) == ([(2, "timeout"), (3, "timeout")], [])
    assert lost(heard(STARTED), "timeout", is_late=True) == ([(1, "timeout"), (2, "timeout"), (3, "timeout")], [])
