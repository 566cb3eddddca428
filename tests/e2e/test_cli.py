"""The command line as a person or a CI job uses it: real commands, real measurements, a real service."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from runners.programs import Program, free_port
from runners.story.story import chapters, target_file, write_story
from service.wire import Result

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
LEGACY, FUSED, LEAN, DOCS = range(4)


def ulpwatch(*arguments: object, **settings: str) -> subprocess.CompletedProcess[str]:
    """One command, in an environment with these settings alone."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ULPWATCH_")}
    return subprocess.run(
        [sys.executable, "-m", "ulpwatch", *map(str, arguments)],
        env=inherited | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


@dataclass(frozen=True)
class Replayed:
    """The story's first four commits, replayed; three of them change the kernel and were measured."""

    shas: list[str]
    target: Path
    repository: Path
    results: Path
    printed: str
    told: str

    def result(self, number: int) -> Path:
        (found,) = self.results.glob(f"{self.shas[number]}-demo-*.json")
        return found


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    directory = tmp_path_factory.mktemp("cli")
    repository, results, target = directory / "story", directory / "results", directory / "story.toml"
    shas = [commit.sha for commit in write_story(repository)]
    target.write_text(target_file(repository))
    span = f"{shas[LEGACY]}..{shas[DOCS]}"
    done = ulpwatch("replay", "--target", target, "--repo", repository, "--range", span, "--keep", results)
    assert done.returncode == 0, done.stderr
    return Replayed(shas, target, repository, results, done.stdout, done.stderr)


def states(printed: str, shas: list[str]) -> list[str]:
    """The state's word in the row of each commit."""
    rows = {line.split()[0]: line.split()[1] for line in printed.splitlines() if line and not line.startswith(" ")}
    return [rows[sha[:7]] for sha in shas]


def test_replay_prints_a_row_a_commit_with_its_state(replayed: Replayed) -> None:
    wanted = [chapter.expected.state for chapter in chapters()[: DOCS + 1]]
    assert states(replayed.printed, replayed.shas[: DOCS + 1]) == wanted
    assert "4.50 U -> 5.00 U" in replayed.printed


def test_replay_tells_a_log_a_line_a_commit(replayed: Replayed) -> None:
    told = [line for line in replayed.told.splitlines() if line.startswith("commit ")]
    subjects = [chapter.subject for chapter in chapters()[:DOCS]]
    wanted = [f"commit {n + 1} of 3, {replayed.shas[n][:7]}: measuring: {subjects[n]}" for n in range(DOCS)]
    assert told == wanted
    assert "\x1b" not in replayed.told


def test_replay_does_not_measure_again_what_it_kept(replayed: Replayed) -> None:
    assert {path.name.split("-")[0] for path in replayed.results.iterdir()} == set(replayed.shas[:DOCS])
    before = {path: path.stat().st_mtime_ns for path in replayed.results.iterdir()}
    span = f"{replayed.shas[LEGACY]}..{replayed.shas[DOCS]}"
    options = ("--target", replayed.target, "--repo", replayed.repository, "--keep", replayed.results)
    again = ulpwatch("replay", *options, "--range", span)
    assert again.stdout == replayed.printed
    assert f"measured before on this host, taken from {replayed.result(FUSED)}" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in replayed.results.iterdir()} == before


def test_compare_decides_on_two_files(replayed: Replayed) -> None:
    worse = ulpwatch("compare", replayed.result(LEGACY), replayed.result(FUSED))
    assert (worse.returncode, "4.50 U -> 5.00 U" in worse.stdout) == (1, True)
    same = ulpwatch("compare", replayed.result(FUSED), replayed.result(FUSED))
    assert (same.returncode, "same attempt" in same.stderr) == (2, True)


def test_compare_of_a_commit_with_itself_passes(replayed: Replayed, tmp_path: Path) -> None:
    once = Result.model_validate_json(replayed.result(FUSED).read_bytes())
    again = once.model_copy(update={"attempt": "00000000-0000-4000-8000-000000000001"})
    (tmp_path / "again.json").write_text(again.model_dump_json(warnings=False))
    same = ulpwatch("compare", replayed.result(FUSED), tmp_path / "again.json", "--format", "json")
    assert (same.returncode, '"state": "pass"' in same.stdout) == (0, True)


