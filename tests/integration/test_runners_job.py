"""Commits of real repositories, measured in real child processes: what comes back, and what deaths cost."""

import json
import subprocess
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from runners.job import Limits, PlanError, measure_commit
from runners.targets import load_target
from service.catalogue import BY_NAME
from service.wire import Measurement, Result, Target

ROOT = Path(__file__).parent.parent.parent
# Small cases of the quick suite, in the order in which they are measured.
CASES = ["n1-v1000-float32-off", "n1-v1000-float32-value", "n1-v1000-float32-gradient"]
ONE_CASE = ["n7-v1000-float32-gradient"]
LIMITS = Limits(case_seconds=60, threads=1)

# A plain kernel that is right, in the signature of the tests' targets.
GOOD = """
import torch

def log_probs(logits, tokens, with_entropy=True, with_entropy_grad=True, keep_mask=None):
    scores = logits.float()
    kept = scores if keep_mask is None else scores.masked_fill(~_with_target(keep_mask, tokens), float("-inf"))
    log_prob = kept.log_softmax(-1).gather(1, tokens.unsqueeze(1))
    if not with_entropy:
        return log_prob, None
    with torch.set_grad_enabled(with_entropy_grad and torch.is_grad_enabled()):
        p = scores.softmax(-1)
        return log_prob, torch.logsumexp(scores, -1) - (p * scores).sum(-1)

def _with_target(keep_mask, tokens):
    return keep_mask.scatter(1, tokens.unsqueeze(1), True)
"""
ARGUMENTS = {
    "logits": "logits",
    "targets": "tokens",
    "with_entropy": "with_entropy",
    "with_entropy_grad": "with_entropy_grad",
}

Write = Callable[[str, dict[str, str]], str]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    directory = tmp_path / "repository"
    directory.mkdir()
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main"], cwd=directory, check=True)
    return directory


