"""Score our rules and the peers' on simulated and real histories, and the paired decision on simulated nights.

    .venv/bin/pip install --constraint constraints.txt '.[benchmarks]'
    .venv/bin/pip install --constraint constraints.txt --no-deps apache-otava   # it pins an older numpy
    .venv/bin/python -m benchmarks.detection [--series N] [--only look-back|online|real|paired] [--half report|tuning]

Everything is drawn from fixed seeds. Parameters were chosen with `--half tuning`; the tables of docs/method.md are
those of the other half. Milliseconds are CPU time of one look at one history.
"""

import argparse
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial

import numpy as np

from benchmarks.detection import nights, scoring
from benchmarks.detection.detectors import Detector, ours, peers
from benchmarks.detection.scoring import Draw, Score
from benchmarks.detection.series import BOOTSTRAP, DATA, SIZES, Half, History, injected, models, simulated
from service.detection.pairs import Answer
from service.detection.screen import newest_step

LIMITS = tuple(tenths / 10 for tenths in range(15, 121))
"""Where our limit is put to match a peer's rate of false alarms."""
MOST_LOOKING_BACK, MOST_ONLINE = 1.0, 0.5
"""False alarms per 1000 commits that the aims allow."""

Run = Callable[[Detector, dict[str, Draw]], Score]


def draws(half: Half, number: int) -> dict[str, Draw]:
    """A set of histories of each noise model."""
    return {model: partial(_draw, model, half, number) for model in models()}


def real_draws(half: Half) -> dict[str, Draw]:
    """The real histories of a half, with steps put in."""
    return {"real": lambda size: list(injected(half, size=size))}


def _draw(model: str, half: Half, number: int, size: float) -> list[History]:
    return [simulated(model, index, half, size=size) for index in range(number)]


def compare(title: str, run: Run, sets: dict[str, Draw], rivals: list[Detector], aim: float) -> None:
    """Print the table of one mode: our rules, each peer, and our rules at the peer's rate of false alarms and
    at the highest that was aimed at."""
    print(f"\n### {title}\n\n{header()}")
    own = run(ours(), sets)
    print(row(own), flush=True)
    scores = []
    for rival in rivals:
        scores.append(run(rival, sets))
        print(row(scores[-1]), flush=True)
    at_limit = cache(lambda limit: run(ours(limit), sets))
    aimed = strictest(at_limit, aim)
    print(row(aimed, f"{aimed.name}, for {aim:g} / 1000"))
    matched = {score.name: strictest(at_limit, score.false_rate) for score in scores}
    for name, score in matched.items():
        print(row(score, f"{score.name}, for {name}'s rate"))
    behind = [
        f"{name} at {size:.0%}: {score.recall(size):.2f} against {theirs.recall(size):.2f}"
        for (name, score), theirs in zip(matched.items(), scores, strict=True)
        for size in SIZES
        if score.recall(size) < theirs.recall(size)
    ]
    print(f"\nBehind a peer at its rate: {'; '.join(behind) or 'nowhere'}.")
    if len(sets) > 1:
        print(f"\n{by_model([own, *scores])}", flush=True)


def strictest(at_limit: Callable[[float], Score], rate: float) -> Score:
    """Our rules at the limit whose rate of false alarms is the highest that does not exceed a given one.

    By bisection over `LIMITS`: the rate falls as the limit rises.
    """
    place = bisect_left(LIMITS, -rate, key=lambda limit: -at_limit(limit).false_rate)
    return at_limit(LIMITS[min(place, len(LIMITS) - 1)])


def header() -> str:
    """The head of a table of scores."""
    sizes = " | ".join(f"{size:.0%}" for size in SIZES)
    return f"| rule | alarms / 1000 | {sizes} | delay | ms |\n|---|{'--:|' * (len(SIZES) + 3)}"


def row(score: Score, name: str = "") -> str:
    """One score as a row of it."""
    recalls = " | ".join(f"{score.recall(size):.2f}" for size in SIZES)
    delay = "" if score.delay != score.delay else f"{score.delay:g}"
    return f"| {name or score.name} | {score.false_rate:.2f} | {recalls} | {delay} | {score.milliseconds:.2f} |"


