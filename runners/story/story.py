"""Writes the story repository and holds the one table of its commits with the verdicts they deserve.

Measures and judges nothing. The same commits have the same shas on every machine.
"""

import json
import os
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from service.catalogue import Family
from service.wire import Target

KERNEL_PATH = "lossfn/log_prob.py"
FIRST_COMMIT_EPOCH = 1_767_600_000  # 2026-01-05 08:00 UTC; one commit a day
DAY_SECONDS = 86_400

README = """# lossfn

`lossfn.log_prob.log_probs_and_entropy(logits, tokens, ...)` gives the log-prob of each sampled token and the entropy
of each row: the two figures that a policy loss needs.
"""
README_NOTES = """
## Notes

- `chunk_size` bounds the rows that are worked on at a time; -1 takes all of them at once.
- `keep_mask` restricts the log-prob's softmax, never the entropy.
- Pass `with_entropy_grad=False` when the entropy is only reported.
"""

TARGET_TOML = """# The story repository of `ulpwatch demo`.
name = "story"
repository = {repository}
branch = "main"
paths = ["lossfn"]
suite = "demo"

[[kernels]]
name = "fused"
entry = "lossfn.log_prob:log_probs_and_entropy"
returns = ["log_prob", "entropy"]
control = "legacy"

[kernels.arguments]
logits = "logits"
targets = "tokens"
with_entropy = "with_entropy"
with_entropy_grad = "with_entropy_grad"
chunk_size = "chunk_size"
keep_mask = "keep_mask"

[kernels.absent]
chunk_size = -1

[require]
devices = ["cpu"]
metrics = ["exact", "numeric", "contract"]
"""


@dataclass(frozen=True, slots=True)
class Expected:
    """The verdict that a commit deserves. `findings` are the families that must regress, `also` those that may beside
    them, `recovered` those whose earlier finding must be over; an inherited verdict measures nothing.
    """

    state: str
    findings: frozenset[Family] = frozenset()
    also: frozenset[Family] = frozenset()
    recovered: frozenset[Family] = frozenset()
    inherited: bool = False


@dataclass(frozen=True, slots=True)
class Chapter:
    """A commit before it is written: its key, subject, whole kernel source and README, and the expected verdict."""

    key: str
    subject: str
    source: str
    readme: str
    expected: Expected


@dataclass(frozen=True, slots=True)
class StoryCommit:
    """A written commit of the story with the verdict that it deserves."""

    key: str
    sha: str
    subject: str
    expected: Expected


def chapters() -> tuple[Chapter, ...]:
    """The history, oldest first: the one table of what the story's commits do and deserve."""
    legacy, fused, lean = (_source(name) for name in ("legacy", "fused", "lean"))
    repaired = _edit(lean, REPAIR)
    cast, looped, unkept = (_edit(repaired, edits) for edits in (BFLOAT16_CAST, ROW_LOOP, TARGET_NOT_KEPT))
    memory, work, precision, contract = Family.MEMORY, Family.WORK, Family.PRECISION, Family.CONTRACT
    notes = README + README_NOTES
    return (
        Chapter("legacy", "Log-probs and entropy, each with its own softmax", legacy, README, Expected("no-baseline")),
        Chapter(
            "fused",
            "Fuse log-prob and entropy into one function",
            fused,
            README,
            Expected("regress", findings=frozenset({memory})),
        ),
        Chapter(
            "lean",
            "Save one softmax only and skip unused gradients",
            lean,
            README,
            Expected("regress", findings=frozenset({contract, precision}), recovered=frozenset({memory})),
        ),
        Chapter("docs", "Document the options", lean, notes, Expected("pass", inherited=True)),
        Chapter(
            "repair",
            "Give a gradient when only one output is used",
            repaired,
            notes,
            Expected("improve", recovered=frozenset({contract, precision})),
        ),
        Chapter(
            "cast",
            "Cast the log-prob gradient to bfloat16",
            cast,
            notes,
            Expected("regress", findings=frozenset({precision}), also=frozenset({memory, work})),
        ),
        Chapter(
            "cast-revert",
            'Revert "Cast the log-prob gradient to bfloat16"',
            repaired,
            notes,
            Expected("pass", recovered=frozenset({precision})),
        ),
        Chapter(
            "loop",
            "Add the token's gradient row by row",
            looped,
            notes,
            Expected("regress", findings=frozenset({work})),
        ),
        Chapter(
            "loop-revert",
            'Revert "Add the token\'s gradient row by row"',
            repaired,
            notes,
            Expected("pass", recovered=frozenset({work})),
        ),
        Chapter(
            "mask",
            "Take the keep-mask as it comes",
            unkept,
            notes,
            Expected("regress", findings=frozenset({contract, precision})),
        ),
    )