@pytest.fixture
def commit(repository: Path) -> Write:
    """Write files, commit them, and return the commit's id."""

    def write(subject: str, files: dict[str, str]) -> str:
        for name, content in files.items():
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_text(textwrap.dedent(content))
        person = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
        subprocess.run(["git", "add", "--all"], cwd=repository, check=True)
        subprocess.run(["git", *person, "commit", "--quiet", "--message", subject], cwd=repository, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
        return head.stdout.strip()

    return write


def target(entry: str = "loss:log_probs", *, python: dict[str, object] | None = None, **kernel: object) -> Target:
    """A target with one kernel, `fused`."""
    described = {
        "name": "fused",
        "entry": entry,
        "arguments": ARGUMENTS,
        "returns": ["log_prob[:, 0]", "entropy"],
        **kernel,
    }
    return Target.model_validate(
        {"name": "tiny", "repository": ".", "paths": ["."], "python": python or {}, "kernels": [described]}
    )


def measure(
    what: Target, repository: Path, sha: str, cases: list[str] = ONE_CASE, limits: Limits = LIMITS
) -> list[Measurement]:
    return measure_commit(what, repository, sha, attempt=uuid4(), case_ids=cases, limits=limits).measurements


def outcomes(measurements: list[Measurement]) -> dict[str, str]:
    return {measurement.case.id: measurement.outcome for measurement in measurements}


def test_a_commit_is_measured_with_its_control_beside_it(repository: Path, commit: Write) -> None:
    sha = commit("A kernel", {"loss.py": GOOD})
    attempt, told = UUID(int=7), list[str]()
    result = measure_commit(
        target(control="legacy"),
        repository,
        "main",
        attempt=attempt,
        case_ids=ONE_CASE,
        job_id=3,
        on_progress=told.append,
        limits=LIMITS,
    )
    assert (result.attempt, result.job, result.target, result.suite) == (attempt, 3, "tiny", "quick")
    assert (result.commit.sha, result.commit.subject) == (sha, "A kernel")
    fused, legacy = result.measurements
    assert (fused.kernel, fused.role, legacy.kernel, legacy.role) == ("fused", "kernel", "legacy", "control")
    assert fused.inputs_digest == legacy.inputs_digest is not None
    for measurement in (fused, legacy):
        assert measurement.outcome == "ok", measurement.notes
        assert measurement.values["callable"] == measurement.values["completes"] == [1.0]
        assert measurement.values["g_rel_l2_lp"][0] < 1e-6
        assert measurement.values["step_peak_bytes"][0] > measurement.case.logits_unit_bytes
    assert result.units == {name: BY_NAME[name].unit for m in result.measurements for name in m.values}
    assert result.environment.exact["threads"] == 1
    assert sorted(told) == [f"{name}: case 1 of 1, {ONE_CASE[0]}" for name in ("fused", "legacy")]
    assert Result.model_validate_json(result.model_dump_json()) == result


def test_a_target_may_have_packages_of_our_names(repository: Path, commit: Write) -> None:
    sha = commit(
        "Packages named like ours",
        {
            "lib/runners/__init__.py": "",
            "lib/runners/kernels.py": """
                import importlib, sys
                import dashboards
                from service import maths
                import service.wire

                def log_probs(*given, **named):
                    import runners.instruments
                    for ours in ("ulpwatch", "migrations", "runners.channel", "service.catalogue"):
                        try:
                            importlib.import_module(ours)
                        except ModuleNotFoundError:
                            continue
                        raise RuntimeError(f"{ours} of the measuring program can be imported")
                    assert runners.instruments.MARK == dashboards.MARK == service.wire.MARK == "theirs"
                    return maths.log_probs(*given, **named)
            """,
            "lib/runners/instruments.py": "MARK = 'theirs'",
            "lib/service/maths.py": GOOD,
            "lib/service/wire.py": "MARK = 'theirs'",
            "lib/dashboards/__init__.py": "MARK = 'theirs'",
        },
    )
    (measured,) = measure(target("runners.kernels:log_probs", python={"path": ["lib"]}), repository, sha)
    assert measured.outcome == "ok", measured.notes
    assert measured.values["lp_abs_max"][0] < 1e-5


def test_a_death_costs_the_case_it_happens_in_and_nothing_else(repository: Path, commit: Write) -> None:
    sha = commit(
        "Dies in many ways",
        {
            "good.py": GOOD,
            "loss.py": """
                import os, signal, sys
                from good import log_probs as good

                def log_probs(logits, tokens, with_entropy=True, with_entropy_grad=True):
                    WAYS.get(tuple(logits.shape), chat)()
                    return good(logits, tokens, with_entropy, with_entropy_grad)

                def crash():
                    print("about to crash", flush=True)
                    os.kill(os.getpid(), signal.SIGSEGV)

                def leave():
                    print("said on the way out", file=sys.stderr, flush=True)
                    os._exit(0)

                def scribble():
                    for name in os.listdir("/proc/self/fd"):
                        try:
                            os.write(int(name), b"result: perfect")
                        except OSError:
                            pass

                def chat():
                    print("x" * 100_000)

                WAYS = {(1, 1000): crash, (1, 4096): leave, (7, 4096): scribble}
            """,
        },
    )
    cases = [f"n{n}-v{v}-float32-off" for n, v in ((1, 1000), (1, 4096), (7, 1000), (7, 4096), (64, 1000))]
    measurements = measure(target(), repository, sha, cases)
    assert [m.case.id for m in measurements] == cases
    assert [m.outcome for m in measurements] == ["killed", "exited", "ok", "garbage", "ok"]
    killed, exited, between, garbage, last = measurements
    assert "signal 11 (SIGSEGV)" in killed.notes["outcome"]
    assert "about to crash" in killed.notes["outcome"]
    assert "exit status 0" in exited.notes["outcome"]
    assert "said on the way out" in exited.notes["outcome"]
    assert "not a frame" in garbage.notes["outcome"]
    for dead in (killed, exited, garbage):
        assert dead.values == {"callable": [1.0], "completes": [0.0]}
    for alive in (between, last):
        assert alive.values["completes"] == [1.0]
        assert "step_peak_bytes" in alive.values


def test_a_case_that_hangs_is_ended(repository: Path, commit: Write) -> None:
    source = """
        import time

        def log_probs(logits, tokens, with_entropy=True, with_entropy_grad=True):
            print("sleeping", flush=True)
            time.sleep(600)
    """
    sha = commit("Hangs", {"loss.py": source})
    measurements = measure(target(), repository, sha, CASES[:2], Limits(case_seconds=3, threads=1))
    assert [m.outcome for m in measurements] == ["timeout", "timeout"]
    for measurement in measurements:
        assert "nothing was heard for 3 s" in measurement.notes["outcome"]
        assert "printed last:\nsleeping" in measurement.notes["outcome"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import surely_not_installed", "ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("import os; print('bye', flush=True); os._exit(5)", "exit status 5; it printed last:\nbye"),
        ("def log_probs(logits, tokens, with_entropy=0): ...", "takes no parameter 'with_entropy_grad'"),
    ],
)
def test_an_entry_that_cannot_be_called_is_unmeasurable_with_its_reason(
    repository: Path, commit: Write, source: str, reason: str
) -> None:
    sha = commit("Broken", {"loss.py": source})
    measurements = measure(target(), repository, sha, CASES)
    assert outcomes(measurements) == dict.fromkeys(CASES, "unmeasurable")
    for measurement in measurements:
        assert measurement.values == {"callable": [0.0]}
        assert reason in measurement.notes["outcome"]


