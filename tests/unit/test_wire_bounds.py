"""Every field on the wire is bounded and can be stored: found by looking at the models, not by a list of fields."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from service import wire
from service.api import bodies
from service.api.findings import Decision, Dismissal
from service.api.targets import CommitsBody
from service.api.tokens import TokenRequest
from service.app import create_app
from service.errors import Invalid
from service.settings import Settings

Path = tuple[str | int, ...]

COMMIT = {
    "sha": "a" * 40,
    "parents": ["b" * 40],
    "author": "Ada",
    "subject": "one",
    "committed_at": "2026-01-01T00:00:00Z",
    "watched_digest": "c" * 64,
    "watched_paths": "e" * 64,
}
ATTEMPT = "6f1f7a52-8f4c-4a52-9f07-3f3c6a1f8a11"
TARGET = {
    "name": "demo",
    "repository": "/srv/demo.git",
    "branch": "main",
    "paths": ["lossfn.py"],
    "suite": "demo",
    "python": {"path": ["."], "requires": ["x==1"], "env": {"A": "b"}},
    "kernels": [
        {
            "name": "fused",
            "entry": "lossfn:log_prob",
            "arguments": {"logits": "logits", "targets": "tokens", "chunk_size": "size"},
            "returns": ["log_prob"],
            "absent": {"chunk_size": ["deep", {"er": "text"}]},
            "since": {"chunk_size": "ca7a7ea"},
            "control": "legacy",
            "contract": {"gradient": "float32"},
        }
    ],
    "require": {"devices": ["cpu"], "metrics": ["exact"]},
    "ci": {"missing": "fail"},
}
FACTS = {"exact": {"a": "b"}, "numeric": {"a": ["b"]}, "timing": {"a": {"b": "c"}}, "volatile": {"a": "b"}}
MEASUREMENT = {
    "kernel": "fused",
    "role": "kernel",
    "case": {
        "tokens": 64,
        "vocabulary": 4096,
        "dtype": "float32",
        "entropy": "value",
        "distribution": "spread",
        "upstream": "signed",
    },
    "outcome": "raised",
    "inputs_digest": "d" * 64,
    "values": {"operations": [24.0]},
    "nonfinite": ["ent_abs_max"],
    "notes": {"outcome": "why"},
}
RESULT = {
    "attempt": ATTEMPT,
    "target": "demo",
    "commit": COMMIT,
    "suite": "demo",
    "suite_digest": "f" * 64,
    "environment": {"device_class": "cpu", "device": "CPU", **FACTS},
    "started_at": "2026-01-01T00:00:00Z",
    "finished_at": "2026-01-01T00:01:00Z",
    "units": {"operations": "operation"},
    "measurements": [MEASUREMENT],
}
# A payload of every model that a client sends or receives, with each of its texts filled in.
EXAMPLES: dict[type[BaseModel], dict[str, Any]] = {
    wire.Result: RESULT,
    wire.Target: TARGET,
    CommitsBody: {"target": "demo", "branch": "main", "head": "a" * 40, "commits": [COMMIT]},
    TokenRequest: {"scope": "read", "target": "demo", "label": "one", "expires_at": "2026-01-01T00:00:00Z"},
    Decision: {"reason": "why", "seen": "open"},
    Dismissal: {"reason": "why", "seen": "open", "until": "2026-01-01T00:00:00Z"},
    wire.JobRequest: {"target": "demo", "commit": "a" * 40, "kind": "measure", "suite": "demo", "device_class": "cpu"},
    wire.RunnerHello: {"name": "host", "device_class": "cpu", "capabilities": {"a": "b"}},
    wire.ClaimRequest: {"runner": "host", "device_class": "cpu"},
    wire.Renewal: {"attempt": ATTEMPT, "progress": "one"},
    wire.Failure: {"attempt": ATTEMPT, "transient": True, "reason": "one"},
    wire.Finish: {"attempt": ATTEMPT},
    wire.LeasedJob: {
        "id": 1,
        "attempt": ATTEMPT,
        "kind": "measure",
        "target": TARGET,
        "commit": "a" * 40,
        "suite": "demo",
        "lease_seconds": 60.0,
        "lease_expires_at": "2026-01-01T00:00:00Z",
    },
}
MODELS = pytest.mark.parametrize("model", EXAMPLES, ids=lambda model: model.__name__)
UNSTORABLE = ("a\0b", "\ud800")


def _leaves(value: Any, at: Path = ()) -> Iterator[Path]:
    """Where the texts of a payload are; a path that ends in `(key)` means the key."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        if isinstance(member, str):
            yield (*at, key)
        yield from _leaves(member, (*at, key))


def _with(payload: Any, path: Path, text: str) -> Any:
    changed = json.loads(json.dumps(payload))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = text
    return changed


def _keys(value: Any, at: Path = ()) -> Iterator[Path]:
    if isinstance(value, dict):
        yield from ((*at, key) for key in value)
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield from _keys(member, (*at, key))


