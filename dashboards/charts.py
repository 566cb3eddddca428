"""Chart specifications: pure functions from the read side's dataclasses to Vega-Lite.

They draw nothing (dashboards.drawing and static/chart.js do) and hold no state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.formats import STATES, instant, quantity, samples_median, short
from service.catalogue import BY_NAME, MetricClass, Rule
from service.queries import Point, SeriesView

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_UNITS = {"1": None, "nat": "nat", "ulp": "ulp"}
SHAPES = {
    "regress": "triangle-up",
    "invalid": "cross",
    "incomparable": "diamond",
    "missing": "stroke",
    "no-baseline": "square",
    "inconclusive": "triangle-right",
    "improve": "triangle-down",
    "pass": "circle",
    "unjudged": "stroke",
}


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one scheme; the same as the custom properties in static/style.css."""

    surface: str
    ink: str
    muted: str
    line: str
    states: dict[str, str]


LIGHT = Palette(
    surface="#ffffff",
    ink="#171a1f",
    muted="#5a6472",
    line="#e1e5ea",
    states={
        "pass": "#1a7a4a",
        "improve": "#0f62c4",
        "regress": "#c22a1c",
        "inconclusive": "#8a5f00",
        "no-baseline": "#5a6472",
        "missing": "#5a6472",
        "incomparable": "#7a3cb2",
        "invalid": "#a3470a",
        "unjudged": "#5a6472",
    },
)
DARK = Palette(
    surface="#101318",
    ink="#e5e9ef",
    muted="#98a2b0",
    line="#2a3039",
    states={
        "pass": "#4fc48a",
        "improve": "#6fb3ff",
        "regress": "#ff7d6e",
        "inconclusive": "#e2b24c",
        "no-baseline": "#98a2b0",
        "missing": "#98a2b0",
        "incomparable": "#c69df2",
        "invalid": "#f09a5c",
        "unjudged": "#98a2b0",
    },
)
PALETTES = {"light": LIGHT, "dark": DARK}


def history(
    view: SeriesView, *, palette: Palette, commit_address: Callable[[str], str], width: int | str = "container"
) -> Spec:
    """One metric of one series over the commits, oldest at the left.

    Every raw sample is a faint point; a line joins the medians within a segment; each commit's mark has the shape and
    colour of the state of this series there. Commits without a value (an outcome other than ok, not finite)
    stand at the top edge. Errors have a logarithmic axis, on which a zero is drawn a decade under the smallest value;
    the tooltip says 0. Of a fixed `width` it is an image that stands alone: with a title and a background.
    """
    scale = _Scale.of(view)
    commits = [_commit_row(view, index, scale, commit_address) for index in range(len(view.points))]
    valued = [row for row in commits if row["value"] is not None]
    gaps = [row for row in commits if row["value"] is None]
    y = {"field": "value", "type": "quantitative", "title": scale.title, "scale": scale.scale, "axis": scale.axis}
    return {
        "$schema": SCHEMA,
        "description": f"{view.title} of {view.kernel} on {view.case_id}, by commit",
        "width": width,
        "height": 300,
        "autosize": {"type": "fit", "contains": "padding", "resize": True},
        **({"background": "transparent"} if width == "container" else _standing_alone(view, palette)),
        "datasets": {
            "valued": valued,
            "gaps": gaps,
            "samples": [sample for point in view.points for sample in _sample_rows(point, scale)],
            "segments": _segment_starts(view.points),
        },
        "encoding": {"x": _commit_axis(view.points)},
        "layer": [
            _line_layer(y, palette),
            _sample_layer(y, palette),
            *([_segment_layer(palette)] if len({point.segment for point in view.points}) > 1 else []),
            *([_state_layer(y, valued, palette)] if valued else []),
            *([_gap_layer(palette)] if gaps else []),
        ],
        "config": _config(palette),
    }


@dataclass(frozen=True, slots=True)
class _Scale:
    """How a metric's values become positions on the y axis; its title is the unit, None for a ratio."""

    title: str | None
    scale: Spec
    axis: Spec
    divisor: float = 1.0
    zero_at: float = 0.0

    @classmethod
    def of(cls, view: SeriesView) -> "_Scale":
        metric = BY_NAME[view.metric]
        values = [sample for point in view.points for sample in point.samples]
        if metric.rule is Rule.CHECK:
            axis = {"values": [0, 1], "labelExpr": "datum.value ? 'passes' : 'fails'"}
            return cls(None, {"domain": [-0.15, 1.15], "nice": False}, axis)
        if _is_error(view.metric) and any(values):
            return cls._logarithmic(_UNITS[view.unit], values)
        if view.unit == "byte" and view.unit_bytes:
            divisor = float(view.unit_bytes)
            return cls("U", {"zero": _shows_zero(values)}, {}, divisor=divisor)
        if view.unit == "second":
            return cls(None, {"zero": _shows_zero(values)}, {"labelExpr": "format(datum.value, '~s') + 's'"})
        return cls(_UNITS.get(view.unit, f"{view.unit}s"), {"zero": _shows_zero(values)}, {})

    @classmethod
    def _logarithmic(cls, title: str | None, values: Sequence[float]) -> "_Scale":
        lowest, highest = min(value for value in values if value > 0), max(values)
        zero_at = lowest / 10
        domain = [zero_at / 1.5 if 0 in values else lowest / 3, highest * 3]
        axis = {"format": ".0e", "labelOverlap": True, "tickCount": 6}
        return cls(title, {"type": "log", "domain": domain, "nice": False}, axis, zero_at=zero_at)

    def position(self, value: float) -> float:
        return value / self.divisor if value else self.zero_at


