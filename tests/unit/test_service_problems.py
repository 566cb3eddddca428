"""What the wire refuses is told as a problem document that names the field."""

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from service import wire
from service.api.problems import field_path, invalid

RESULT: dict[str, Any] = {
    "attempt": "6f1f7a52-8f4c-4a52-9f07-3f3c6a1f8a11",
    "target": "demo",
    "commit": {"sha": "a" * 40, "parents": ["b" * 40], "committed_at": "2026-01-01T00:00:00Z"},
    "suite": "demo",
    "environment": {"device_class": "cpu", "device": "CPU", "exact": {"torch": "2"}, "numeric": {}, "timing": {}},
    "started_at": "2026-01-01T00:00:00Z",
    "finished_at": "2026-01-01T00:01:00Z",
    "units": {"step_peak_bytes": "byte", "operations": "operation", "g_rel_l2_lp": "1", "callable": "pass"},
    "measurements": [
        {
            "kernel": "fused",
            "case": {"tokens": 64, "vocabulary": 4096},
            "values": {"step_peak_bytes": [2.0], "operations": [24.0], "g_rel_l2_lp": [3.1e-8], "callable": [1.0]},
        }
    ],
}
ROW = ("measurements", 0)


def _with(path: tuple[str | int, ...], value: Any) -> str:
    payload = json.loads(json.dumps(RESULT))
    at = payload
    for part in path[:-1]:
        at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
    at[path[-1]] = value
    return json.dumps(payload)


def _fields(body: str) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        wire.Result.model_validate_json(body)
    return [error.field for error in invalid(caught.value).errors]


def test_the_payload_that_the_cases_below_break_is_good() -> None:
    assert wire.Result.model_validate_json(json.dumps(RESULT)).measurements[0].case.tokens == 64


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ((*ROW, "values", "g_rel_l2_lp"), [math.nan], "body.measurements[0].values.g_rel_l2_lp[0]"),
        ((*ROW, "values", "g_rel_l2_lp"), [-math.inf], "body.measurements[0].values.g_rel_l2_lp[0]"),
        ((*ROW, "values", "g_rel_l2_lp"), [10**400], "body.measurements[0].values.g_rel_l2_lp[0]"),
        ((*ROW, "case", "temperature"), math.nan, "body.measurements[0].case.temperature"),
        ((*ROW, "case", "seed"), 1 << 63, "body.measurements[0].case.seed"),
        (("environment", "exact", "torch"), {"deep": [math.inf]}, "body.environment.exact.torch"),
        ((*ROW, "values", "step_peak_bytes"), [-1.0], "body.measurements[0].values"),
        ((*ROW, "values", "step_peak_bytes"), [1.5], "body.measurements[0].values"),
        ((*ROW, "values", "speed"), [1.0], "body.measurements[0].values"),
        ((*ROW, "values", "callable"), [0.5], "body.measurements[0].values"),
        ((*ROW, "values", "operations"), [], "body.measurements[0].values.operations"),
        ((*ROW, "nonfinite"), ["operations"], "body.measurements[0].nonfinite"),
        ((*ROW, "nonfinite"), ["ent_abs_max", "ent_abs_max"], "body.measurements[0].nonfinite"),
        ((*ROW, "nonfinite"), ["g_rel_l2_lp"], "body.measurements[0]"),
        ((*ROW, "outcome"), "raised", "body.measurements[0]"),
        ((*ROW, "kernel"), "../etc", "body.measurements[0].kernel"),
        ((*ROW, "notes"), {"outcome": "\0"}, "body.measurements[0].notes.outcome"),
        (("units", "step_peak_bytes"), "kB", "body.units"),
        (("units", "speed"), "m/s", "body.units"),
        (("commit", "sha"), "HEAD", "body.commit.sha"),
        (("commit", "sha"), "a" * 39, "body.commit.sha"),
        (("commit", "parents"), ["HEAD"], "body.commit.parents[0]"),
        (("commit", "subject"), "a\0b", "body.commit.subject"),
        (("commit", "committed_at"), "0001-01-01T00:00:00+14:00", "body.commit.committed_at"),
        (("commit", "committed_at"), "2026-01-01T00:00:00", "body.commit.committed_at"),
        (("attempt",), "again", "body.attempt"),
        (("wire_version",), 2, "body.wire_version"),
        (("job",), 1 << 31, "body.job"),
        (("surprise",), 1, "body.surprise"),
        (("measurements",), [], "body.measurements"),
        (("finished_at",), "1999-01-01T00:00:00Z", "body"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_its_field(path: tuple[str | int, ...], value: Any, field: str) -> None:
    assert _fields(_with(path, value)) == [field]


def test_a_value_without_its_unit_is_refused() -> None:
    body = json.dumps(RESULT | {"units": {"step_peak_bytes": "byte"}})
    assert _fields(body) == ["body"]


def test_the_same_kernel_and_case_twice_is_refused() -> None:
    assert _fields(json.dumps(RESULT | {"measurements": RESULT["measurements"] * 2})) == ["body"]


def test_many_long_errors_make_a_short_document() -> None:
    row = {**RESULT["measurements"][0], "notes": {f"{i}{'x' * 10_000}": "" for i in range(50)}}
    with pytest.raises(ValidationError) as caught:
        wire.Result.model_validate_json(json.dumps(RESULT | {"measurements": [row]}))
    problem = invalid(caught.value).problem()
    assert len(problem["errors"]) == 20
    assert problem["detail"].endswith(", and 30 more")
    assert len(json.dumps(problem)) < 20_000


def test_a_location_reads_as_a_path() -> None:
    assert field_path(("body", "measurements", 3, "values")) == "body.measurements[3].values"
    assert field_path(("query", "limit")) == "query.limit"
