"""The commit graph: order, nearest ancestors, baselines. Pure; commits are shas, and a parent may be unknown.

Order is the graph's, never that of arrival; between unrelated commits the committer's time decides, then the sha.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Node:
    """A commit in the graph."""

    sha: str
    parents: tuple[str, ...]
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An ancestor and how many commits away it is, along the path that led to it."""

    sha: str
    distance: int


def topological(nodes: Iterable[Node]) -> tuple[str, ...]:
    """All shas, parents before children. Nodes of a cycle, which git cannot make, come last."""
    by_sha = {node.sha: node for node in nodes}
    children: dict[str, list[str]] = {}
    waiting: dict[str, int] = {}
    for node in by_sha.values():
        known = {parent for parent in node.parents if parent in by_sha}
        waiting[node.sha] = len(known)
        for parent in known:
            children.setdefault(parent, []).append(node.sha)
    ready = [(by_sha[sha].committed_at, sha) for sha, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, sha = heapq.heappop(ready)
        order.append(sha)
        for child in children.get(sha, ()):
            waiting[child] -= 1
            if waiting[child] == 0:
                heapq.heappush(ready, (by_sha[child].committed_at, child))
    placed = set(order)
    return (*order, *sorted(sha for sha in by_sha if sha not in placed))


def ancestry(parents: Mapping[str, Sequence[str]], head: str) -> set[str]:
    """A commit and all its known ancestors; empty if the commit itself is unknown."""
    found: set[str] = set()
    frontier = [head]
    while frontier:
        sha = frontier.pop()
        if sha in parents and sha not in found:
            found.add(sha)
            frontier.extend(parents[sha])
    return found


def first_parents(parents: Mapping[str, Sequence[str]], sha: str) -> set[str]:
    """The commit, its first parent, that one's first parent, and so on, as far as they are known."""
    line: set[str] = set()
    while sha in parents and sha not in line:
        line.add(sha)
        sha = parents[sha][0] if parents[sha] else ""
    return line


def nearest(
    order: Sequence[str], parents: Mapping[str, Sequence[str]], wanted: Callable[[str], bool]
) -> dict[str, Ancestor]:
    """For every commit its nearest wanted proper ancestor, first parents first; commits without one are left out."""
    found: dict[str, Ancestor] = {}
    for sha in order:
        for parent in parents[sha]:
            if parent in parents and wanted(parent):
                found[sha] = Ancestor(parent, 1)
            elif parent in found:
                found[sha] = Ancestor(found[parent].sha, found[parent].distance + 1)
            if sha in found:
                break
    return found


def forks(order: Sequence[str], parents: Mapping[str, Sequence[str]], trunk: Collection[str]) -> dict[str, Ancestor]:
    """For every commit off the trunk its merge base with it: of its ancestors on the trunk the last in order."""
    place = {sha: index for index, sha in enumerate(order)}
    found: dict[str, Ancestor] = {}
    for sha in order:
        if sha in trunk:
            continue
        candidates = [Ancestor(parent, 1) for parent in parents[sha] if parent in trunk]
        candidates += [
            Ancestor(found[parent].sha, found[parent].distance + 1) for parent in parents[sha] if parent in found
        ]
        if candidates:
            found[sha] = max(candidates, key=lambda item: (place[item.sha], -item.distance))
    return found


def baselines(
    order: Sequence[str], parents: Mapping[str, Sequence[str]], *, measured: Collection[str], head: str | None
) -> dict[str, Ancestor]:
    """The baseline of every commit that has one.

    On the default branch, whose newest commit is `head`, and everywhere while no head is known: the nearest measured
    ancestor. Off it: the merge base, or the measured ancestor nearest to that; without a merge base the nearest
    measured ancestor. So the second push of a pull request is compared with what it will be merged into.
    """
    nearest_measured = nearest(order, parents, lambda sha: sha in measured)
    trunk = ancestry(parents, head) if head else set()
    if not trunk:
        return nearest_measured
    chosen = dict(nearest_measured)
    for sha, fork in forks(order, parents, trunk).items():
        if fork.sha in measured:
            chosen[sha] = fork
        elif fork.sha in nearest_measured:
            base = nearest_measured[fork.sha]
            chosen[sha] = Ancestor(base.sha, base.distance + fork.distance)
        else:
            chosen.pop(sha, None)
    return chosen
