"""Commits of a repository: resolve, order, describe and write out their files, without touching the repository.

Nothing of the measured repository runs here: no hook, filter, attribute or transport; files are written as they are
stored. Needs git 2.33 or newer on the PATH. Knows neither targets nor measurements.
"""

import errno
import fcntl
import hashlib
import os
import posixpath
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from service.wire import Commit, paths_digest

_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_SCP_URL = re.compile(r"^[\w.-]+@[\w.-]+:(?!:)")
_USER_INFO = re.compile(r"(?<=://)[^/@]*@")
_FULL_SHA = re.compile(r"^[0-9a-f]{40}$")

# A repository's own configuration can name commands. These switch off each kind that the plumbing used here can reach;
# with no transport allowed, a partial clone cannot fetch what it lacks either.
_SAFE = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "protocol.allow": "never",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "safe.directory": "*",
}
_SAFE_ENVIRONMENT = {
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_LITERAL_PATHSPECS": "1",
}


# What the operating system says to a file, not to its host's state.
_FAULTS_OF_THE_COMMIT = frozenset(
    {errno.ENOENT, errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EILSEQ}
)


class CheckoutError(Exception):
    """A repository or a revision that cannot be read. The message says what to do."""


class UnreachableError(CheckoutError):
    """A remote repository did not answer: worth another try."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A readable repository: its git directory, and the name that messages give it (no credentials)."""

    git_dir: Path
    shown: str


def open_repository(repository: str | Path, *, cache: Path | None = None, wanted: str | None = None) -> Repository:
    """Open a local repository by path, or a bare mirror of a URL that is kept and refreshed under `cache`.

    `wanted`, a full commit id that a mirror holds already, saves the refresh. Raises CheckoutError if there is no
    repository, it is a shallow clone or a URL comes without a cache; UnreachableError if the URL does not answer.
    """
    if is_url(str(repository)):
        return _mirror(str(repository), cache, wanted)
    path = Path(repository)
    git_dir = _git_dir(path)
    if git_dir is None:
        raise CheckoutError(f"{path} is not a git repository: give the path of one, or its URL")
    opened = Repository(git_dir, str(path))
    if _output(opened, "rev-parse", "--is-shallow-repository").strip() == b"true":
        raise CheckoutError(f"{path} is a shallow clone and lacks history: run `git fetch --unshallow` in it first")
    return opened


def _git_dir(path: Path) -> Path | None:
    """The git directory of a work tree or bare repository at exactly this path, not of one that lies around it."""
    if not path.is_dir():
        return None
    around = {"GIT_CEILING_DIRECTORIES": str(path.absolute().parent)}
    found = _run_git(["rev-parse", "--absolute-git-dir"], cwd=path, env=around)
    return None if found.returncode else Path(os.fsdecode(found.stdout).rstrip("\n"))


def is_url(repository: str) -> bool:
    """Whether a target's `repository` names a remote one (scheme://... or user@host:...), not a local path."""
    return bool(_URL.match(repository) or _SCP_URL.match(repository))


def resolve(repository: Repository, revision: str) -> str:
    """The full id of the commit that a branch, tag or (abbreviated) id names; CheckoutError if there is none."""
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    sha = found.stdout.decode().strip()
    if found.returncode or not _FULL_SHA.match(sha):
        raise CheckoutError(
            f"{repository.shown} has no commit {revision!r}: check the spelling, or fetch it into the repository first"
        )
    return sha


def commits(repository: Repository, span: str) -> list[str]:
    """The commits of `A..B`, ancestors before descendants, A included as the first; of `B` alone, only B.

    Raises CheckoutError for an unknown end, for an A that does not lie in the history of B, and for `A...B`.
    """
    if "..." in span:
        raise CheckoutError(f"range {span!r}: write A..B, the baseline and the last commit")
    if ".." not in span:
        return [resolve(repository, span)]
    first, last = (resolve(repository, end or "HEAD") for end in span.split("..", 1))
    if not is_ancestor(repository, first, last):
        raise CheckoutError(
            f"range {span!r}: {first[:7]} does not lie in the history of {last[:7]}: write the older commit first"
        )
    listed = _output(repository, "rev-list", "--topo-order", "--reverse", f"{first}..{last}")
    return [first, *listed.decode().split()]


def is_ancestor(repository: Repository, ancestor: str, descendant: str) -> bool:
    """Whether commit `ancestor` is `descendant` or lies in its history."""
    found = _git(repository, "merge-base", "--is-ancestor", ancestor, descendant)
    if found.returncode not in (0, 1):
        raise CheckoutError(_failure(repository, found))
    return found.returncode == 0


