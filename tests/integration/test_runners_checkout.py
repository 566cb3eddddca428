"""Real git repositories: what the runner reads of them, and that it leaves them alone."""

import errno
import hashlib
import os
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runners.checkout import (
    CheckoutError,
    UnreachableError,
    changing_watched_paths,
    checked_out,
    commits,
    describe,
    is_ancestor,
    is_url,
    open_repository,
    resolve,
    submodules,
    write_files,
)

Git = Callable[..., str]


@pytest.fixture
def work_tree(tmp_path: Path) -> Path:
    directory = tmp_path / "repository"
    directory.mkdir()
    return directory


@pytest.fixture
def git(work_tree: Path) -> Git:
    """Run git in the work tree, as a fixed person at a fixed time."""
    person = {
        "GIT_AUTHOR_NAME": "Ada",
        "GIT_AUTHOR_EMAIL": "ada@example.org",
        "GIT_COMMITTER_NAME": "Ada",
        "GIT_COMMITTER_EMAIL": "ada@example.org",
        "GIT_AUTHOR_DATE": "2026-01-02T03:04:05+02:00",
        "GIT_COMMITTER_DATE": "2026-01-02T03:04:05+02:00",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=work_tree,
            env={**os.environ, **person},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    run("init", "--quiet", "--initial-branch=main")
    return run


@pytest.fixture
def commit(work_tree: Path, git: Git) -> Callable[..., str]:
    """Write files, commit them, and return the commit's id."""

    def make(subject: str, **files: str) -> str:
        for name, content in files.items():
            (work_tree / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
            (work_tree / name.replace("__", "/")).write_text(content)
        git("add", "--all")
        git("commit", "--quiet", "--allow-empty", "--message", subject)
        return git("rev-parse", "HEAD")

    return make


def snapshot(directory: Path) -> dict[str, tuple[int, str]]:
    """Every file with its modification time and content."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def test_a_commit_is_written_out_and_the_repository_left_alone(
    work_tree: Path, git: Git, commit: Callable[..., str]
) -> None:
    (work_tree / "run.sh").write_text("#!/bin/sh\n")
    (work_tree / "run.sh").chmod(0o755)
    (work_tree / "link").symlink_to("pkg/loss.py")
    first = commit("first", pkg__loss="x = 1\n", **{"pkg__crlf": "a\r\nb\n"})
    commit("second", pkg__loss="x = 2\n", **{"uncommitted": "no"})
    (work_tree / "pkg" / "loss").write_text("dirty")
    before = snapshot(work_tree)
    with checked_out(open_repository(work_tree), first) as files:
        assert (files / "pkg" / "loss").read_bytes() == b"x = 1\n"
        assert (files / "pkg" / "crlf").read_bytes() == b"a\r\nb\n"
        assert os.access(files / "run.sh", os.X_OK)
        assert (files / "link").readlink() == Path("pkg/loss.py")
        assert sorted(path.name for path in files.iterdir()) == ["link", "pkg", "run.sh"]
    assert not files.exists()
    assert snapshot(work_tree) == before


def test_nothing_that_the_repository_configures_runs(work_tree: Path, git: Git, commit: Callable[..., str]) -> None:
    marker = work_tree.parent / "was-run"
    command = f"touch {marker} && cat"
    sha = commit("attributes", **{".gitattributes": "* filter=evil text eol=crlf ident\n", "big": "$Id$\n"})
    for key in ("filter.evil.smudge", "filter.evil.process", "core.fsmonitor", "gpg.program", "core.pager"):
        git("config", key, command)
    git("config", "filter.evil.required", "true")
    git("config", "log.showSignature", "true")
    hook = work_tree / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {marker}\n")
    hook.chmod(0o755)
    repository = open_repository(work_tree)
    assert commits(repository, "main") == [sha]
    assert describe(repository, sha, ["big"]).subject == "attributes"
    with checked_out(repository, sha) as files:
        assert (files / "big").read_bytes() == b"$Id$\n"
    assert not marker.exists()


def test_a_tree_that_reaches_out_of_its_directory_is_refused(work_tree: Path, git: Git, tmp_path: Path) -> None:
    blob = subprocess.run(
        ["git", "hash-object", "-w", "--stdin"], cwd=work_tree, input=b"evil", capture_output=True, check=True
    ).stdout.strip()
    tree_bytes = b"100644 ..evil\0" + bytes.fromhex(blob.decode())
    outer = b"40000 ..\0"

    def store(content: bytes) -> bytes:
        arguments = ["git", "hash-object", "-t", "tree", "-w", "--stdin", "--literally"]
        return subprocess.run(arguments, cwd=work_tree, input=content, capture_output=True, check=True).stdout.strip()

    tree = store(outer + bytes.fromhex(store(tree_bytes).decode())).decode()
    sha = git("commit-tree", tree, "-m", "evil")
    target = tmp_path / "files"
    target.mkdir()
    with pytest.raises(CheckoutError, match="may not be written"):
        write_files(open_repository(work_tree), sha, target)
    assert list(target.iterdir()) == []


def test_a_range_lists_ancestors_first_and_holds_its_baseline(git: Git, commit: Callable[..., str]) -> None:
    root = commit("root")
    base = commit("base")
    git("checkout", "--quiet", "-b", "side")
    side = commit("side", side="1")
    git("checkout", "--quiet", "main")
    ahead = commit("ahead", ahead="1")
    git("merge", "--quiet", "--no-edit", "side")
    merge = git("rev-parse", "HEAD")
    repository = open_repository(Path(git("rev-parse", "--show-toplevel")))
    listed = commits(repository, f"{base[:9]}..main")
    assert (listed[0], set(listed[1:3]), listed[3:]) == (base, {side, ahead}, [merge])
    assert root not in listed
    assert commits(repository, "main~1") == [ahead]
    assert is_ancestor(repository, base, side)
    assert is_ancestor(repository, base, base)
    assert not is_ancestor(repository, side, ahead)
    assert describe(repository, merge, ["x"]).parents == [ahead, side]
    with pytest.raises(CheckoutError, match=r"write A\.\.B"):
        commits(repository, f"{base}...main")


def test_a_commit_is_described_with_its_watched_files(work_tree: Path, commit: Callable[..., str]) -> None:
    first = commit("Erster: ä\n\nbody", pkg__loss="1", README="a")
    second = commit("docs", README="b")
    third = commit("code", pkg__loss="2")
    repository = open_repository(work_tree)
    told = [describe(repository, sha, ["pkg"]) for sha in (first, second, third)]
    assert told[0].subject == "Erster: ä"
    assert told[0].author == "Ada"
    assert told[0].committed_at == datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)
    assert [commit.parents for commit in told] == [[], [first], [second]]
    assert told[0].watched_digest == told[1].watched_digest != told[2].watched_digest
    assert describe(repository, first, ["README"]).watched_digest != describe(repository, second, ["."]).watched_digest


def test_revisions_are_resolved_and_unknown_ones_named(work_tree: Path, git: Git, commit: Callable[..., str]) -> None:
    sha = commit("one")
    git("tag", "--annotate", "v1", "--message", "v1")
    repository = open_repository(work_tree)
    assert {resolve(repository, revision) for revision in ("main", "v1", sha[:8], "HEAD")} == {sha}
    for unknown in ("nosuch", "0" * 40, "--all", "HEAD:README"):
        with pytest.raises(CheckoutError, match="has no commit"):
            resolve(repository, unknown)


def test_what_is_no_repository_is_named(work_tree: Path, git: Git, tmp_path: Path) -> None:
    inside = work_tree / "inside"
    inside.mkdir()
    for path in (tmp_path, inside, tmp_path / "absent"):
        with pytest.raises(CheckoutError, match=f"{path} is not a git repository"):
            open_repository(path)


def test_a_shallow_clone_is_refused_with_the_remedy(
    work_tree: Path, git: Git, commit: Callable[..., str], tmp_path: Path
) -> None:
    commit("one")
    commit("two")
    git("clone", "--quiet", "--depth=1", f"file://{work_tree}", str(tmp_path / "shallow"))
    with pytest.raises(CheckoutError, match="git fetch --unshallow"):
        open_repository(tmp_path / "shallow")


def test_a_url_is_mirrored_once_and_refreshed_when_needed(
    work_tree: Path, commit: Callable[..., str], tmp_path: Path
) -> None:
    url, cache = f"file://{work_tree}", tmp_path / "cache"
    first = commit("one", a="1")
    mirror = open_repository(url, cache=cache)
    assert resolve(mirror, "main") == first
    second = commit("two", a="2")
    assert resolve(open_repository(url, cache=cache, wanted=first), "main") == first
    again = open_repository(url, cache=cache, wanted=second)
    assert resolve(again, "main") == second
    assert again == mirror
    with checked_out(again, second) as files:
        assert (files / "a").read_text() == "2"


def test_a_mirror_does_not_keep_the_credentials_of_its_url(
    work_tree: Path, git: Git, commit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, cache = "https://ada:secret@example.org/r.git", tmp_path / "cache"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(f'[url "file://{work_tree}"]\n\tinsteadOf = {url}\n')
    first = commit("one")
    git("branch", "gone")
    mirror = open_repository(url, cache=cache)
    assert resolve(mirror, "gone") == first
    git("branch", "--delete", "--force", "gone")
    git("tag", "new")
    again = open_repository(url, cache=cache)
    assert resolve(again, "new") == first
    with pytest.raises(CheckoutError, match="no commit 'gone'"):
        resolve(again, "gone")
    kept = [path for path in cache.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert kept == []


def test_a_url_that_does_not_answer_is_worth_another_try_and_keeps_its_secret(tmp_path: Path) -> None:
    url = f"file://user:secret@{tmp_path}/absent"
    with pytest.raises(UnreachableError, match="could not be fetched") as caught:
        open_repository(url, cache=tmp_path / "cache")
    assert "secret" not in str(caught.value)
    with pytest.raises(CheckoutError, match="a cache directory is needed"):
        open_repository(url)


@pytest.mark.parametrize(
    ("repository", "remote"),
    [
        ("https://example.org/a.git", True),
        ("ssh://git@example.org/a", True),
        ("git@example.org:a/b.git", True),
        ("/srv/git/a.git", False),
        ("../a", False),
        ("ext::sh -c true", False),
        ("C:/a", False),
    ],
)
def test_a_url_is_told_from_a_path(repository: str, remote: bool) -> None:
    assert is_url(repository) is remote


def test_a_commit_without_any_watched_path_inherits_from_nobody(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for number in range(2):
        (tmp_path / "kernel.py").write_text(f"{number}\n")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", str(number)], check=True)
    opened = open_repository(tmp_path)
    shas = commits(opened, "HEAD~1..HEAD")
    mistyped = [describe(opened, sha, ["kernle.py"]) for sha in shas]
    assert [commit.watched_digest for commit in mistyped] == [None, None]
    assert changing_watched_paths(mistyped) == mistyped
    with pytest.raises(CheckoutError, match="write the older commit first"):
        commits(opened, "HEAD..HEAD~1")


def test_a_watched_link_stands_for_what_it_points_at(
    work_tree: Path, git: Git, commit: Callable[..., str], tmp_path: Path
) -> None:
    (work_tree / "pkg").mkdir()
    (work_tree / "pkg" / "loss.py").symlink_to("../impl/link.py")
    (work_tree / "impl").mkdir()
    (work_tree / "impl" / "link.py").symlink_to("v2")
    (work_tree / "loop").symlink_to("loop")
    (work_tree / "outside").symlink_to("../../etc/passwd")
    first = commit("links", impl__v2__real="1", README="a")
    shas = [first, commit("docs", README="b"), commit("code", impl__v2__real="2")]
    repository = open_repository(work_tree)
    digests = [describe(repository, sha, ["pkg", "loop", "outside"]).watched_digest for sha in shas]
    assert digests[0] == digests[1] != digests[2]


def test_a_watched_path_may_lead_through_a_link(work_tree: Path, commit: Callable[..., str]) -> None:
    (work_tree / "alias").symlink_to("impl/now")
    (work_tree / "impl").mkdir()
    (work_tree / "impl" / "now").symlink_to("v2")
    shas = [commit("one", impl__v2__loss="1", watched="a", README="a")]
    shas += [commit("docs", README="b"), commit("code", impl__v2__loss="2")]
    (work_tree / "alias").unlink()
    (work_tree / "alias").symlink_to("impl/v3")
    shas += [commit("elsewhere", impl__v3__loss="2")]
    repository = open_repository(work_tree)
    digests = [describe(repository, sha, ["watched", "alias/loss"]).watched_digest for sha in shas]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def hand_made(git: Git, work_tree: Path, kind: str, content: bytes) -> str:
    """Store an object that git would not make itself."""
    arguments = ["git", "hash-object", "-t", kind, "-w", "--stdin", "--literally"]
    made = subprocess.run(arguments, cwd=work_tree, input=content, capture_output=True, check=True)
    return made.stdout.decode().strip()


@pytest.mark.parametrize("date", ["99999999999999 +0000", "-99999999999999 +0000", "yesterday", ""])
def test_a_commit_of_no_date_is_refused_for_good(work_tree: Path, git: Git, date: str) -> None:
    tree = git("write-tree")
    person = f"Ada <ada@example.org> {date}"
    sha = hand_made(git, work_tree, "commit", f"tree {tree}\nauthor {person}\ncommitter {person}\n\nx\n".encode())
    with pytest.raises(CheckoutError, match=f"commit {sha} .* cannot be described: its date is") as caught:
        describe(open_repository(work_tree), sha, ["x"])
    assert not isinstance(caught.value, UnreachableError)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (b"120000 link\0", "'link', which cannot be written: No such file"),
        (b"100644 " + b"n" * 300 + b"\0", "cannot be written: File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_the_commits_fault(
    work_tree: Path, git: Git, tmp_path: Path, entry: bytes, complaint: str
) -> None:
    empty = hand_made(git, work_tree, "blob", b"")
    tree = hand_made(git, work_tree, "tree", entry + bytes.fromhex(empty))
    sha = git("commit-tree", tree, "-m", "odd")
    with pytest.raises(CheckoutError, match=complaint):
        write_files(open_repository(work_tree), sha, tmp_path)


def test_a_full_disk_is_not_the_commits_fault(
    work_tree: Path, commit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    sha = commit("one", a="1")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_files(open_repository(work_tree), sha, tmp_path)


def test_submodules_are_named(work_tree: Path, git: Git, commit: Callable[..., str]) -> None:
    sha = commit("one", a="1")
    git("update-index", "--add", "--cacheinfo", f"160000,{sha},third_party/kernels")
    git("commit", "--quiet", "--message", "with a submodule")
    repository = open_repository(work_tree)
    assert submodules(repository, git("rev-parse", "HEAD")) == ["third_party/kernels"]
    assert submodules(repository, sha) == []
    with checked_out(repository, "HEAD") as files:
        assert [path.name for path in files.iterdir()] == ["a"]
