"""The paired decision end to end on simulated nights: screen, pair, control, second session, false discovery control.

Noise comes in layers, as on real machines: each process has its own noise, some kernels two process modes, and
each lease of a machine may put one build of one kernel into a mode of its own, with or without the control.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.detection.series import Floats, Half
from service.detection.discovery import discoveries
from service.detection.pairs import LOOKS, Answer, Decision, Session, decide
from service.detection.screen import surprise

SERIES = 300
NIGHTS = 50
HISTORY = 30
WITHIN = 3
SECOND = 1e-3
"""The time of every kernel, in seconds."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The time of one process deviates by `deviation`, and with a chance of `outliers` it is 5 to 30 % more. A
    share `bimodal` of the kernels has two equally likely process modes, `apart` from each other; what they add
    to the deviation is taken from the rest, as far as it goes. In a share `moded` of the sessions a build is 2
    to 8 % off, in every second of these the control too."""

    deviation: float = 0.01
    outliers: float = 0.0
    bimodal: float = 0.0
    apart: float = 0.015
    moded: float = 0.0

    def rest(self, *, bimodal: bool) -> float:
        """The deviation without the modes."""
        modes = self.apart / 2 if bimodal else 0.0
        return max(self.deviation**2 - modes**2, (self.deviation / 2) ** 2) ** 0.5


CALM = Noise()
PROCESS_MODES = Noise(outliers=0.01, bimodal=0.5)
MACHINE_MODES = Noise(outliers=0.01, bimodal=0.5, moded=0.03)
WIDE_MODES = Noise(outliers=0.01, bimodal=0.5, apart=0.04, moded=0.03)


@dataclass(slots=True)
class Nights:
    """What happened: counts over all nights."""

    looks: int = 0
    suspects: int = 0
    pairs: int = 0
    answers: dict[Answer, int] = field(default_factory=lambda: dict.fromkeys(Answer, 0))
    blocking: int = 0
    reported: int = 0


class Bench:
    """A machine pool that measures kernels: draws the times of processes from one generator."""

    def __init__(self, rng: np.random.Generator, noise: Noise) -> None:
        self.rng, self.noise = rng, noise

    def processes(self, count: int, *, bimodal: bool) -> Floats:
        """The log times of fresh processes, without any session's mode."""
        logs = self.rng.normal(size=count) * self.noise.rest(bimodal=bimodal)
        logs += np.where(self.rng.random(count) < self.noise.outliers, self.rng.uniform(0.05, 0.3, count), 0)
        return logs + (self.noise.apart * (self.rng.random(count) < 0.5) if bimodal else 0)

    def mode(self) -> tuple[float, float]:
        """How far a session puts a build off, and its control."""
        if self.rng.random() >= self.noise.moded:
            return 0.0, 0.0
        off = float(self.rng.uniform(0.02, 0.08) * self.rng.choice((-1, 1)))
        return off, off if self.rng.random() < 0.5 else 0.0

    def session(self, shift: float, *, bimodal: bool) -> Session:
        """30 pairs of one lease; the head is slower by `shift`, in log."""
        base, head, control_base, control_head = (self.processes(LOOKS[-1], bimodal=bimodal) for _ in range(4))
        off, control_off = self.mode()
        times = (base, head + shift + off, control_base, control_head + control_off)
        return Session(*((SECOND * np.exp(logs)).tolist() for logs in times))

    def point(self, *, bimodal: bool) -> float:
        """The log of a night's value: one process in one session."""
        off, _ = self.mode()
        return float(self.processes(1, bimodal=bimodal)[0]) + off


def pair_up(bench: Bench, shift: float, *, bimodal: bool) -> tuple[Decision, int]:
    """Run a paired job as the plan asks; the decision, and how many pairs it took."""
    sessions: list[Session] = []
    taken = [0, 0]
    decision = decide(Session((), (), (), ()))
    while decision.answer in (Answer.MORE_PAIRS, Answer.SECOND_SESSION):
        at = int(decision.answer is Answer.SECOND_SESSION)
        if at == len(sessions):
            sessions.append(bench.session(shift, bimodal=bimodal))
        taken[at] = decision.pairs
        decision = decide(*(session.first(count) for session, count in zip(sessions, taken, strict=False)))
    return decision, sum(taken)


def null_nights(half: Half, noise: Noise, nights: int = NIGHTS, series: int = SERIES) -> Nights:
    """Nights on which nothing changed."""
    bench = Bench(np.random.default_rng([half, 7]), noise)
    kinds = bench.rng.random(series) < noise.bimodal
    histories = [[bench.point(bimodal=kind) for _ in range(HISTORY)] for kind in kinds]
    seen = Nights()
    for _ in range(nights):
        decisions = list(_night(bench, kinds, histories, seen))
        for discovery in discoveries([decision.p for decision in decisions], series):
            seen.blocking += discovery.blocks
            seen.reported += discovery.is_reported
    return seen


def _night(bench: Bench, kinds: Floats, histories: list[list[float]], seen: Nights) -> Iterator[Decision]:
    for kind, history in zip(kinds, histories, strict=True):
        value = bench.point(bimodal=bool(kind))
        history.append(value)
        screened = surprise(SECOND * np.exp(history))
        seen.looks += 1
        if screened and screened.is_suspect:
            seen.suspects += 1
            decision, pairs = pair_up(bench, 0.0, bimodal=bool(kind))
            seen.pairs += pairs
            seen.answers[decision.answer] += 1
            yield decision


def found_after(half: Half, noise: Noise, size: float, trials: int = 300) -> list[float]:
    """The shares of regressions of one size that block at the culprit, and by 1, 2 and 3 commits later.

    Each is the only one among `SERIES` comparisons. A suspect is paired against the commit before the culprit.
    """
    bench = Bench(np.random.default_rng([half, 8, round(size * 1000)]), noise)
    shift = float(np.log1p(size))
    delays = []
    for _ in range(trials):
        bimodal = bool(bench.rng.random() < noise.bimodal)
        history = [bench.point(bimodal=bimodal) for _ in range(HISTORY)]
        delays.append(next((late for late in range(WITHIN + 1) if _blocks(bench, history, shift, bimodal)), WITHIN + 1))
    return [float(np.mean([delay <= late for delay in delays])) for late in range(WITHIN + 1)]


def _blocks(bench: Bench, history: list[float], shift: float, bimodal: bool) -> bool:
    """Measure one more commit at the slower level: is it suspect, confirmed, and blocking?"""
    value = bench.point(bimodal=bimodal) + shift
    history.append(value)
    screened = surprise(SECOND * np.exp(history))
    if not screened or not screened.is_suspect:
        return False
    decision, _ = pair_up(bench, shift, bimodal=bimodal)
    return decision.answer is Answer.WORSE and discoveries([decision.p], SERIES)[0].blocks