def test_replay_measures_again_when_the_target_says_otherwise_or_the_host_is_another(
    replayed: Replayed, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    shutil.copytree(replayed.results, results)
    kept = results / replayed.result(LEGACY).name
    edited = tmp_path / "edited.toml"
    edited.write_text(replayed.target.read_text().replace("[require]", '[python]\nenv = {MODE = "1"}\n[require]'))
    assert edited.read_text() != replayed.target.read_text()
    alone = ("--repo", replayed.repository, "--range", replayed.shas[LEGACY], "--keep", results)
    other = ulpwatch("replay", "--target", edited, *alone)
    assert "commit 1 of 1, " + replayed.shas[LEGACY][:7] + ": measuring: " in other.stderr, other.stderr
    assert len(list(results.glob(f"{replayed.shas[LEGACY]}-*.json"))) == 2
    result = json.loads(kept.read_text())
    result["environment"]["exact"]["torch"] = "1.0"
    kept.write_text(json.dumps(result))
    again = ulpwatch("replay", "--target", replayed.target, *alone)
    assert f"measured again, because {kept} is of another environment" in again.stderr
    assert json.loads(kept.read_text())["environment"]["exact"]["torch"] != "1.0"


def test_compare_prints_a_command_that_works_when_pasted(replayed: Replayed) -> None:
    files = (replayed.result(LEGACY), replayed.result(FUSED))
    assert "reproduce" not in ulpwatch("compare", *files).stdout
    where = ("--target", replayed.target, "--repo", replayed.repository)
    printed = ulpwatch("compare", *files, *where).stdout
    commands = [line.split(": ", 1)[1] for line in printed.splitlines() if line.startswith("  reproduce: ")]
    assert commands
    program, *arguments = shlex.split(commands[0])
    assert program == "ulpwatch"
    done = ulpwatch(*arguments)
    assert (done.returncode, "fused" in done.stdout) == (0, True), done.stderr


def test_compare_holds_to_what_the_target_declares(replayed: Replayed, tmp_path: Path) -> None:
    declared = replayed.target.read_text().replace(
        'control = "legacy', 'budget = {step_peak_bytes = {units = 4.75}}\ncontrol = "legacy'
    )
    assert "budget" in declared
    target = tmp_path / "story.toml"
    target.write_text(declared)
    same = ("compare", replayed.result(LEGACY), replayed.result(FUSED), "--target")
    assert "within_budget" not in ulpwatch(*same, replayed.target).stdout
    assert "within_budget" in ulpwatch(*same, target).stdout
    other = tmp_path / "other.toml"
    other.write_text(declared.replace('name = "story"', 'name = "other"', 1))
    refused = ulpwatch(*same, other)
    assert (refused.returncode, "the target file is of 'other'" in refused.stderr) == (2, True)


def test_measure_finds_out_before_it_measures_that_it_cannot_write(replayed: Replayed, tmp_path: Path) -> None:
    options = ("--target", replayed.target, "--repo", replayed.repository, "--commit", "no-such-commit")
    for out in (tmp_path / "absent" / "result.json", tmp_path):
        refused = ulpwatch("measure", *options, "--out", out)
        assert (refused.returncode, str(out) in refused.stderr) == (2, True), refused.stderr
    unknown = ulpwatch("measure", *options, "--out", tmp_path / "result.json")
    assert "no-such-commit" in unknown.stderr
    assert not (tmp_path / "result.json").exists()


def test_what_a_commit_says_moves_no_cursor(replayed: Replayed, tmp_path: Path) -> None:
    result = json.loads(replayed.result(FUSED).read_text())
    result["attempt"] = "00000000-0000-4000-8000-000000000002"
    for measurement in result["measurements"]:
        measurement |= {"outcome": "raised", "values": {"callable": [1.0], "completes": [0.0]}, "nonfinite": []}
        measurement["notes"] = {"outcome": "\x1b[2K\rpass\nforged \u202e"}
    (tmp_path / "hostile.json").write_text(json.dumps(result))
    for form in ("text", "markdown"):
        shown = ulpwatch("compare", replayed.result(FUSED), tmp_path / "hostile.json", "--format", form).stdout
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert not [line for line in shown.splitlines() if line.startswith("forged")]
        assert "x1b" in shown


def test_compare_refuses_rubbish_by_name(replayed: Replayed, tmp_path: Path) -> None:
    (tmp_path / "rubbish.json").write_text('{"wire_version": 1}')
    refused = ulpwatch("compare", tmp_path / "rubbish.json", replayed.result(FUSED))
    assert refused.returncode == 2
    assert "attempt: Field required" in refused.stderr


@dataclass(frozen=True)
class Service:
    """A service on a database of its own, and tokens for it."""

    url: str
    tokens: dict[str, str]

    def ask(self, scope: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return ulpwatch(*arguments, ULPWATCH_URL=self.url, ULPWATCH_TOKEN=self.tokens[scope])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("service")
    database = f"sqlite:///{directory / 'ulpwatch.sqlite3'}"
    assert ulpwatch("db", "upgrade", "--database-url", database).returncode == 0
    tokens = {}
    for scope in ("admin", "ci", "read"):
        made = ulpwatch("token", "create", "--scope", scope, "--database-url", database)
        tokens[scope] = made.stdout.splitlines()[-1]
    port = free_port(0)
    arguments = ["serve", "--port", str(port), "--database-url", database]
    program = Program("service", arguments, {}, directory / "service.log")
    program.keep_alive()
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
            client.get(f"{url}/api/v1/health").raise_for_status()
        yield Service(url, tokens)
    finally:
        program.stop()


def test_submitted_results_are_gated_with_the_right_exit_codes(replayed: Replayed, service: Service) -> None:
    shas = replayed.shas
    assert service.ask("admin", "target", "add", replayed.target).returncode == 0
    span = f"{shas[LEGACY]}..{shas[DOCS]}"
    told = service.ask("ci", "job", "add", "--target", replayed.target, "--range", span, "--head")
    assert told.stdout == "4 commits told, 2 to be measured\n", told.stderr
    one = service.ask("ci", "job", "add", "--target", replayed.target, "--range", shas[LEGACY])
    assert one.stdout == "1 commit told, 1 to be measured\n", one.stderr
    for number in (DOCS - 1, LEGACY, FUSED):
        done = service.ask("ci", "submit", replayed.result(number))
        assert done.returncode == 0, done.stderr
    gate = ("gate", "--target", "story", "--wait", "60", "--commit")
    codes = [service.ask("read", *gate, sha).returncode for sha in shas[: DOCS + 1]]
    assert codes == [2, 1, 1, 0]
    against = service.ask("read", *gate, shas[FUSED], "--base", shas[LEAN])
    assert (against.returncode, "2.00 U -> 5.00 U" in against.stdout) == (1, True)
    markdown = service.ask("read", *gate, shas[FUSED], "--format", "markdown").stdout
    assert markdown.startswith("## ulpwatch: regress")

    listed = service.ask("read", "finding", "list", "--target", "story").stdout.splitlines()
    of_lean = [line.split()[0] for line in listed if line.endswith(f"at {shas[LEAN][:7]}")]
    for number in of_lean:
        decided = service.ask("admin", "finding", "accept", number, "--reason", "no loss uses one output alone")
        assert (decided.returncode, f"finding {number} is accepted" in decided.stdout) == (0, True), decided.stderr
    again = service.ask("admin", "finding", "accept", of_lean[0], "--reason", "twice")
    assert (again.returncode, "only acknowledged or dismissed or open" in again.stderr) == (2, True)
    assert service.ask("read", *gate, shas[LEAN]).returncode == 0
    service.ask("admin", "finding", "reopen", of_lean[0], "--reason", "after all one does")
    assert service.ask("read", *gate, shas[LEAN]).returncode == 1


def test_what_nobody_measured_is_undecided_and_a_wrong_token_never_passes(replayed: Replayed, service: Service) -> None:
    service.ask("admin", "target", "add", replayed.target)
    unknown = service.ask("read", "gate", "--target", "story", "--commit", "f" * 40)
    assert (unknown.returncode, "unknown here" in unknown.stdout) == (2, True)
    nobody = ulpwatch("gate", "--target", "story", "--commit", "f" * 40, ULPWATCH_URL=service.url)
    assert (nobody.returncode, "401" in nobody.stderr) == (2, True)
    silent = ulpwatch("gate", "--target", "story", "--commit", "f" * 40, ULPWATCH_URL="http://127.0.0.1:9")
    assert silent.returncode == 3


def test_a_failure_of_ours_is_never_the_exit_code_of_a_regression() -> None:
    broken = ulpwatch("gate", "--target", "story", "--commit", "f" * 40, ULPWATCH_REQUEST_SECONDS="abc")
    assert (broken.returncode, "request_seconds" in broken.stderr) == (2, True)


def test_a_read_token_cannot_submit(replayed: Replayed, service: Service) -> None:
    refused = service.ask("read", "submit", replayed.result(LEGACY))
    assert (refused.returncode, "403" in refused.stderr) == (2, True)


SLIME = """
def calculate_log_probs_and_entropy({parameters}):
    keep = log_prob_keep_mask
    log_prob, entropy = log_probs_and_entropy(logits, tokens, with_entropy, {with_entropy_grad}, chunk_size, keep)
    return log_prob.unsqueeze(-1), entropy
"""
PARAMETERS = "logits, tokens, tp_group, with_entropy=False, chunk_size=-1, log_prob_keep_mask=None"


def test_replay_measures_a_repository_laid_out_like_slimes(tmp_path: Path) -> None:
    sources = {chapter.key: chapter.source for chapter in chapters()}
    old = sources["repair"] + SLIME.format(parameters=PARAMETERS, with_entropy_grad=True)
    asked = {"parameters": PARAMETERS + ", with_entropy_grad=True", "with_entropy_grad": "with_entropy_grad"}
    new, cast = (sources[key] + SLIME.format(**asked) for key in ("repair", "cast"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    for package in ("slime", "slime/utils"):
        (tmp_path / package / "__init__.py").touch()
    for subject, source in (("Old signature", old), ("Take with_entropy_grad", new), ("Cast", cast)):
        (tmp_path / "slime" / "utils" / "ppo_utils.py").write_text(source)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", subject], check=True)
    span = ("--repo", tmp_path, "--range", "HEAD~2..HEAD", "--suite", "demo")
    done = ulpwatch("replay", "--target", ROOT / "targets" / "slime.toml", *span)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run([*git, "rev-list", "--reverse", "HEAD"], check=True, capture_output=True, text=True)
    found = states(done.stdout, listed.stdout.split())
    assert (found[0], found[2]) == ("no-baseline", "regress"), done.stdout
    assert found[1] in ("improve", "pass"), done.stdout
    assert "a bfloat16 cast of the gradient" in done.stdout