REPAIR = (
    ("ctx.set_materialize_grads(False)", "ctx.set_materialize_grads(with_entropy and with_entropy_grad)"),
    (
        """\
        if upstream[0] is None or (ctx.with_entropy_grad and upstream[1] is None):
            return None, None, None, None, None
""",
        "",
    ),
    (
        "def backward(ctx: Any, *upstream: Any) -> tuple[torch.Tensor | None, None, None, None, None]:",
        "def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:",
    ),
)
BFLOAT16_CAST = (
    (
        "        idle = scale == 0\n",
        """\
        log_prob_gradient = softmax.mul(scale.neg()).scatter_add_(1, tokens[:, None], scale).bfloat16().float()
        idle = scale == 0
""",
    ),
    (".addcmul_(softmax, scale, value=-1)\n", ".add_(log_prob_gradient)\n"),
    ("            gradient = softmax.mul(scale.neg())\n", "            gradient = log_prob_gradient\n"),
    ("        gradient.scatter_add_(1, tokens[:, None], scale)\n", ""),
)
ROW_LOOP = (
    (
        "        gradient.scatter_add_(1, tokens[:, None], scale)\n",
        """\
        for row, token in enumerate(tokens.tolist()):
            gradient[row, token] += scale[row, 0]
""",
    ),
)
TARGET_NOT_KEPT = (
    ("keep-mask and, always, of the token itself.", "keep-mask."),
    ("dropped = keep.logical_not().scatter_(1, tokens[:, None], False)", "dropped = keep.logical_not()"),
)


def _source(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")


def _edit(source: str, edits: tuple[tuple[str, str], ...]) -> str:
    for before, after in edits:
        if source.count(before) != 1:
            raise ValueError(f"the story's edit needs this text exactly once in its source: {before!r}")
        source = source.replace(before, after)
    return source


def story_target(repository: Path) -> Target:
    """How the story's kernel is called, as a target named `story`."""
    return Target.model_validate(tomllib.loads(target_file(repository)))


def target_file(repository: Path) -> str:
    """The same as a target file, for the commands that take one."""
    return TARGET_TOML.format(repository=json.dumps(str(repository), ensure_ascii=False))


def write_story(directory: Path) -> list[StoryCommit]:
    """Write the story to `directory`, oldest commit first; a repository that already holds it is left as it is.

    Raises FileExistsError if the directory holds anything else than an earlier story, RuntimeError if git fails.
    """
    staging = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    commits = _write(staging)
    if not directory.exists():
        staging.rename(directory)
        return commits
    _require_story(directory)
    if _git(directory, "rev-parse", "main") == commits[-1].sha:
        shutil.rmtree(staging)
        return commits
    shutil.rmtree(directory)
    staging.rename(directory)
    return commits


def _write(directory: Path) -> list[StoryCommit]:
    _git(directory, "init", "--quiet", "--initial-branch=main")
    (directory / "lossfn").mkdir()
    (directory / "lossfn" / "__init__.py").write_text("", encoding="utf-8")
    return [_commit(directory, chapter, day) for day, chapter in enumerate(chapters())]


def _commit(directory: Path, chapter: Chapter, day: int) -> StoryCommit:
    (directory / KERNEL_PATH).write_text(chapter.source, encoding="utf-8", newline="\n")
    (directory / "README.md").write_text(chapter.readme, encoding="utf-8", newline="\n")
    _git(directory, "add", "--all")
    _git(directory, "commit", "--quiet", "--message", chapter.subject, epoch=FIRST_COMMIT_EPOCH + day * DAY_SECONDS)
    return StoryCommit(chapter.key, _git(directory, "rev-parse", "HEAD"), chapter.subject, chapter.expected)


def _require_story(directory: Path) -> None:
    if not (directory / ".git").is_dir() or not (directory / KERNEL_PATH).is_file():
        raise FileExistsError(f"{directory} exists and is no story repository: name another directory or remove it")


def _git(directory: Path, *arguments: str, epoch: int = FIRST_COMMIT_EPOCH) -> str:
    """Run git apart from the user's configuration, hooks and identity, so that shas repeat."""
    identity = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in _IDENTITY.items()}
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(directory),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_DEFAULT_HASH": "sha1",
        "GIT_AUTHOR_DATE": f"{epoch} +0000",
        "GIT_COMMITTER_DATE": f"{epoch} +0000",
        **identity,
    }
    command = ["git", "-C", str(directory), "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"git {arguments[0]} failed in {directory}: {done.stderr.strip()}")
    return done.stdout.strip()


_IDENTITY = {"NAME": "Story", "EMAIL": "story@example.invalid"}
