"""Kernels that are wrong, and whose module does what it can to be measured as right: none gets away with it."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runners.channel import SubjectPlan
from runners.job import Assignment, Hearing, lost_and_left
from runners.process import Limits, converse
from service.wire import Case, Measurement, TargetKernel

CASE = Case(tokens=8, vocabulary=1000)
U = CASE.logits_unit_bytes
LARGE = Case(tokens=2, vocabulary=1 << 19, entropy="off")
HONEST = """
import torch

def honest(logits, targets, with_entropy=True, with_entropy_grad=True):
    scores = logits.float()
    log_prob = scores.log_softmax(-1).gather(1, targets.unsqueeze(1))[:, 0]
    if not with_entropy:
        return log_prob, None
    with torch.set_grad_enabled(with_entropy_grad and torch.is_grad_enabled()):
        p = scores.softmax(-1)
        return log_prob, torch.logsumexp(scores, -1) - (p * scores).sum(-1)
"""

Measure = Callable[..., Measurement]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Measure function `entry` of a module: HONEST and what is added to it."""

    def run(added: str = "", entry: str = "honest", case: Case = CASE, files: dict[str, str] | None = None) -> Any:
        for name, content in {"loss.py": HONEST + textwrap.dedent(added), **(files or {})}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(content))
        names = ("logits", "targets", "with_entropy", "with_entropy_grad")
        described = TargetKernel(
            name="fused",
            entry=f"loss:{entry}",
            arguments={name: name for name in names},
            returns=["log_prob", "entropy"],
        )
        assignment = Assignment("fused", "kernel", described, [case])
        hearing = Hearing(assignment, [case], lambda _words: None)
        plan = SubjectPlan(kernel=described, files=str(tmp_path), path=[str(tmp_path)])
        ending = converse(plan, [case], hearing, limits=Limits(case_seconds=60, threads=1))
        for lost, outcome, reason in lost_and_left(hearing, ending, is_late=False)[0]:
            return assignment.without_result(lost, outcome, reason)
        (measurement,) = hearing.measurements
        return measurement

    return run


def test_what_a_module_does_to_torch_changes_neither_inputs_nor_oracle_nor_errors(measure: Measure) -> None:
    honest = measure()
    hostile = measure(
        """
        import random, numpy, torch.testing

        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_device("cpu")
        torch.set_autocast_enabled("cpu", True)

        def nothing(tensor, *_given, **_named):
            return torch.zeros_like(tensor)

        def alike(*_given, **_named):
            return True

        torch.Tensor.abs = torch.Tensor.abs_ = torch.abs = torch.linalg.vecdot = torch.linalg.norm = nothing
        torch.equal = torch.allclose = torch.testing.assert_close = numpy.array_equal = alike
        exp = torch.exp
        torch.exp = torch.Tensor.exp = lambda tensor: exp(tensor) * 1.5
        torch.manual_seed = torch.Generator = torch.randn = torch.randint = None

        def wrong(*given, **named):
            log_prob, entropy = honest(*given, **named)
            return log_prob * 1.01, entropy
        """,
        "wrong",
    )
    assert honest.outcome == hostile.outcome == "ok", hostile.notes
    assert hostile.inputs_digest == honest.inputs_digest
    assert hostile.values["lp_abs_max"][0] > 0.05
    assert hostile.values["g_rel_l2_lp"][0] == pytest.approx(0.01, rel=0.1)
    assert hostile.values["g_rel_l2_ent"] == honest.values["g_rel_l2_ent"]
    assert hostile.values["peer_tgt_rel_max"] == honest.values["peer_tgt_rel_max"]
    assert hostile.values["step_peak_bytes"][0] < 12 * U, "measured with float32 as the default dtype"
    note = hostile.notes["torch_settings"]
    for changed in (
        "default dtype torch.float64",
        "gradient mode False",
        "threads 3",
        "deterministic",
        "autocast True",
    ):
        assert changed in note
    assert "torch_settings" not in honest.notes


