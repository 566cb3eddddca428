"""A payload of each wire version stays what it was: accepted, and read to the same values."""

import json
from pathlib import Path

from service.catalogue import BY_NAME
from service.samples import pack, unpack
from service.wire import Result

GOLDEN = Path(__file__).parent / "golden"


def test_the_golden_payload_of_version_1_is_read_whole() -> None:
    body = (GOLDEN / "result-v1.json").read_bytes()
    result = Result.model_validate_json(body)
    told, kept = json.loads(body), result.model_dump(mode="json", exclude_unset=True)
    for times in ("started_at", "finished_at"):
        del told[times], kept[times]
    del told["commit"]["committed_at"], kept["commit"]["committed_at"]
    assert kept == told
    assert result.commit.committed_at.isoformat() == "2026-01-02T02:04:05+00:00"
    assert (result.finished_at - result.started_at).total_seconds() == 90.25


def test_the_series_of_version_1_keep_their_names() -> None:
    result = Result.model_validate_json((GOLDEN / "result-v1.json").read_bytes())
    assert [row.case.id for row in result.measurements] == [
        "n64-v32768-bfloat16-gradient-mask-chunk16-t0.7-confident-seed3",
        "n1-v1000-float32-gradient",
    ]


def test_the_samples_of_version_1_are_stored_exactly() -> None:
    for row in Result.model_validate_json((GOLDEN / "result-v1.json").read_bytes()).measurements:
        values, nonfinite = unpack(pack(row.values, row.nonfinite))
        assert {name: list(samples) for name, samples in values.items()} == row.values
        assert list(nonfinite) == row.nonfinite


def test_no_code_of_the_catalogue_was_given_away_again() -> None:
    """Packed rows name metrics by code: these stay for ever, new ones come behind."""
    codes = {"forward_peak_bytes": 1, "collectives": 8, "lp_abs_max": 20, "g_rel_l2_lp": 40, "g_rel_l2_ent": 50}
    codes |= {"perm_delta_g_ent": 59, "forward_cpu_seconds": 70, "callable": 90, "result_shape": 108}
    assert {name: BY_NAME[name].code for name in codes} == codes
