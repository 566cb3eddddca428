"""torch's profiler around a region, or the knowledge that a kernel has broken it with one of its own."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

# No kernel can know them: its own regions are not taken for these.
BEGINS, FORWARD_ENDS, ENDS = (f"{place} {secrets.token_hex(16)}" for place in ("begins", "forward ends", "ends"))


class OwnProfilerError(RuntimeError):
    """A kernel runs a profiler of its own, which ends the one that measures it."""

    def __init__(self) -> None:
        super().__init__("the kernel runs a torch profiler of its own, under which it cannot be measured: remove it")


@contextmanager
def events(*, memory: bool) -> Iterator[list[Any]]:
    """Profiles the region; afterwards the list holds its events, the regions BEGINS and ENDS among them.

    With `memory` they are this thread's, with its allocations and releases; otherwise every thread's. The profiler
    cannot do both at once. Raises OwnProfilerError.
    """
    if _profiler_enabled():
        raise OwnProfilerError
    _warm()
    found: list[Any] = []
    config = _ExperimentalConfig(profile_all_threads=not memory)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=memory, experimental_config=config) as profiler:
        mark(BEGINS)
        yield found
        mark(ENDS)
    results = profiler.profiler and profiler.profiler.kineto_results
    found += results.events() if results else []
    for name in (BEGINS, ENDS):
        single(found, name)


def mark(name: str) -> None:
    """An empty region of this name."""
    with record_function(name):
        pass


def single(found: list[Any], name: str) -> Any:
    """The one event of this name. Raises OwnProfilerError: it is lost only with the profiler that saw it."""
    named = [event for event in found if event.name() == name]
    if len(named) != 1:
        raise OwnProfilerError
    return named[0]


@cache
def _warm() -> None:
    """The first profile of a process costs a second and allocates for itself."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        torch.empty(1).add_(1)
