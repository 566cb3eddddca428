"""Chart specifications: what is drawn where, without drawing it."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dashboards.assets import STATIC
from dashboards.charts import DARK, LIGHT, PALETTES, Palette, draws_zeros_apart, history
from service.catalogue import BY_NAME, METRICS
from service.queries import Point, SeriesView

U = 64 * 4096 * 4
START = datetime(2026, 3, 2, tzinfo=UTC)


def point(index: int, *samples: float, **changes: Any) -> Point:
    fields: dict[str, Any] = {
        "sha": f"{index:07x}".ljust(40, "0"),
        "subject": f"commit {index}",
        "author": "Ada",
        "committed_at": START + timedelta(hours=index),
        "samples": samples,
        "nonfinite": False,
        "outcome": "ok",
        "segment": "a",
        "state": "pass",
    }
    return Point(**(fields | changes))


def view(metric: str, *points: Point) -> SeriesView:
    known = BY_NAME[metric]
    return SeriesView("story", "fused", "n64-v4096", metric, known.unit, known.title, U, points)


def draw(series: SeriesView, **changes: Any) -> dict[str, Any]:
    fields = {"palette": LIGHT, "commit_address": lambda sha: f"/commits/{sha}"}
    return history(series, **(fields | changes))


def test_every_raw_sample_is_a_point_and_the_mark_stands_at_their_median() -> None:
    spec = draw(view("step_peak_bytes", point(0, 2 * U, 4 * U, 3 * U)))
    assert [row["value"] for row in spec["datasets"]["samples"]] == [2.0, 4.0, 3.0]
    (row,) = spec["datasets"]["valued"]
    assert row["value"] == 3.0
    assert row["shown"] == "3.00 U (3.00 MiB)"
    assert row["address"] == "/commits/" + "0" * 40


def test_commits_stand_in_the_order_of_the_graph() -> None:
    later, earlier = point(1, 1.0, committed_at=START), point(2, 1.0, committed_at=START - timedelta(days=9))
    spec = draw(view("operations", later, earlier))
    assert spec["encoding"]["x"]["scale"]["domain"] == [later.sha[:12], earlier.sha[:12]]


def test_a_commit_measured_twice_has_one_place_on_the_axis() -> None:
    spec = draw(view("operations", point(1, 5.0), point(1, 6.0)))
    assert len(spec["encoding"]["x"]["scale"]["domain"]) == 1
    assert len(spec["datasets"]["valued"]) == 2


def test_a_commit_without_a_value_stands_at_the_top_with_its_outcome() -> None:
    spec = draw(view("operations", point(0, 5.0), point(1, outcome="timeout"), point(2, nonfinite=True)))
    assert [row["shown"] for row in spec["datasets"]["gaps"]] == ["no value: timeout", "not finite"]
    assert len(spec["datasets"]["valued"]) == 1


@pytest.mark.parametrize("metric", ["g_rel_l2_lp", "lp_abs_max", "g_ulp_p50_ent"])
def test_errors_have_a_logarithmic_axis_that_holds_a_zero(metric: str) -> None:
    series = view(metric, point(0, 0.0), point(1, 1e-8), point(2, 1e-3))
    scale = draw(series)["layer"][0]["encoding"]["y"]["scale"]
    assert scale["type"] == "log"
    zero = draw(series)["datasets"]["valued"][0]
    assert zero["value"] == pytest.approx(1e-9)
    assert zero["shown"].startswith("0")
    assert scale["domain"][0] < zero["value"]
    assert draws_zeros_apart(series)


def test_a_history_of_zeros_only_has_a_linear_axis() -> None:
    series = view("g_rel_l2_lp", point(0, 0.0), point(1, 0.0))
    assert "type" not in draw(series)["layer"][0]["encoding"]["y"]["scale"]
    assert not draws_zeros_apart(series)


def test_a_signed_error_has_a_linear_axis() -> None:
    assert "type" not in draw(view("g_scale_lp", point(0, -1e-3)))["layer"][0]["encoding"]["y"]["scale"]


def test_an_axis_starts_at_zero_unless_that_would_hide_the_steps() -> None:
    def zero(*values: float) -> bool:
        points = [point(index, value) for index, value in enumerate(values)]
        return bool(draw(view("operations", *points))["layer"][0]["encoding"]["y"]["scale"]["zero"])

    assert zero(100.0, 151.0)
    assert not zero(100.0, 149.0)
    assert zero(100.0, 100.0)


def test_a_changed_environment_is_marked_where_it_is_first_met() -> None:
    points = [point(0, 1.0), point(1, 1.0, segment="b"), point(2, 1.0), point(3, 1.0, segment="b")]
    spec = draw(view("operations", *points))
    assert spec["datasets"]["segments"] == [{"commit": points[1].sha[:12]}]
    assert any(layer["mark"]["type"] == "rule" for layer in spec["layer"])


def test_one_environment_has_no_mark() -> None:
    spec = draw(view("operations", point(0, 1.0), point(1, 1.0)))
    assert spec["datasets"]["segments"] == []
    assert not any(layer["mark"]["type"] == "rule" for layer in spec["layer"])


def test_a_state_keeps_its_shape_and_colour_whatever_else_is_shown() -> None:
    spec = draw(view("operations", point(0, 1.0), point(1, 1.0, state="regress"), point(2, 1.0, state=None)))
    marks = next(layer["encoding"] for layer in spec["layer"] if "shape" in layer["encoding"])
    assert marks["shape"]["scale"] == {
        "domain": ["regress", "pass", "unjudged"],
        "range": ["triangle-up", "circle", "stroke"],
    }
    assert marks["color"]["scale"]["range"][0] == LIGHT.states["regress"]


def test_an_image_stands_alone_and_a_page_lets_its_surface_through() -> None:
    series = view("operations", point(0, 1.0))
    image = draw(series, width=960, palette=DARK)
    assert image["background"] == DARK.surface
    assert image["title"]["text"] == series.title
    page = draw(series)
    assert page["background"] == "transparent"
    assert "title" not in page


@pytest.mark.parametrize("metric", [metric.name for metric in METRICS])
def test_every_metric_has_a_chart_that_is_plain_json(metric: str) -> None:
    text = json.dumps(draw(view(metric, point(0, 0.0), point(1, 1.0), point(2, outcome="killed"))), allow_nan=False)
    assert json.loads(text)["datasets"]["gaps"]


def style(scheme: str) -> dict[str, str]:
    light, _, dark = (STATIC / "style.css").read_text().partition("prefers-color-scheme: dark")
    block = light if scheme == "light" else dark.partition("}")[0]
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))


@pytest.mark.parametrize(("scheme", "palette"), PALETTES.items())
def test_charts_and_pages_have_the_same_colours(scheme: str, palette: Palette) -> None:
    named = style(scheme)
    for name in ("surface", "ink", "muted", "line"):
        assert named[name] == getattr(palette, name)
    for word, colour in palette.states.items():
        assert named[word] == colour


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", PALETTES)
def test_text_stands_out_from_its_surface_by_4_5_to_1(scheme: str) -> None:
    named = style(scheme)
    for name in (*PALETTES[scheme].states, "ink", "muted", "link"):
        for surface in ("surface", "raised"):
            darker, lighter = sorted((luminance(named[name]), luminance(named[surface])))
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (name, surface)
