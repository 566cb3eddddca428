"""The story repository: its commits repeat, change what they say they change, and their kernels do what is told."""

import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from runners.instruments.memory import MemoryReading, measure_memory
from runners.instruments.subject import Options, Subject
from runners.instruments.work import WorkReading, measure_work
from runners.kernels.inputs import Inputs, make_inputs
from runners.story.story import KERNEL_PATH, chapters, story_target, target_file, write_story
from runners.suites import suite
from runners.targets import fitting_cases, load_target
from service.catalogue import Family

UNIT_BYTES = 64 * 4096 * 4
SMALL_BYTES = 16 * 1024
TAKES = frozenset({"logits", "targets", "keep_mask", "chunk_size", "with_entropy", "with_entropy_grad"})
CHAPTERS = {chapter.key: chapter for chapter in chapters()}
SOUND = ("legacy", "fused", "repair", "loop")


def function(key: str) -> Callable[..., Any]:
    """The story's function as of a commit."""
    names: dict[str, Any] = {}
    exec(compile(CHAPTERS[key].source, f"{key}.py", "exec"), names)
    called: Callable[..., Any] = names["log_probs_and_entropy"]
    return called


def subject(key: str) -> Subject:
    """The same under our own signature."""
    called = function(key)

    def run(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
        chunk_size = options.pop("chunk_size", None)
        return called(logits, targets, chunk_size=-1 if chunk_size is None else chunk_size, **options)

    return Subject(key, run, takes=TAKES)


def memory(key: str, inputs: Inputs) -> MemoryReading:
    """The second reading, after a warm-up."""
    measured = subject(key)
    measure_memory(measured, inputs, Options())
    return measure_memory(measured, inputs, Options())


def work(key: str, inputs: Inputs, how: Options | None = None) -> WorkReading:
    """What forward + backward dispatches."""
    return measure_work(subject(key), inputs, how or Options())


def gradient(output: torch.Tensor, logits: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor | None:
    """The gradient of one output used alone."""
    return torch.autograd.grad(output, logits, upstream, allow_unused=True)[0]


def git(directory: Path, *arguments: str) -> str:
    """Output of a git command."""
    done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_same_story_has_the_same_shas_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_story(tmp_path / "first")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert write_story(tmp_path / "second") == first
    assert len({commit.sha for commit in first}) == len(CHAPTERS)


def test_a_story_that_is_there_already_is_left_as_it_is(tmp_path: Path) -> None:
    commits = write_story(tmp_path / "story")
    (tmp_path / "story" / "note").write_text("mine")
    assert write_story(tmp_path / "story") == commits
    assert (tmp_path / "story" / "note").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["story"]


def test_an_outdated_story_is_written_anew(tmp_path: Path) -> None:
    commits = write_story(tmp_path / "story")
    git(tmp_path / "story", "reset", "--quiet", "--hard", commits[2].sha)
    assert write_story(tmp_path / "story") == commits
    assert git(tmp_path / "story", "rev-parse", "main") == commits[-1].sha


def test_a_directory_of_somebody_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "story").mkdir()
    (tmp_path / "story" / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="no story repository"):
        write_story(tmp_path / "story")
    assert (tmp_path / "story" / "thesis.txt").read_text() == "precious"


def test_each_commit_changes_the_kernel_alone_or_the_readme_alone(tmp_path: Path) -> None:
    commits = write_story(tmp_path / "story")
    for before, after in pairwise(commits):
        changed = git(tmp_path / "story", "diff", "--name-only", before.sha, after.sha).split()
        assert changed == (["README.md"] if after.expected.inherited else [KERNEL_PATH]), after.key


def test_the_table_tells_the_history_that_is_to_be_found() -> None:
    told = [
        (key, chapter.expected.state, {str(f) for f in chapter.expected.findings}) for key, chapter in CHAPTERS.items()
    ]
    assert told == [
        ("legacy", "no-baseline", set()),
        ("fused", "regress", {"memory"}),
        ("lean", "regress", {"contract", "precision"}),
        ("docs", "pass", set()),
        ("repair", "improve", set()),
        ("cast", "regress", {"precision"}),
        ("cast-revert", "pass", set()),
        ("loop", "regress", {"work"}),
        ("loop-revert", "pass", set()),
        ("mask", "regress", {"contract", "precision"}),
    ]


def test_every_finding_of_a_regression_but_the_last_is_over_when_the_table_says_so() -> None:
    open_families: set[Family] = set()
    for chapter in chapters():
        assert chapter.expected.recovered <= open_families, chapter.key
        open_families = (open_families - chapter.expected.recovered) | chapter.expected.findings
    assert open_families == CHAPTERS["mask"].expected.findings


def test_a_revert_restores_the_source_it_reverts_to() -> None:
    assert CHAPTERS["cast-revert"].source == CHAPTERS["loop-revert"].source == CHAPTERS["repair"].source


def test_the_target_file_says_what_the_target_says(tmp_path: Path) -> None:
    repository = tmp_path / 'with "quotes"'
    (tmp_path / "story.toml").write_text(target_file(repository))
    assert load_target(tmp_path / "story.toml") == story_target(repository)
    assert story_target(repository).repository == str(repository)


def test_every_case_of_the_demo_suite_can_be_asked_of_the_story() -> None:
    (kernel,) = story_target(Path("story")).kernels
    assert fitting_cases(kernel, suite("demo")) == list(suite("demo"))


@pytest.mark.parametrize("key", SOUND)
@pytest.mark.parametrize("chunk_size", [-1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sound_kernel_agrees_with_float64(key: str, chunk_size: int, masked: bool) -> None:
    inputs = make_inputs(tokens=7, vocabulary=33, keep_mask=masked)
    logits = inputs.logits.clone().requires_grad_()
    exact = inputs.logits.double().requires_grad_()
    rows = torch.arange(7)
    scores = exact
    if inputs.keep_mask is not None:
        kept = inputs.keep_mask.clone()
        kept[rows, inputs.targets] = True
        scores = exact.masked_fill(~kept, float("-inf"))
    exact_log_prob = scores.log_softmax(1)[rows, inputs.targets]
    exact_entropy = torch.special.entr(exact.softmax(1)).sum(1)

    log_prob, entropy = function(key)(logits, inputs.targets, True, True, chunk_size, inputs.keep_mask)

    torch.testing.assert_close(log_prob.double(), exact_log_prob, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), exact_entropy, atol=2e-5, rtol=0)
    total = (log_prob * inputs.upstream_log_prob).sum() + (entropy * inputs.upstream_entropy).sum()
    exact_total = (exact_log_prob * inputs.upstream_log_prob).sum() + (exact_entropy * inputs.upstream_entropy).sum()
    (found,) = torch.autograd.grad(total, logits)
    (wanted,) = torch.autograd.grad(exact_total, exact)
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("key", [*SOUND, "cast", "mask"])
def test_each_output_used_alone_gives_a_gradient(key: str) -> None:
    inputs = make_inputs(tokens=4, vocabulary=16)
    logits = inputs.logits.clone().requires_grad_()
    for output in function(key)(logits, inputs.targets, True, True):
        again = function(key)(logits, inputs.targets, True, True)
        del output
        assert gradient(again[0], logits, inputs.upstream_log_prob) is not None
    assert gradient(function(key)(logits, inputs.targets, True, True)[1], logits, inputs.upstream_entropy) is not None


def test_the_lean_commit_gives_no_gradient_when_one_output_is_unused() -> None:
    inputs = make_inputs(tokens=4, vocabulary=16)
    logits = inputs.logits.clone().requires_grad_()
    log_prob, _ = function("lean")(logits, inputs.targets, True, True)
    _, entropy = function("lean")(logits, inputs.targets, True, True)
    assert gradient(log_prob, logits, inputs.upstream_log_prob) is None
    assert gradient(entropy, logits, inputs.upstream_entropy) is None
    value_only, _ = function("lean")(logits, inputs.targets, True, False)
    assert gradient(value_only, logits, inputs.upstream_log_prob) is not None


@pytest.mark.parametrize("key", [*SOUND, "cast"])
def test_only_the_cast_puts_the_log_prob_gradient_on_the_bfloat16_grid(key: str) -> None:
    inputs = make_inputs(tokens=4, vocabulary=16, distribution="flat")
    logits = inputs.logits.clone().requires_grad_()
    log_prob, _ = function(key)(logits, inputs.targets, True, True)
    found = gradient(log_prob, logits, inputs.upstream_log_prob)
    assert found is not None
    assert torch.equal(found, found.bfloat16().float()) == (key == "cast")


def test_the_last_commit_loses_a_token_that_the_keep_mask_drops() -> None:
    logits, tokens = torch.randn(2, 8), torch.tensor([3, 5])
    dropped = torch.ones(2, 8, dtype=torch.bool)
    dropped[0, 3] = False
    assert function("loop-revert")(logits, tokens, keep_mask=dropped)[0].isfinite().all()
    assert function("mask")(logits, tokens, keep_mask=dropped)[0].isfinite().tolist() == [False, True]


@pytest.mark.parametrize(("key", "units"), [("legacy", 4.5), ("fused", 5.0), ("lean", 2.0), ("repair", 2.0)])
def test_the_peak_of_a_step_is_the_one_in_the_story(key: str, units: float) -> None:
    peak = memory(key, make_inputs(tokens=64, vocabulary=4096)).step_peak_bytes
    assert units * UNIT_BYTES <= peak <= units * UNIT_BYTES + SMALL_BYTES


@pytest.mark.parametrize("masked", [False, True])
def test_the_lean_commit_takes_no_more_memory_anywhere_than_the_legacy_pair(masked: bool) -> None:
    inputs = make_inputs(tokens=16, vocabulary=1024, keep_mask=masked)
    before, after = memory("legacy", inputs), memory("lean", inputs)
    for name in ("forward_peak_bytes", "step_peak_bytes", "saved_bytes", "largest_allocation_bytes"):
        assert getattr(after, name) <= getattr(before, name) + 4096, name


def test_only_the_row_loop_dispatches_more_operations_with_more_rows() -> None:
    for key in (*SOUND, "cast", "mask"):
        few, many = (work(key, make_inputs(tokens=n, vocabulary=64)).operations for n in (4, 16))
        assert (many > few) == (key == "loop"), key


@pytest.mark.parametrize("how", [Options(), Options("value", chunk_size=4)], ids=["gradient", "value in chunks"])
def test_no_commit_before_the_cast_adds_work(how: Options) -> None:
    inputs = make_inputs(tokens=16, vocabulary=1024)
    readings = [work(key, inputs, how) for key in ("legacy", "fused", "lean", "repair")]
    for before, after in pairwise(readings):
        assert after.operations <= before.operations + 1
        assert after.traffic_bytes <= 1.01 * before.traffic_bytes


@pytest.mark.parametrize("key", [*CHAPTERS])
def test_a_token_out_of_range_is_a_clear_error(key: str) -> None:
    with pytest.raises(ValueError, match=r"tokens must lie in \[0, 8\)"):
        function(key)(torch.randn(1, 8), torch.tensor([8]))