def test_an_exception_and_a_wrong_shape_are_recorded_with_their_words(repository: Path, commit: Write) -> None:
    source = GOOD + textwrap.dedent("""
        def log_probs_or_not(logits, tokens, with_entropy=True, with_entropy_grad=True):
            if not with_entropy:
                raise ValueError("cannot\\0 do without \\ud800 entropy")
            return log_probs(logits, tokens)[0][:, 0], None
    """)
    sha = commit("Raises", {"loss.py": source})
    raised, misshapen = measure(target("loss:log_probs_or_not"), repository, sha, [CASES[0], CASES[2]])
    assert raised.outcome == "raised"
    assert "cannot\ufffd do without \ufffd entropy" in raised.notes["outcome"]
    assert misshapen.values["result_shape"] == [0.0]
    assert "returned shape (1,), the target says (1, 1)" in misshapen.notes["result_shape"]
    assert raised.values["completes"] == [0.0]


def test_the_measured_process_sees_nothing_of_the_runners(
    repository: Path, commit: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ULPWATCH_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    source = """
        import json, os, resource, sys
        seen = {
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "stdin": os.read(0, 1).decode(),
            "arguments": [word for word in sys.argv if "secret" in word],
            "low_descriptors": [n for n in map(int, os.listdir("/proc/self/fd")) if 2 < n < 100 and is_pipe(n)],
            "is_in_its_parents_session": os.getsid(0) == os.getppid(),
            "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        }
        raise RuntimeError(json.dumps(seen))
    """
    helper = """
        def is_pipe(n):
            try:
                return os.readlink(f"/proc/self/fd/{n}").startswith("pipe:")
            except OSError:
                return False
    """
    source = textwrap.dedent(source).replace("seen = {", textwrap.dedent(helper) + "seen = {")
    sha = commit("Looks around", {"loss.py": source})
    (measured,) = measure(target(python={"env": {"MINE": "yes", "ULPWATCH_URL": "no"}}), repository, sha)
    seen = json.loads(measured.notes["outcome"].split("RuntimeError: ", 1)[1])
    environment = seen["environment"]
    assert environment["MINE"] == "yes"
    assert not [name for name in environment if name.startswith("ULPWATCH_")]
    assert "secret" not in environment.values()
    assert environment["HOME"] == environment["TMPDIR"] == seen["directory"] != str(Path.cwd())
    assert not Path(seen["directory"]).exists()
    assert (seen["stdin"], seen["arguments"], seen["low_descriptors"]) == ("", [], [])
    assert (seen["is_in_its_parents_session"], seen["core"]) == (True, 0)


def test_an_argument_is_left_out_before_the_commit_that_brought_it_and_only_there(
    repository: Path, commit: Write
) -> None:
    older = GOOD.replace("with_entropy_grad=True, keep_mask=None", "").replace("with_entropy_grad and ", "")
    older = older.replace("kept = ", "keep_mask = None\n    kept = ")
    before = commit("Before", {"loss.py": older})
    brought = commit("Brings them", {"loss.py": GOOD})
    lost = commit("Loses them", {"loss.py": older})
    what = target(
        arguments={**ARGUMENTS, "keep_mask": "keep_mask"},
        since={"with_entropy_grad": brought[:10], "keep_mask": brought},
    )
    cases = [*ONE_CASE, "n7-v4096-float32-gradient-mask"]
    (measured,) = measure(what, repository, before, cases)
    assert (measured.case.id, measured.outcome) == (ONE_CASE[0], "ok")
    assert "with_entropy_grad" in measured.notes["arguments"]
    assert outcomes(measure(what, repository, lost, cases)) == dict.fromkeys(cases, "unmeasurable")
    assert "since" not in measured.notes


def test_a_since_that_the_repository_does_not_hold_is_told_with_every_measurement(
    repository: Path, commit: Write
) -> None:
    older = GOOD.replace("with_entropy_grad=True, keep_mask=None", "keep_mask=None").replace(
        "with_entropy_grad and ", ""
    )
    lost, taken = commit("Lacks it", {"loss.py": older}), commit("Takes it", {"loss.py": GOOD})
    mistyped = target(since={"with_entropy_grad": "0123456789"})
    for sha, is_omitted in ((lost, True), (taken, False)):
        (measured,) = measure(mistyped, repository, sha)
        assert measured.outcome == "ok", "a commit that the repository does not hold says nothing against leaving out"
        assert ("with_entropy_grad" in measured.notes.get("arguments", "")) is is_omitted
        assert "commits that the repository does not hold: 0123456789" in measured.notes["since"]


def test_what_cannot_be_planned_is_refused_by_name(repository: Path, commit: Write) -> None:
    sha = commit("A kernel", {"loss.py": GOOD})
    for wrong, complaint in (
        ({"suite": "nosuch"}, "unknown suite 'nosuch'"),
        ({"suite": "huge"}, "suite 'huge' is for a CUDA device and this is a CPU: choose demo, parallel, precision, "),
        ({"kernels": ["nosuch"]}, "no kernel 'nosuch'; it has fused"),
        ({"case_ids": ["nosuch"]}, "no suite has a case 'nosuch'"),
        ({"case_ids": ["n7-v4096-float32-gradient-mask"]}, "none of the chosen cases"),
    ):
        with pytest.raises(PlanError, match=complaint):
            measure_commit(target(), repository, sha, attempt=uuid4(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no built-in kernel 'legcy'; known are"):
        measure_commit(target(control="legcy"), repository, sha, attempt=uuid4())


def test_an_import_that_fails_in_a_commit_with_submodules_says_so(repository: Path) -> None:
    link = ["git", "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},third_party/lib"]
    subprocess.run(link, cwd=repository, check=True)
    (repository / "third_party" / "lib").mkdir(parents=True)
    (repository / "loss.py").write_text("import lib")
    subprocess.run(["git", "add", "loss.py"], cwd=repository, check=True)
    person = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    subprocess.run(["git", *person, "commit", "--quiet", "--message", "Submodule"], cwd=repository, check=True)
    (measured,) = measure(target(), repository, "HEAD")
    assert measured.outcome == "unmeasurable"
    assert "No module named 'lib'" in measured.notes["outcome"]
    assert "the commit has submodules, whose files are not there: third_party/lib" in measured.notes["outcome"]


def test_the_ready_target_measures_a_repository_laid_out_like_slimes(repository: Path, commit: Write) -> None:
    path = "slime/utils/ppo_utils.py"
    signature = (
        "calculate_log_probs_and_entropy("
        "logits, tokens, tp_group, with_entropy=False, chunk_size=-1, log_prob_keep_mask=None"
    )
    body = """
        import good
        import torch.distributed as dist

        def {signature}):
            assert tp_group.size() == 1 and dist.get_rank(tp_group) == 0
            dist.all_reduce(logits.detach().amax(-1), op=dist.ReduceOp.MAX, group=tp_group)
            return good.log_probs(logits, tokens, with_entropy, {grad}, log_prob_keep_mask)
    """
    megatron = f"""
        def {signature}):
            from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
            loss = fused_vocab_parallel_cross_entropy(logits.clone().unsqueeze(1), tokens.unsqueeze(1), tp_group)
            return -loss, None
    """
    fused = body.format(signature=signature, grad="True")
    newer = body.format(signature=f"{signature}, with_entropy_grad=True", grad="with_entropy_grad")
    oldest = commit("On megatron-core", {path: megatron, "slime/__init__.py": "", "good.py": GOOD})
    older, newest = commit("Fused", {path: fused}), commit("Metric-only entropy", {path: newer})
    ready = load_target(ROOT / "targets" / "slime.toml")
    cases = {"kernels": ["fused"], "case_ids": ["n7-v1000-float32-off", "n7-v4096-float32-gradient-mask"]}

    def run(sha: str) -> list[Measurement]:
        return measure_commit(ready, repository, sha, attempt=uuid4(), limits=LIMITS, **cases).measurements  # type: ignore[arg-type]

    for sha, omitted in ((older, True), (newest, False)):
        plain, masked = run(sha)
        assert plain.outcome == masked.outcome == "ok", (plain.notes, masked.notes)
        assert ("with_entropy_grad" in plain.notes.get("arguments", "")) is omitted
        assert plain.values["collectives"][0] == 1.0
        assert plain.values["own_thread"] == [1.0]
        assert masked.values["lp_abs_max"][0] < 1e-5
    plain = run(oldest)[0]
    if is_installed("megatron-core"):
        assert plain.outcome == "ok", plain.notes
        assert plain.values["g_mantissa_bits"] == [8.0]
    else:
        assert plain.outcome == "unmeasurable"
        assert "No module named 'megatron'" in plain.notes["outcome"]
        assert "requires megatron-core, which is not installed: install" in plain.notes["outcome"]
        assert "baselines extra" in plain.notes["outcome"]


def is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