def draws_zeros_apart(view: SeriesView) -> bool:
    """Whether the chart has zeros that its logarithmic axis cannot hold, so that the page says where they are."""
    values = [sample for point in view.points for sample in point.samples]
    return _is_error(view.metric) and any(values) and 0 in values


def _is_error(metric_name: str) -> bool:
    metric = BY_NAME[metric_name]
    return metric.metric_class is MetricClass.NUMERIC and metric.unit in ("1", "nat", "ulp") and not metric.signed


def _shows_zero(values: Sequence[float]) -> bool:
    """Whether an axis from zero still lets the steps be seen: not where all values lie within a factor of 1.5."""
    return not values or min(values) == max(values) or max(values) > 1.5 * min(values)


def _key(sha: str) -> str:
    """The x position of a commit: long enough to be unique in a history, cut to seven characters on the axis."""
    return sha[:12]


def _commit_row(view: SeriesView, index: int, scale: _Scale, commit_address: Callable[[str], str]) -> Spec:
    point = view.points[index]
    middle = samples_median(point.samples)
    return {
        "commit": _key(point.sha),
        "sha": short(point.sha),
        "value": None if middle is None else scale.position(middle),
        "shown": _shown(view, point, middle),
        "samples": len(point.samples),
        "state": point.state or "unjudged",
        "subject": point.subject,
        "author": point.author,
        "time": instant(point.committed_at),
        "segment": point.segment,
        "address": commit_address(point.sha),
    }


def _shown(view: SeriesView, point: Point, middle: float | None) -> str:
    if middle is not None:
        return str(quantity(middle, view.unit, view.unit_bytes))
    return "not finite" if point.nonfinite else f"no value: {point.outcome}"


def _sample_rows(point: Point, scale: _Scale) -> list[Spec]:
    return [{"commit": _key(point.sha), "value": scale.position(sample)} for sample in point.samples]


def _segment_starts(points: Sequence[Point]) -> list[Spec]:
    """The commits after the first at which an environment is met for the first time."""
    first_met = {point.segment: point.sha for point in reversed(points)}
    return [{"commit": _key(sha)} for sha in dict.fromkeys(first_met.values()) if sha != points[0].sha]


def _commit_axis(points: Sequence[Point]) -> Spec:
    return {
        "field": "commit",
        "type": "ordinal",
        "title": None,
        "scale": {"domain": list(dict.fromkeys(_key(point.sha) for point in points)), "type": "point", "padding": 0.5},
        "axis": {"labelExpr": "slice(datum.label, 0, 7)", "labelAngle": -45, "labelOverlap": True, "grid": False},
    }


def _line_layer(y: Spec, palette: Palette) -> Spec:
    return {
        "data": {"name": "valued"},
        "mark": {"type": "line", "strokeWidth": 1.25, "color": palette.muted, "opacity": 0.7},
        "encoding": {"y": y, "detail": {"field": "segment"}},
    }


def _sample_layer(y: Spec, palette: Palette) -> Spec:
    return {
        "data": {"name": "samples"},
        "mark": {"type": "point", "filled": True, "size": 16, "color": palette.muted, "opacity": 0.45},
        "encoding": {"y": y},
    }


def _state_layer(y: Spec, valued: Sequence[Spec], palette: Palette) -> Spec:
    present = [word for word in (*STATES, "unjudged") if any(row["state"] == word for row in valued)]
    legend = {"title": None, "orient": "top", "columns": {"expr": "width < 420 ? 3 : 9"}} if len(present) > 1 else None
    return {
        "data": {"name": "valued"},
        "mark": {"type": "point", "filled": True, "size": 85, "opacity": 1, "cursor": "pointer"},
        "encoding": {
            "y": y,
            "href": {"field": "address"},
            "tooltip": _tooltip(),
            "color": {
                "field": "state",
                "type": "nominal",
                "scale": {"domain": present, "range": [palette.states[word] for word in present]},
                "legend": legend,
            },
            "shape": {
                "field": "state",
                "type": "nominal",
                "scale": {"domain": present, "range": [SHAPES[word] for word in present]},
                "legend": legend,
            },
        },
    }


def _gap_layer(palette: Palette) -> Spec:
    return {
        "data": {"name": "gaps"},
        "mark": {
            "type": "point",
            "shape": "cross",
            "filled": True,
            "size": 70,
            "opacity": 1,
            "color": palette.states["invalid"],
        },
        "encoding": {"y": {"value": 6}, "href": {"field": "address"}, "tooltip": _tooltip()},
    }


def _segment_layer(palette: Palette) -> Spec:
    return {
        "data": {"name": "segments"},
        "mark": {"type": "rule", "strokeDash": [3, 3], "color": palette.states["incomparable"], "tooltip": None},
    }


def _tooltip() -> list[Spec]:
    fields = ("sha", "subject", "author", "time", "shown", "samples", "state")
    return [{"field": field, "type": "nominal", "title": "value" if field == "shown" else field} for field in fields]


def _standing_alone(view: SeriesView, palette: Palette) -> Spec:
    title = {"text": view.title, "subtitle": f"{view.kernel}, {view.case_id}", "anchor": "start"}
    colours = {"color": palette.ink, "subtitleColor": palette.muted}
    return {"background": palette.surface, "padding": 12, "title": title | colours}


def _config(palette: Palette) -> Spec:
    return {
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": palette.muted,
            "titleColor": palette.muted,
            "titleFontWeight": "normal",
            "titleFontSize": 12,
            "labelFontSize": 11,
            "gridColor": palette.line,
            "domainColor": palette.line,
            "tickColor": palette.line,
        },
        "legend": {"labelColor": palette.ink, "labelFontSize": 12, "symbolSize": 80},
    }