def by_model(scores: list[Score]) -> str:
    """Each noise model apart: alarms / 1000, and recall at 3, 5 and 10 %."""
    names = list(scores[0].tallies)
    lines = [f"| rule | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for score in scores:
        cells = (
            f"{tally.false_rate:.1f}: " + " ".join(f"{tally.recall(size):.2f}" for size in (0.03, 0.05, 0.10))
            for tally in score.tallies.values()
        )
        lines.append(f"| {score.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def agreements(half: Half, rivals: list[Detector]) -> str:
    """How far the change points of real histories are shared, looking back."""
    histories = [history.values for history in injected(half)]
    own = [ours().look_back(values, ()) for values in histories]
    lines = [
        "| peer | its change points | ours | its that we have | ours that it has |",
        "|---|--:|--:|--:|--:|",
    ]
    for rival in rivals:
        theirs = [rival.look_back(values, ()) for values in histories]
        counts = f"{sum(map(len, theirs))} | {sum(map(len, own))}"
        shares = f"{scoring.shared(theirs, own):.2f} | {scoring.shared(own, theirs):.2f}"
        lines.append(f"| {rival.name} | {counts} | {shares} |")
    return "\n".join(lines)


def paired(half: Half) -> None:
    """Print what the paired decision does on nights without a change, and when it finds a regression."""
    noises = {
        "calm": nights.CALM,
        "process modes": nights.PROCESS_MODES,
        "machine modes": nights.MACHINE_MODES,
        "wide modes": nights.WIDE_MODES,
    }
    print("\n### Paired, nights without a change\n")
    print("| noise | series-nights | suspects | pairs each | same | inconclusive | reported | blocking |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in ("machine modes", "wide modes"):
        seen = nights.null_nights(half, noises[name])
        shares = " | ".join(
            f"{seen.answers[answer] / seen.suspects:.2f}" for answer in (Answer.SAME, Answer.INCONCLUSIVE)
        )
        cost = f"{seen.looks} | {seen.suspects / seen.looks:.1%} | {seen.pairs / seen.suspects:.1f}"
        print(f"| {name} | {cost} | {shares} | {seen.reported} | {seen.blocking} |", flush=True)
    print("\n### Paired, one regression among 300 series\n")
    print("| noise | slower by | at the culprit | 1 later | 2 later | 3 later |\n|---|--:|--:|--:|--:|--:|")
    for name, noise in noises.items():
        for size in (0.02, 0.03, 0.05):
            shares = " | ".join(f"{share:.2f}" for share in nights.found_after(half, noise, size))
            print(f"| {name} | {size:.0%} | {shares} |", flush=True)


def cost(half: Half) -> None:
    """Print the CPU time of one online verdict of a series of 300 points, and of one each for 300 series."""
    series = [
        np.concatenate([simulated(model, number, half).values for number in (2 * pair, 2 * pair + 1)])[:300]
        for model in models()
        for pair in range(-(-300 // len(models())))
    ][:300]
    begin = time.process_time()
    for values in series:
        newest_step(values)
    milliseconds = 1000 * (time.process_time() - begin)
    print(
        f"\nOne online verdict of 300 points: {milliseconds / 300:.2f} ms of CPU; of 300 series: {milliseconds:.0f} ms."
    )


def main() -> None:
    """Print every table asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=40, help="histories of each noise model")
    parser.add_argument("--only", choices=("look-back", "online", "real", "paired"), help="one part")
    parser.add_argument("--half", choices=[half.name.lower() for half in Half], default="report")
    options = parser.parse_args()
    half = Half[options.half.upper()]
    rivals, missing = peers()
    for line in missing:
        print(line)
    wanted = (options.only,) if options.only else ("look-back", "online", "real", "paired")
    if not DATA.is_dir():
        print(f"no real histories here: {BOOTSTRAP} and real are left out")
    if "look-back" in wanted:
        compare("Looking back, simulated", scoring.look_back, draws(half, options.series), rivals, MOST_LOOKING_BACK)
    if "online" in wanted:
        compare("Online, simulated", scoring.watch, draws(half, options.series), rivals, MOST_ONLINE)
        cost(half)
    if "real" in wanted and DATA.is_dir():
        compare(
            "Looking back, real histories with steps put in",
            scoring.look_back,
            real_draws(half),
            rivals,
            MOST_LOOKING_BACK,
        )
        compare("Online, real histories with steps put in", scoring.watch, real_draws(half), rivals, MOST_ONLINE)
        print(f"\n### Agreement on real histories\n\n{agreements(half, rivals)}")
    if "paired" in wanted:
        paired(half)


if __name__ == "__main__":
    main()
