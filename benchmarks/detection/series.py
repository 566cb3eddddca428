"""The histories that detectors are scored on: six noise models, steps of known size, and real benchmark histories.

Every series comes from a seed. Seeds and repositories are split in two halves: parameters are chosen on `Half.TUNING`
and reported on `Half.REPORT` only.
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LENGTH = 200
EDGE = 50
"""Commits before the earliest and after the latest simulated step."""
SIZES = (0.01, 0.02, 0.03, 0.05, 0.10, 0.20)
BLOCK = 15
DETREND = 31
SHORTEST_HISTORY = 100
NOISIEST_HISTORY = 0.10
"""Bootstrap only from histories whose residuals deviate by less (1.4826 MAD): in noisier ones no rule sees a step of
10 %. They are all among the real histories."""
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


class Half(IntEnum):
    """Which half of the seeds and repositories."""

    TUNING = 0
    REPORT = 1


REPOSITORIES = {Half.TUNING: ("chromium_bidi",), Half.REPORT: ("hyper", "rolldown")}


@dataclass(frozen=True, slots=True)
class History:
    """One series of positive values, in commit order. `step` is the first commit at the new level, `size` how far it
    moved; without a step both are None and 0."""

    source: str
    values: Floats
    step: int | None = None
    size: float = 0.0


def autoregressive(rng: np.random.Generator, *, length: int, deviation: float, correlation: float) -> Floats:
    """Normal noise whose stationary standard deviation and lag-one correlation are as given."""
    shocks = rng.normal(size=length) * deviation * np.sqrt(1 - correlation**2)
    noise = np.empty(length)
    noise[0] = rng.normal() * deviation
    for index in range(1, length):
        noise[index] = correlation * noise[index - 1] + shocks[index]
    return noise


def outliers(rng: np.random.Generator, *, length: int, share: float, deviation: float) -> Floats:
    """Rare slow runs: 3 to 10 standard deviations up."""
    return np.where(rng.random(length) < share, rng.uniform(3, 10, length) * deviation, 0.0)


def quiet(rng: np.random.Generator, length: int) -> Floats:
    """.5 % with a correlation of .2."""
    return autoregressive(rng, length=length, deviation=0.005, correlation=0.2)


def typical(rng: np.random.Generator, length: int) -> Floats:
    """1.5 % with a correlation of .3, 1 % outliers."""
    noise = autoregressive(rng, length=length, deviation=0.015, correlation=0.3)
    return noise + outliers(rng, length=length, share=0.01, deviation=0.015)


def noisy(rng: np.random.Generator, length: int) -> Floats:
    """4 % with a correlation of .4, 3 % outliers."""
    noise = autoregressive(rng, length=length, deviation=0.04, correlation=0.4)
    return noise + outliers(rng, length=length, share=0.03, deviation=0.04)


def bimodal(rng: np.random.Generator, length: int) -> Floats:
    """Two modes 4 % apart, each commit in either; a series switches with its own chance of .2 to .5."""
    switches = rng.random(length) < rng.uniform(0.2, 0.5)
    mode = (np.cumsum(switches) + rng.integers(2)) % 2
    return 0.04 * mode + autoregressive(rng, length=length, deviation=0.005, correlation=0.2)


def drift(rng: np.random.Generator, length: int) -> Floats:
    """2 % of slow drift over the series, a ramp or a wave, under noise of 1 % with a correlation of .3."""
    time = np.linspace(0, 1, length)
    wave = 0.5 * np.sin(2 * np.pi * (time + rng.random()))
    slow = (time if rng.random() < 0.5 else wave) * 0.02 * rng.choice((-1, 1))
    return slow + autoregressive(rng, length=length, deviation=0.01, correlation=0.3)


def bootstrap(rng: np.random.Generator, length: int, half: Half) -> Floats:
    """Blocks of 15 residuals of one real series, in log, about its running median of 31."""
    residuals = _residuals(half)
    source = residuals[rng.integers(len(residuals))]
    starts = rng.integers(0, len(source) - BLOCK, -(-length // BLOCK))
    return np.concatenate([source[start : start + BLOCK] for start in starts])[:length]


MODELS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "quiet": quiet,
    "typical": typical,
    "noisy": noisy,
    "bimodal": bimodal,
    "drift": drift,
}
BOOTSTRAP = "bootstrap"


def models() -> tuple[str, ...]:
    """The noise models that can be drawn from here: without the real histories there is no bootstrap."""
    return (*MODELS, BOOTSTRAP) if DATA.is_dir() else tuple(MODELS)


def simulated(model: str, number: int, half: Half, *, size: float = 0.0) -> History:
    """One series: the noise and the place of the step depend on model, number and half, not on the size."""
    rng = np.random.default_rng([*model.encode(), number, half])
    step = int(rng.integers(EDGE, LENGTH - EDGE))
    sign = rng.choice((-1.0, 1.0))
    noise = bootstrap(rng, LENGTH, half) if model == BOOTSTRAP else MODELS[model](rng, LENGTH)
    if not size:
        return History(model, 100 * np.exp(noise))
    return stepped(History(model, 100 * np.exp(noise)), step, sign * size)


def stepped(history: History, step: int, size: float) -> History:
    """The same history, moved by `size` from commit `step` on; a fall is as far in log as a rise."""
    factor = 1 + size if size > 0 else 1 / (1 - size)
    values = np.where(np.arange(len(history.values)) >= step, history.values * factor, history.values)
    return History(history.source, values, step, size)


def injected(half: Half, *, size: float = 0.0) -> Iterator[History]:
    """Each real history of a half with one step put in at a place that depends on its name alone."""
    for repository in REPOSITORIES[half]:
        for number, (name, values) in enumerate(sorted(real(repository).items())):
            rng = np.random.default_rng([*repository.encode(), number])
            step = int(rng.integers(len(values) // 4, 3 * len(values) // 4))
            sign = rng.choice((-1.0, 1.0))
            history = History(f"{repository}: {name}", values)
            yield stepped(history, step, sign * size) if size else history


@cache
def real(repository: str) -> dict[str, Floats]:
    """The positive values of each series of one repository, in commit order."""
    rows: dict[str, list[tuple[int, float]]] = defaultdict(list)
    path = DATA / f"{repository}.csv.gz"
    if not path.is_file():
        return {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            rows[row["series"]].append((int(row["idx"]), float(row["value"])))
    return {name: np.array([value for _, value in sorted(points) if value > 0]) for name, points in rows.items()}


@cache
def _residuals(half: Half) -> list[Floats]:
    long = (
        _detrended(np.log(values))
        for repository in REPOSITORIES[half]
        for values in real(repository).values()
        if len(values) >= SHORTEST_HISTORY
    )
    return [noise for noise in long if 1.4826 * np.median(np.abs(noise)) <= NOISIEST_HISTORY]


def _detrended(logs: Floats) -> Floats:
    reach = DETREND // 2
    padded = np.pad(logs, reach, mode="reflect")
    return logs - np.median(np.lib.stride_tricks.sliding_window_view(padded, DETREND), axis=1)