def _renamed(payload: Any, path: Path, text: str) -> Any:
    changed = json.loads(json.dumps(payload))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[text] = holder.pop(path[-1])
    return changed


@MODELS
def test_the_examples_are_good_and_fill_in_every_field_of_text(model: type[BaseModel]) -> None:
    assert model.model_validate_json(json.dumps(EXAMPLES[model]))
    filled = {str(path[-1]) for path in _keys(EXAMPLES[model])}
    texts = {
        name
        for schema in _schemas(model)
        for name, field in schema.get("properties", {}).items()
        if any(_holds_text(part) for part in _parts(field))
    }
    assert texts <= filled


@MODELS
def test_no_text_anywhere_can_hold_what_a_database_cannot_store(model: type[BaseModel]) -> None:
    example = EXAMPLES[model]
    broken = [_with(example, path, text) for path in _leaves(example) for text in UNSTORABLE]
    broken += [_renamed(example, path, text) for path in _keys(example) for text in UNSTORABLE]
    assert len(broken) > 2
    for payload in broken:
        with pytest.raises(ValidationError):
            model.model_validate(payload)
        with pytest.raises(ValidationError):
            model.model_validate_json(json.dumps(payload))


def _schemas(model: type[BaseModel]) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    return [schema, *schema.get("$defs", {}).values()]


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and every schema inside it."""
    if isinstance(schema, dict):
        yield schema
        for member in schema.values():
            yield from _parts(member)
    elif isinstance(schema, list):
        for member in schema:
            yield from _parts(member)


def _holds_text(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "string" and "const" not in schema


BOUNDS = {
    "string": ({"maxLength"}, {"pattern"}, {"enum"}, {"const"}, {"format"}),
    "integer": ({"minimum", "maximum"}, {"minimum", "exclusiveMaximum"}, {"const"}),
    "number": ({"exclusiveMinimum", "maximum"}, {"minimum", "maximum"}),
    "array": ({"maxItems"},),
    "object": ({"maxProperties"}, {"properties"}),
}
# A sample is held to its metric: whole, a truth value, positive.
SAMPLE = {"type": "number"}


@MODELS
def test_every_field_has_bounds(model: type[BaseModel]) -> None:
    unbounded = [
        part
        for part in _parts(model.model_json_schema())
        if isinstance(part.get("type"), str)
        and part["type"] in BOUNDS
        and part != SAMPLE
        and not any(wanted <= set(part) for wanted in BOUNDS[part["type"]])
    ]
    assert unbounded == []


def test_every_model_that_a_route_reads_has_an_example() -> None:
    document = create_app(Settings(database_url="sqlite:///unused")).openapi()
    read = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for methods in document["paths"].values()
        for operation in methods.values()
        if "requestBody" in operation
    }
    assert read == {model.__name__ for model in EXAMPLES} - {"LeasedJob"}


@pytest.mark.parametrize("fact", [10**4000, -(1 << 63) - 1, "x" * 4001, [0] * 1001, {"a": {"b": ["\0"]}}, {"\0": 1}])
def test_a_fact_that_cannot_be_stored_is_refused_at_any_depth(fact: Any) -> None:
    hello = {"name": "host", "device_class": "cpu", "capabilities": {"a": [fact]}}
    with pytest.raises(ValidationError, match="cannot be stored"):
        wire.RunnerHello.model_validate(hello)


@pytest.mark.parametrize("size", [1 << 63, 10**250, (1 << 24) + 1])
def test_a_size_beyond_all_hardware_is_refused(size: int) -> None:
    with pytest.raises(ValidationError, match="chunk_size"):
        wire.Case(tokens=1, vocabulary=1, chunk_size=size)


def test_the_longest_case_has_a_name_that_fits_its_column() -> None:
    case = wire.Case(
        tokens=1 << 24,
        vocabulary=1 << 24,
        dtype="bfloat16",
        entropy="gradient",
        keep_mask=True,
        chunk_size=1 << 24,
        tensor_parallel=1024,
        temperature=1.2345678901234567e-300,
        distribution="confident_wrong",
        upstream="one_row",
        seed=(1 << 63) - 1,
    )
    assert len(case.id) <= 200


def test_a_million_unknown_fields_are_refused_in_one_sentence() -> None:
    body = b"{" + b",".join(b'"k%d":0' % number for number in range(100_000)) + b"}"
    with pytest.raises(Invalid, match="100000 members") as caught:
        bodies.parse(wire.Result, body)
    assert caught.value.errors == ()


def test_the_first_measurement_that_makes_no_sense_is_the_one_that_is_told() -> None:
    rows = [{**MEASUREMENT, "case": {"tokens": -1, "vocabulary": 0}} for _ in range(10)]
    with pytest.raises(Invalid) as caught:
        bodies.parse(wire.Result, json.dumps(RESULT | {"measurements": rows}).encode())
    assert [error.field for error in caught.value.errors] == [
        "body.measurements[0].case.tokens",
        "body.measurements[0].case.vocabulary",
    ]