def describe(repository: Repository, sha: str, paths: Sequence[str]) -> Commit:
    """A commit as the wire knows it. Raises CheckoutError for one that the wire has no words for, such as a date of
    no year.
    """
    form = "--format=%P%x00%ct%x00%an%x00%s"
    line = _output(repository, "rev-list", "--no-walk", "--no-commit-header", "--encoding=UTF-8", form, sha)
    parents, committed, author, subject = line.decode(errors="replace").rstrip("\n").split("\0")
    try:
        return Commit(
            sha=sha,
            parents=parents.split(),
            author=author[:200],
            subject=subject[:500],
            committed_at=datetime.fromtimestamp(int(committed), UTC),
            watched_digest=watched_digest(repository, sha, paths),
            watched_paths=paths_digest(paths),
        )
    except (ValueError, OverflowError) as error:
        wrong = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"its date is {committed!r} seconds"
        raise CheckoutError(f"commit {sha} of {repository.shown} cannot be described: {wrong}") from error


def watched_digest(repository: Repository, sha: str, paths: Sequence[str]) -> str | None:
    """The SHA-256 of what `git ls-tree -r -z SHA -- paths` lists, modes, object ids and names of the watched files, and
    the same of what they are links to, or lie behind links, within the commit. None if there is no such file.
    """
    listed, pending = b"", list(paths)
    seen: set[str] = set()
    while pending:
        seen |= set(pending)
        found = _output(repository, "ls-tree", "-r", "-z", "--full-tree", sha, "--", *pending)
        listed += found
        meant = {*_links(repository, found).values(), *_behind_links(repository, sha, pending)}
        pending = sorted(path for path in meant - seen if not path.startswith(("/", "../")) and path != "..")
    return hashlib.sha256(listed).hexdigest() if listed else None


def _links(repository: Repository, listed: bytes) -> dict[str, str]:
    """The symbolic links among what `git ls-tree -z` listed, each with the path that it names."""
    links = [(object_id, name) for mode, object_id, name in _parsed(listed) if mode == "120000"]
    contents = _blobs(repository, [object_id for object_id, _ in links]) if links else iter(())
    return {
        name: posixpath.normpath(posixpath.join(posixpath.dirname(name), os.fsdecode(content)))
        for (_, name), content in zip(links, contents, strict=True)
    }


def _behind_links(repository: Repository, sha: str, paths: Sequence[str]) -> set[str]:
    """Where those of `paths` lie that have a symbolic link for a directory."""
    above = sorted({str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"."})
    if not above:
        return set()
    links = _links(repository, _output(repository, "ls-tree", "-z", "--full-tree", sha, "--", *above))
    return {
        posixpath.normpath(posixpath.join(target, posixpath.relpath(path, link)))
        for link, target in links.items()
        for path in paths
        if PurePosixPath(path).is_relative_to(link)
    }


def changing_watched_paths(commits: Sequence[Commit]) -> list[Commit]:
    """Those of `commits` that have to be measured: their watched paths equal those of no parent among them. A commit
    that holds none of the watched paths inherits from nobody.
    """
    digests = {commit.sha: commit.watched_digest for commit in commits}
    return [
        commit
        for commit in commits
        if commit.watched_digest is None or commit.watched_digest not in map(digests.get, commit.parents)
    ]


