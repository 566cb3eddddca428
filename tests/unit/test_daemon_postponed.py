"""Results that a token may not post: when they are tried again."""

from uuid import UUID

import pytest

from runners import daemon

A, B = UUID(int=1), UUID(int=2)


def test_each_refusal_doubles_the_wait_of_that_result_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("runners.daemon.time.monotonic", lambda: now)
    postponed = daemon.Postponed()
    assert postponed.is_due(A)
    assert [postponed.put_off(A) for _ in range(3)] == [10.0, 20.0, 40.0]
    assert (postponed.is_due(A), postponed.is_due(B)) == (False, True)
    now = 140.0
    assert postponed.is_due(A)
    assert max(postponed.put_off(A) for _ in range(20)) == daemon.POSTPONEMENT_SECONDS_MAX
    postponed.forget()
    assert postponed.is_due(A)