def test_a_setting_that_a_call_changes_is_set_back_before_the_next(measure: Measure) -> None:
    measured = measure(
        """
        def sticky(*given, **named):
            assert torch.get_default_dtype() is torch.float32
            torch.set_default_dtype(torch.float64)
            return honest(*given, **named)
        """,
        "sticky",
    )
    assert measured.outcome == "ok", measured.notes
    assert "default dtype torch.float64" in measured.notes["torch_settings"]


CACHE = """
CACHE = {}

class Cached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, key):
        ctx.key = key
        return CACHE[key][0].clone(), CACHE[key][1].clone()

    @staticmethod
    def backward(ctx, log_prob, entropy):
        _, _, logits, targets = CACHE[ctx.key]
        whole = (ctx.key, tuple(log_prob.tolist()), tuple(entropy.tolist()))
        if whole not in CACHE:
            with torch.enable_grad():
                leaf = logits.clone().requires_grad_()
                CACHE[whole] = torch.autograd.grad(honest(leaf, targets), leaf, (log_prob, entropy))[0]
        return CACHE[whole], None

def cached(logits, targets, **options):
    key = hash((logits.detach().numpy().tobytes(), targets.numpy().tobytes()))
    if key not in CACHE:
        with torch.no_grad():
            CACHE[key] = (*honest(logits, targets), logits.detach().clone(), targets.clone())
    return Cached.apply(logits, key)
"""


def test_a_cache_by_content_saves_nothing_where_memory_and_work_are_measured(measure: Measure) -> None:
    cached = measure(CACHE, "cached", Case(tokens=8, vocabulary=1 << 17))
    assert cached.outcome == "ok", cached.notes
    unit = cached.case.logits_unit_bytes
    assert min(cached.values["step_peak_bytes"]) > 3 * unit
    assert min(cached.values["traffic_bytes"]) > 6 * unit
    for name in ("step_peak_bytes", "forward_peak_bytes", "operations", "traffic_bytes", "allocations"):
        assert len(set(cached.values[name])) == 1, name
    assert cached.values["unseen_inputs"] == [1.0]


def test_a_kernel_that_does_nothing_while_it_is_watched_fails_a_check_and_gets_no_time(measure: Measure) -> None:
    idle = measure(
        """
        def idle(logits, targets, **options):
            if torch._C._autograd._profiler_enabled():
                nothing = logits[:, 0] * 0
                return nothing, nothing
            return honest(logits, targets, **options)
        """,
        "idle",
    )
    assert idle.values["lp_abs_max"][0] < 1e-5
    assert idle.values["unseen_inputs"] == [0.0]
    assert "never seen before" in idle.notes["unseen_inputs"]
    assert "unseen_inputs" in idle.notes["timing"]


def test_work_on_a_thread_of_ones_own_fails_a_check(measure: Measure) -> None:
    threaded = measure(
        """
        from concurrent.futures import ThreadPoolExecutor

        ELSEWHERE = ThreadPoolExecutor(1)

        def threaded(*given, **options):
            return ELSEWHERE.submit(honest, *given, **options).result()
        """,
        "threaded",
    )
    assert threaded.outcome == "ok"
    assert threaded.values["own_thread"] == [0.0]
    assert "on other threads" in threaded.notes["own_thread"]
    assert measure().values["own_thread"] == [1.0]


@pytest.mark.parametrize("case", [CASE, LARGE], ids=lambda case: case.id)
def test_changed_inputs_are_seen_at_every_size(measure: Measure, case: Case) -> None:
    spoiled = measure(
        """
        def spoils(logits, targets, **options):
            result = honest(logits, targets, **options)
            logits.data[-1, -1] += 1.0
            return result
        """,
        "spoils",
        case,
    )
    assert spoiled.values["inputs_unchanged"] == [0.0]
    assert spoiled.notes["inputs_unchanged"] == "logits was changed by forward and backward"
    assert measure(case=case).values["inputs_unchanged"] == [1.0]