@contextmanager
def checked_out(repository: Repository, sha: str) -> Iterator[Path]:
    """The files of a commit in a new temporary directory, which goes away at the end."""
    directory = Path(tempfile.mkdtemp(prefix="ulpwatch-checkout-"))
    try:
        write_files(repository, sha, directory)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_files(repository: Repository, sha: str, directory: Path) -> None:
    """Write the files of a commit into an empty directory, byte for byte as stored: no filter, no line-end
    conversion, no large-file download; submodules are left out. Raises CheckoutError for a tree that git would refuse,
    and for a file that no file system of this kind can hold.
    """
    entries = _entries(repository, sha)
    blobs = _blobs(repository, [object_id for _, object_id, _ in entries])
    links: list[tuple[Path, bytes]] = []
    for (mode, _, name), content in zip(entries, blobs, strict=True):
        path = directory / _checked(name)
        with _writable(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            if mode == "120000":
                links.append((path, content))
            else:
                path.write_bytes(content)
                path.chmod(0o755 if mode == "100755" else 0o644)
    for path, content in links:  # last, so that no file is written through one
        with _writable(str(path.relative_to(directory))):
            path.symlink_to(os.fsdecode(content))


@contextmanager
def _writable(name: str) -> Iterator[None]:
    """Turn what is wrong with a file's name, a link's target or their tree into CheckoutError; a full disk is not."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in _FAULTS_OF_THE_COMMIT:
            raise
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckoutError(f"the commit holds {name!r}, which cannot be written: {words}") from error


def submodules(repository: Repository, sha: str) -> list[str]:
    """The paths of a commit's submodules, whose files are not written out."""
    listed = _output(repository, "ls-tree", "-r", "-z", "--full-tree", sha)
    return [name for mode, _, name in _parsed(listed) if mode == "160000"]


def _entries(repository: Repository, sha: str) -> list[tuple[str, str, str]]:
    """(mode, object id, path) of every file and symbolic link of a commit."""
    listed = _output(repository, "ls-tree", "-r", "-z", "--full-tree", sha)
    return [entry for entry in _parsed(listed) if entry[0] != "160000"]


def _parsed(listed: bytes) -> list[tuple[str, str, str]]:
    """(mode, object id, path) of what `git ls-tree -r -z` lists: files, symbolic links and submodules."""
    entries = []
    for record in filter(None, listed.split(b"\0")):
        facts, name = record.split(b"\t", 1)
        mode, _, object_id = facts.decode().split()
        entries.append((mode, object_id, os.fsdecode(name)))
    return entries


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or {"..", ".git"} & set(path.parts):
        raise CheckoutError(f"the commit holds a file named {name!r}, which may not be written")
    return path


def _blobs(repository: Repository, object_ids: Sequence[str]) -> Iterator[bytes]:
    """The contents of blobs, one at a time, in order."""
    asked = "".join(f"{object_id}\n" for object_id in object_ids).encode()
    with tempfile.TemporaryFile() as questions:
        questions.write(asked)
        questions.seek(0)
        process = subprocess.Popen(
            _command(repository, "cat-file", "--batch"),
            stdin=questions,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
    with process:
        assert process.stdout is not None
        for object_id in object_ids:
            header = process.stdout.readline().decode().split()
            if len(header) != 3:
                raise CheckoutError(f"{repository.shown} lacks object {object_id}: run `git fsck`, or fetch it again")
            size = int(header[2])
            content = process.stdout.read(size + 1)
            yield content[:size]


# --- Mirrors of URLs ------------------------------------------------------------------------------------------------


def _mirror(url: str, cache: Path | None, wanted: str | None) -> Repository:
    shown = _USER_INFO.sub("", url)
    if cache is None:
        raise CheckoutError(f"{shown} is a URL: a cache directory is needed to keep a mirror of it")
    directory = cache / "mirrors" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.git"
    mirror = Repository(directory, shown)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            _clone(url, mirror)
        elif wanted is None or not _FULL_SHA.match(wanted) or not _has(mirror, wanted):
            refresh = ["fetch", "--quiet", "--prune", "--end-of-options", url, "+refs/*:refs/*"]
            _transport(mirror, ["--git-dir", str(directory), *refresh])
    return mirror


def _clone(url: str, mirror: Repository) -> None:
    """Clone beside the final place and rename, so that a broken clone is never taken for a mirror. Its configuration
    does not keep the credentials of the URL.
    """
    with tempfile.TemporaryDirectory(dir=mirror.git_dir.parent) as beside:
        fresh = Path(beside) / "fresh"
        _transport(mirror, ["clone", "--quiet", "--mirror", "--", url, str(fresh)])
        _transport(mirror, ["--git-dir", str(fresh), "config", "remote.origin.url", mirror.shown])
        fresh.rename(mirror.git_dir)


def _has(repository: Repository, sha: str) -> bool:
    return _git(repository, "cat-file", "-e", f"{sha}^{{commit}}").returncode == 0


def _transport(mirror: Repository, arguments: list[str]) -> None:
    """Run git with the operator's own configuration, which may hold what the remote asks for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ULPWATCH_", "GIT_"))}
    settings = [
        f for name in ("core.hooksPath", "gc.auto", "maintenance.auto") for f in ("-c", f"{name}={_SAFE[name]}")
    ]
    done = subprocess.run(
        ["git", *settings, *arguments],
        env={**kept, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        reason = _USER_INFO.sub("", done.stderr.decode(errors="replace").strip())
        raise UnreachableError(f"{mirror.shown} could not be fetched: {reason}")


# --- git ------------------------------------------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), **_SAFE_ENVIRONMENT}


def _settings() -> list[str]:
    return [flag for name, value in _SAFE.items() for flag in ("-c", f"{name}={value}")]


def _command(repository: Repository, *arguments: str) -> list[str]:
    return ["git", *_settings(), "--git-dir", str(repository.git_dir), *arguments]


def _run_git(arguments: list[str], *, cwd: Path | None, env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", *_settings(), *arguments],
        cwd=cwd,
        env={**_environment(), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


def _git(repository: Repository, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return _run_git(["--git-dir", str(repository.git_dir), *arguments], cwd=None, env={})


def _output(repository: Repository, *arguments: str) -> bytes:
    done = _git(repository, *arguments)
    if done.returncode:
        raise CheckoutError(_failure(repository, done))
    return done.stdout


def _failure(repository: Repository, done: subprocess.CompletedProcess[bytes]) -> str:
    return f"git failed on {repository.shown}: {done.stderr.decode(errors='replace').strip()}"
