"""When enough times have been taken, how many calls make one, and which of them cannot be believed. Reads no clock.

The figures are METHOD section 5's: pure functions of numbers, the same for every device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A shorter call is timed in batches: an event's resolution and cost would else be a good part of it.
BATCHED_BELOW_SECONDS = 20e-6
_CALLS_MOST = 1000
# Work that goes on for this long after the stream that it was asked on has ended, has escaped from it.
_ESCAPE_SECONDS = 50e-6
_ESCAPE_SHARE = 0.05
_THROTTLED_SHARE_MOST = 0.2
# Above 1 by what clocks and a bandwidth out of a table may be off.
_ROOFLINE_SHARE_MOST = 1.02
# Fewer samples than these say nothing, however long each takes.
_FIXED_LEAST = 5


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """At least `least` samples and until their relative standard error is small; or `most`; or `seconds` have gone."""

    least: int = 30
    most: int = 1000
    relative_error: float = 0.003
    seconds: float = 2.0


def is_enough(samples: Sequence[float], elapsed: float, rule: StoppingRule) -> bool:
    """Whether to stop with these samples, `elapsed` seconds after the first began."""
    if elapsed >= rule.seconds or len(samples) >= rule.most:
        return True
    return len(samples) >= rule.least and relative_standard_error(samples) < rule.relative_error


def relative_standard_error(samples: Sequence[float]) -> float:
    """The sample's standard deviation over its mean and the root of its size; infinite for fewer than two."""
    if len(samples) < 2:
        return math.inf
    mean = math.fsum(samples) / len(samples)
    variance = math.fsum((sample - mean) ** 2 for sample in samples) / (len(samples) - 1)
    return math.sqrt(variance / len(samples)) / mean if mean else 0.0


def fixed_count(sample_seconds: float, rule: StoppingRule) -> int:
    """How many samples to take where ranks must take equally many: `least`, or as many as the time limit holds."""
    in_time = rule.least if sample_seconds <= 0 else int(rule.seconds / sample_seconds)
    return max(_FIXED_LEAST, min(rule.least, in_time))


def calls_per_sample(call_seconds: float) -> int:
    """1, or as many calls as make up 20 us."""
    if call_seconds >= BATCHED_BELOW_SECONDS:
        return 1
    return min(_CALLS_MOST, math.ceil(BATCHED_BELOW_SECONDS / max(call_seconds, BATCHED_BELOW_SECONDS / _CALLS_MOST)))


def is_escape(lag_seconds: float, stream_seconds: float) -> bool:
    """Whether the device worked on for too long after its stream's `stream_seconds` of work were done."""
    return lag_seconds > max(_ESCAPE_SECONDS, _ESCAPE_SHARE * stream_seconds)


def throttling_fault(dropped: int, taken: int) -> str | None:
    """Why the times of a process are invalid, if too many of its samples ran on throttled clocks."""
    if dropped <= _THROTTLED_SHARE_MOST * taken:
        return None
    return f"{dropped} of {taken} samples ran on throttled clocks, limit {_THROTTLED_SHARE_MOST:.0%}"


def roofline_fault(share: float) -> str | None:
    """Why a time is invalid, if it is less than the memory allows."""
    if share <= _ROOFLINE_SHARE_MOST:
        return None
    return f"faster than memory allows: {share:.2f} of the roofline, limit {_ROOFLINE_SHARE_MOST}"


def least_traffic_bytes(logits_bytes: int, passes: int, cache_bytes: int) -> int:
    """What must cross the memory bus at least, from a cold cache, in so many passes over the logits or their gradient.

    The first pass reads all; of the others a cache of `cache_bytes` may serve twice its size: what is read again, and
    what is written and not yet out.
    """
    return logits_bytes + max(0, (passes - 1) * logits_bytes - 2 * cache_bytes)