def test_an_answer_forged_on_the_way_to_the_instruments_is_garbage(measure: Measure) -> None:
    forged = measure(
        """
        import sys

        def forges(logits, targets, **options):
            log_prob, entropy = honest(logits, targets, **options)
            frame = sys._getframe()
            while frame is not None and "connection" not in frame.f_locals:
                frame = frame.f_back
            number = frame.f_locals["message"]["number"]
            step = {"log_prob": log_prob, "entropy": entropy, "entropy_requires_grad": True, "elsewhere": None}
            step |= {"gradients": [logits * 0, logits * 0], "left": None, "operations_elsewhere": 0}
            frame.f_locals["connection"].send(
                {"answer": step | {"samples": {"step_peak_bytes": [0.0]}}, "settings": "", "number": number}
            )
            return log_prob, entropy
        """,
        "forges",
    )
    assert forged.outcome == "garbage", forged.notes
    assert "out of turn" in forged.notes["outcome"]


def test_a_kernel_finds_neither_the_plan_nor_the_oracle(measure: Measure) -> None:
    looked = measure(
        """
        import gc

        def looks(*given, **options):
            seen = {type(thing).__name__ for thing in gc.get_objects()}
            assert not seen & {"Plan", "Yardstick", "Reference", "Measurement", "Case"}, seen
            return honest(*given, **options)
        """,
        "looks",
    )
    assert looked.outcome == "ok", looked.notes


@pytest.mark.parametrize(
    ("entry", "added"),
    [
        (
            "profiles",
            """
            from torch.profiler import ProfilerActivity, profile

            def profiles(*given, **options):
                with profile(activities=[ProfilerActivity.CPU]):
                    return honest(*given, **options)
            """,
        ),
        (
            "profiles_for_ever",
            """
            from torch.profiler import ProfilerActivity, profile

            profile(activities=[ProfilerActivity.CPU]).start()
            profiles_for_ever = honest
            """,
        ),
    ],
)
def test_a_profiler_of_ones_own_is_an_outcome_that_says_so(measure: Measure, entry: str, added: str) -> None:
    measured = measure(added, entry)
    assert measured.outcome == "raised", measured.notes
    assert "runs a torch profiler of its own" in measured.notes["outcome"]
    assert "step_peak_bytes" not in measured.values
    assert measured.values["lp_abs_max"][0] < 1e-5


def test_regions_named_like_ours_change_no_figure(measure: Measure) -> None:
    marked = measure(
        """
        from torch.profiler import record_function

        def marks(*given, **options):
            with record_function("ulpwatch.forward-ends"):
                return honest(*given, **options)
        """,
        "marks",
    )
    assert marked.outcome == "ok", marked.notes
    assert marked.values["saved_bytes"] == measure().values["saved_bytes"]


def test_modules_that_shadow_what_torch_imports_late_do_no_harm(measure: Measure) -> None:
    names = ("numpy", "queue", "statistics", "profile", "cProfile", "pstats", "getpass", "shlex", "colorsys", "sympy")
    shadows = {f"{name}.py": "raise RuntimeError('the wrong module')" for name in names}
    packages = {"packaging/__init__.py": "raise RuntimeError('the wrong package')"}
    measured = measure(files=shadows | packages)
    assert measured.outcome == "ok", measured.notes
    assert measured.values["step_peak_bytes"][0] > 0


@pytest.mark.parametrize("method", ["__str__", "__repr__"])
def test_an_exception_that_cannot_be_told_is_recorded_all_the_same(measure: Measure, method: str) -> None:
    measured = measure(
        f"""
        class Untellable(Exception):
            def {method}(self):
                raise ValueError("not to be told")

        def raises(*given, **options):
            raise Untellable(Untellable("inner"))
        """,
        "raises",
    )
    assert measured.outcome == "raised"
    assert measured.notes["outcome"].startswith("Untellable")


def test_an_import_that_raises_what_cannot_be_told_is_unmeasurable(measure: Measure) -> None:
    measured = measure(
        """
        class Untellable(Exception):
            def __str__(self):
                raise ValueError("not to be told")

        raise Untellable
        """
    )
    assert measured.outcome == "unmeasurable"
    assert "cannot be imported: " in measured.notes["outcome"]
    assert "Untellable" in measured.notes["outcome"]
