"""Order and baselines in the commit graph. Commits are one letter; time runs with the alphabet."""

from datetime import UTC, datetime, timedelta

from service.history import Ancestor, Node, ancestry, baselines, forks, nearest, topological

Graph = dict[str, tuple[str, ...]]

# a - b - c - g     main; g merges f
#      \     /
#       d - f       a branch; e is its second tip
#        \- e
GRAPH: Graph = {"a": (), "b": ("a",), "c": ("b",), "d": ("b",), "e": ("d",), "f": ("d",), "g": ("c", "f")}


def order_of(graph: Graph) -> tuple[str, ...]:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return topological(Node(sha, parents, start + timedelta(days=ord(sha))) for sha, parents in graph.items())


def test_parents_come_before_children_whatever_the_clock_says() -> None:
    assert order_of({"z": (), "a": ("z",), "m": ("a",)}) == ("z", "a", "m")


def test_unrelated_commits_are_ordered_by_time() -> None:
    assert order_of(GRAPH) == ("a", "b", "c", "d", "e", "f", "g")


def test_a_cycle_loses_no_commit() -> None:
    assert set(order_of({"a": (), "b": ("c",), "c": ("b",)})) == {"a", "b", "c"}


def test_unknown_parents_are_no_obstacle() -> None:
    assert order_of({"b": ("a",), "c": ("b",)}) == ("b", "c")
    assert ancestry({"b": ("a",), "c": ("b",)}, "c") == {"b", "c"}
    assert ancestry({"b": ("a",)}, "x") == set()


def test_the_nearest_ancestor_is_found_along_first_parents() -> None:
    found = nearest(order_of(GRAPH), GRAPH, lambda sha: sha in {"a", "f"})
    assert found["c"] == Ancestor("a", 2)
    assert found["g"] == Ancestor("a", 3)
    assert "a" not in found


def test_the_nearest_ancestor_is_looked_for_on_other_parents_last() -> None:
    assert nearest(order_of(GRAPH), GRAPH, lambda sha: sha == "f") == {"g": Ancestor("f", 1)}


def test_a_branch_forks_at_its_last_commit_on_the_trunk() -> None:
    graph = GRAPH | {"h": ("e", "c")}  # the branch merged main
    found = forks(order_of(graph), graph, {"a", "b", "c"})
    assert found["e"] == Ancestor("b", 2)
    assert found["h"] == Ancestor("c", 1)
    assert "c" not in found


def test_the_baseline_on_the_trunk_is_the_nearest_measured_ancestor() -> None:
    found = baselines(order_of(GRAPH), GRAPH, measured={"a", "c"}, head="g")
    assert (found["b"], found["c"], found["g"]) == (Ancestor("a", 1), Ancestor("a", 2), Ancestor("c", 1))


def test_the_baseline_of_a_branch_is_its_merge_base() -> None:
    found = baselines(order_of(GRAPH), GRAPH, measured={"b", "d", "e"}, head="c")
    assert (found["d"], found["e"]) == (Ancestor("b", 1), Ancestor("b", 2))


def test_an_unmeasured_merge_base_stands_for_the_ancestor_nearest_to_it() -> None:
    found = baselines(order_of(GRAPH), GRAPH, measured={"a", "d"}, head="c")
    assert found["e"] == Ancestor("a", 3)


def test_a_merge_base_without_a_measured_ancestor_is_no_baseline() -> None:
    assert "e" not in baselines(order_of(GRAPH), GRAPH, measured={"d"}, head="c")


def test_without_a_known_head_every_commit_has_its_nearest_ancestor() -> None:
    found = baselines(order_of(GRAPH), GRAPH, measured={"b", "d"}, head=None)
    assert found["e"] == Ancestor("d", 1)
    assert baselines(order_of(GRAPH), GRAPH, measured={"b", "d"}, head="unknown") == found
