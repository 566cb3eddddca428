"""The detection benchmark itself: what it draws, and how it counts."""

import numpy as np
import pytest

from benchmarks.detection import detectors, nights, scoring, series
from benchmarks.detection.__main__ import strictest
from benchmarks.detection.detectors import Detector
from benchmarks.detection.scoring import HORIZON, Score, Tally, look_back, shared, watch
from benchmarks.detection.series import LENGTH, MODELS, SIZES, Half, History, simulated, stepped
from service.detection.pairs import Answer

DEVIATIONS = {"quiet": 0.005, "typical": 0.015, "noisy": 0.04, "bimodal": 0.02, "drift": 0.01}


@pytest.mark.parametrize("model", MODELS)
def test_a_noise_model_is_as_noisy_as_it_says(model: str) -> None:
    noise = [np.log(simulated(model, number, Half.TUNING).values) for number in range(40)]
    spread = np.median([1.4826 * np.median(np.abs(np.diff(logs))) / 2**0.5 for logs in noise])
    assert 0.6 * DEVIATIONS[model] < np.median([np.std(logs) for logs in noise]) < 1.5 * DEVIATIONS[model]
    assert spread > 0


def test_a_series_comes_from_its_seed_and_the_halves_share_none() -> None:
    first, again, other = (simulated("typical", 3, half) for half in (Half.TUNING, Half.TUNING, Half.REPORT))
    assert np.array_equal(first.values, again.values)
    assert not np.array_equal(first.values, other.values)
    assert not set(series.REPOSITORIES[Half.TUNING]) & set(series.REPOSITORIES[Half.REPORT])


@pytest.mark.parametrize("size", SIZES)
def test_a_step_moves_the_same_noise_by_its_size(size: float) -> None:
    still, moved = simulated("quiet", 1, Half.REPORT), simulated("quiet", 1, Half.REPORT, size=size)
    ratio = moved.values / still.values
    assert moved.step
    assert np.all(ratio[: moved.step] == 1)
    assert np.allclose(np.abs(np.log(ratio[moved.step :])), np.log1p(size))


def test_without_real_histories_the_bootstrap_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(series, "DATA", tmp_path / "absent")  # type: ignore[operator]
    assert series.models() == tuple(MODELS)


def seen_after(commits: int) -> Detector:
    """A detector that names the step at 100 of a history that has one, once so many commits of it are there."""

    def find(values: series.Floats, known: object) -> list[int]:
        del known
        return [102] if len(values) >= 100 + commits and values[100] > values[99] else []

    return Detector("oracle", find, find)


def one_step(size: float) -> list[History]:
    still = History("still", np.full(LENGTH, 100.0))
    return [stepped(still, 100, size) if size else still]


def test_looking_back_a_step_is_hit_within_five_commits() -> None:
    score = look_back(seen_after(0), {"one": one_step})
    assert (score.false_rate, {score.recall(size) for size in SIZES}) == (0.0, {1.0})


def test_online_the_delay_counts_from_the_first_commit_at_the_new_level() -> None:
    score = watch(seen_after(4), {"one": one_step})
    assert (score.delay, score.recall(0.01), score.false_rate) == (3, 1.0, 0.0)


@pytest.mark.parametrize(("commits", "recall"), [(HORIZON, 1.0), (HORIZON + 1, 0.0)])
def test_online_a_step_that_is_seen_too_late_is_missed(commits: int, recall: float) -> None:
    assert watch(seen_after(commits), {"one": one_step}).recall(0.1) == recall


def test_what_is_named_again_is_one_alarm_and_what_is_far_from_it_another() -> None:
    def restless(values: series.Floats, known: object) -> list[int]:
        del known
        return [40] if len(values) < 150 else [44, 60]

    score = watch(Detector("restless", restless, restless), {"one": one_step})
    assert score.tallies["one"].alarms == 2
    assert score.false_rate == pytest.approx(2000 / (LENGTH - scoring.START + 1))


def test_each_noise_model_counts_alike() -> None:
    few, many = Tally(alarms=1, commits=1000), Tally(alarms=30, commits=10_000)
    assert Score("rule", {"few": few, "many": many}).false_rate == 2


def test_shared_change_points_are_within_five_commits_in_the_same_history() -> None:
    assert shared([[10, 50], [10]], [[14], [50]]) == pytest.approx(1 / 3)
    assert np.isnan(shared([[]], [[1]]))


def test_a_rival_is_met_at_its_rate_and_not_above_it() -> None:
    def at_limit(limit: float) -> Score:
        return Score(f"at {limit:g}", {"one": Tally(alarms=round(1000 / limit), commits=10_000)})

    assert strictest(at_limit, 25.0).name == "at 4"
    assert strictest(at_limit, 24.0).name == "at 4.2"
    assert strictest(at_limit, 0.0).name == "at 12"


def test_a_peer_that_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(detectors.importlib, "import_module", absent)
    found, missing = detectors.peers()
    assert found == []
    assert [line.split(":")[0] for line in missing] == ["otava", "asv", "pelt"]


def test_quiet_nights_do_not_block() -> None:
    seen = nights.null_nights(Half.TUNING, nights.MACHINE_MODES, nights=2, series=40)
    assert seen.suspects == sum(seen.answers.values()) > 0
    assert (seen.looks, seen.blocking, seen.answers[Answer.WORSE]) == (80, 0, 0)


def test_a_large_regression_blocks_at_the_culprit() -> None:
    assert nights.found_after(Half.TUNING, nights.CALM, 0.2, trials=5) == [1.0] * 4
