"""How numbers, steps, states and rules read on a page."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from dashboards import formats
from dashboards.charts import PALETTES, SHAPES
from service.catalogue import METRICS, Rule

U = 64 * 4096 * 4


@pytest.mark.parametrize(
    ("value", "unit", "unit_bytes", "text"),
    [
        (3 * U, "byte", U, "3.00 U (3.00 MiB)"),
        (12 * 2**20, "byte", 0, "12.0 MiB"),
        (0, "byte", U, "0.00 U (0 B)"),
        (1023, "byte", 0, "1023 B"),
        (1024, "byte", 0, "1.00 KiB"),
        (3 * 2**50, "byte", 0, "3,072 TiB"),
        (0.0012345, "second", 0, "1.23 ms"),
        (2.5e-7, "second", 0, "250 ns"),
        (0.0, "second", 0, "0 s"),
        (75.0, "second", 0, "75.0 s"),
        (1.41e-3, "1", 0, "1.41e-3"),
        (-2.0e-12, "1", 0, "-2.00e-12"),
        (0.0, "nat", 0, "0"),
        (0.517, "ulp", 0, "0.517 ulp"),
        (24.0, "bit", 0, "24 bits"),
        (0.0, "pass", 0, "fails"),
        (1.0, "pass", 0, "passes"),
        (1337, "operation", 0, "1,337"),
        (2.5, "operation", 0, "2.5"),
        (None, "byte", U, formats.NONE),
    ],
)
def test_a_value_reads_in_the_unit_of_a_person(value: float | None, unit: str, unit_bytes: int, text: str) -> None:
    assert str(formats.quantity(value, unit, unit_bytes)) == text


@pytest.mark.parametrize(
    ("metric", "before", "after", "words"),
    [
        ("step_peak_bytes", 2.0, 3.0, "1.50x more memory"),
        ("step_peak_bytes", 4.5, 2.0, "2.25x less memory"),
        ("step_peak_bytes", 1000.0, 1005.0, "0.5 % more memory"),
        ("traffic_bytes", 24.0, 48.0, "2.00x more traffic"),
        ("operations", 57.0, 1337.0, "23.5x more operations"),
        ("operations", 57.0, 19.0, "3.00x fewer operations"),
        ("g_rel_l2_lp", 3.1e-8, 1.41e-3, "45,500x larger error"),
        ("g_rel_l2_lp", 1e-3, 0.0, "no error left"),
        ("g_rel_l2_lp", 0.0, 1e-3, "error where there was none"),
        ("g_scale_lp", -1e-3, 2e-3, "2.00x larger error"),
        ("g_bf16_grid", 0.25, 1.0, "4.00x larger share"),
        ("g_mantissa_bits", 24.0, 8.0, "16 bits fewer"),
        ("grad_leak_lp", 0.0, 3.0, "rows where there was none"),
        ("gradient_defined", 1.0, 0.0, "passed, fails now"),
        ("gradient_defined", 0.0, 1.0, "failed, passes now"),
        ("step_cpu_seconds", 1.0, 2.0, "2.00x longer"),
        ("step_peak_bytes", 2.0, 2.0, "unchanged"),
        ("step_peak_bytes", None, 2.0, ""),
        ("g_rel_l2_lp", 2.0, None, ""),
    ],
)
def test_a_step_reads_as_words(metric: str, before: float | None, after: float | None, words: str) -> None:
    assert formats.change(before, after, metric) == words


def test_every_step_of_every_metric_has_words() -> None:
    for metric in METRICS:
        for before, after in ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (2.0, 8.0)):
            assert formats.change(before, after, metric.name), metric.name


def test_every_rule_has_a_sentence() -> None:
    assert set(formats.RULES) == set(Rule)


def test_a_rule_of_a_newer_judge_is_shown_by_its_name() -> None:
    assert formats.rule_words("bytes") == formats.RULES[Rule.BYTES]
    assert formats.rule_words("wavelet") == "wavelet"


def test_what_the_gate_makes_of_a_verdict_is_said() -> None:
    assert [formats.ci(word) for word in ("pass", "fail", "undecided")] == list(formats.CI.values())
    assert formats.ci("of tomorrow") == formats.CI["undecided"]
    assert len(formats.STATES) == 8


def test_every_state_has_a_shape_and_a_colour_in_both_schemes() -> None:
    words = {*formats.STATES, "unjudged"}
    assert set(SHAPES) == words
    assert all(set(palette.states) == words for palette in PALETTES.values())


def test_a_commit_that_was_never_judged_is_unjudged_and_not_pass() -> None:
    assert formats.state(None).word == "unjudged"
    assert formats.state(None).meaning == "not judged yet"


def test_times_are_shown_in_utc() -> None:
    at = datetime(2026, 3, 2, 1, 30, 5, tzinfo=timezone(timedelta(hours=2)))
    assert formats.minute(at) == "2026-03-01 23:30 UTC"
    assert formats.instant(at) == "2026-03-01T23:30:05Z"
    assert formats.instant(datetime(2026, 3, 2, tzinfo=UTC)) == "2026-03-02T00:00:00Z"


def test_raw_samples_keep_every_digit_and_whole_ones_have_no_fraction() -> None:
    assert formats.raw(12582912.0) == "12582912"
    assert formats.raw(12582912) == "12582912"
    assert float(formats.raw(0.1 + 0.2)) == 0.1 + 0.2
    assert formats.sample(0.0020790349) == "0.00207903"


def test_the_middle_ignores_what_is_not_finite() -> None:
    assert formats.samples_median([1.0, float("nan"), 3.0]) == 2.0
    assert formats.samples_median([]) is None
