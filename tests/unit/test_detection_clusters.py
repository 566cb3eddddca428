"""The sentence of a finding."""

from typing import Any

from service.detection.clusters import Change, cluster
from service.detection.levels import State

CASES: dict[str, dict[str, Any]] = {
    f"n{tokens}-{dtype}": {"tokens": tokens, "dtype": dtype, "distribution": "spread"}
    for tokens in (1, 64)
    for dtype in ("float32", "bfloat16")
}
SHA = "1a2b3c4" + "0" * 33


def change(case_id: str = "n64-float32", metric: str = "step_peak_bytes", **changes: Any) -> Change:
    fields: dict[str, Any] = {
        "kernel": "fused",
        "case_id": case_id,
        "case": CASES[case_id],
        "unit_bytes": 1 << 20,
        "metric": metric,
        "state": State.REGRESS,
        "before": 2.0 * (1 << 20),
        "after": 3.0 * (1 << 20),
        "limit": None,
        "effect": 0.58,
        "reason": "",
        "samples": (),
        "device": "Test CPU",
    }
    return Change(**(fields | changes))


def sentence(*changes: Change) -> str:
    (found,) = cluster(changes, {"fused": CASES}, SHA)
    return found.sentence


def test_memory_is_told_in_units_of_the_logits() -> None:
    assert sentence(*(change(case_id) for case_id in CASES)) == (
        "peak memory, forward + backward, of fused: 2.00 U -> 3.00 U in all 4 cases, at 1a2b3c4"
    )


def test_what_the_affected_cases_share_is_named() -> None:
    found = sentence(change("n1-bfloat16"), change("n64-bfloat16"))
    assert "2.00 U -> 3.00 U in 2 of 4 cases, all with dtype bfloat16, at" in found


def test_values_that_are_one_cases_say_whose_they_are() -> None:
    more = {"after": 4.0 * (1 << 20), "effect": 1.0}
    found = sentence(*(change(case_id, **(more if case_id == "n1-float32" else {})) for case_id in CASES))
    assert "2.00 U -> 4.00 U in all 4 cases (most in n1-float32), at" in found


def test_what_is_no_number_any_more_leads() -> None:
    small = change(metric="g_rel_l2_lp", before=3e-8, after=1e-3, effect=15.0)
    broken = change(metric="g_rel_l2_ent", before=3e-8, after=None, effect=None)
    assert "relative L2 error of the entropy gradient of fused: 3e-08 -> not finite" in sentence(small, broken)


def test_the_largest_effect_of_the_leading_metric_leads() -> None:
    small, large = change("n1-float32", effect=0.1), change("n64-float32", effect=1.0, after=4.0 * (1 << 20))
    assert "2.00 U -> 4.00 U" in sentence(small, large, change(metric="saved_bytes", effect=9.0))


def test_a_bfloat16_cast_is_named_as_such() -> None:
    found = sentence(
        change(metric="g_rel_l2_lp", before=3.1e-8, after=1.4e-3),
        change(metric="g_mantissa_bits", before=24.0, after=8.0),
    )
    assert found.startswith("a bfloat16 cast of the gradient (24 -> 8 mantissa bits): relative L2 error")
    assert "3.1e-08 -> 0.0014" in found


def test_a_gradient_of_zeros_alone_is_not_called_a_cast() -> None:
    found = sentence(
        change(metric="g_rel_l2_lp", before=3.1e-8, after=1.0),
        change(metric="g_mantissa_bits", before=24.0, after=0.0),
    )
    assert found.startswith("relative L2 error")


def test_a_failed_check_is_told_by_its_title_and_reason() -> None:
    found = sentence(change(metric="gradient_defined", before=1.0, after=0.0, reason="gradient is None"))
    assert found == (
        "contract of fused: “each output used alone gives a defined gradient” no longer holds (gradient is None) "
        "in case n64-float32 (1 of 4), at 1a2b3c4"
    )


def test_a_sentence_counts_the_cases_of_what_it_names() -> None:
    raised = change("n1-bfloat16", metric="completes", before=1.0, after=0.0, reason="raised: RuntimeError")
    others = [change(case, metric="inputs_unchanged", before=1.0, after=0.0) for case in CASES]
    found = sentence(raised, *others)
    assert "raised: RuntimeError" in found
    assert "in case n1-bfloat16 (1 of 4)" in found


def test_bytes_that_look_equal_in_units_are_told_in_bytes() -> None:
    found = sentence(change(before=2097152.0, after=2102000.0))
    assert "2,097,152 bytes -> 2,102,000 bytes" in found


def test_families_kernels_and_directions_are_findings_of_their_own_the_most_serious_first() -> None:
    changes = [change(), change(metric="operations"), change(state=State.IMPROVE), change(kernel="online")]
    found = cluster(changes, {"fused": CASES, "online": CASES}, SHA)
    assert [(item.kernel, str(item.family), str(item.direction)) for item in found] == [
        ("fused", "memory", "regress"),
        ("online", "memory", "regress"),
        ("fused", "work", "regress"),
        ("fused", "memory", "improve"),
    ]


def test_a_value_that_is_not_finite_is_said_in_words() -> None:
    assert "3.1e-08 -> not finite" in sentence(change(metric="g_rel_l2_lp", before=3.1e-8, after=None))
