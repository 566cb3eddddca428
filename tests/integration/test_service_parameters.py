"""No parameter of any route, whatever it holds, makes the service fail: found in the OpenAPI document."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from httpx import Client

from service.db import SessionFactory
from service.ingest import ingest, register_target

NONSENSE = (
    "%00",
    "a%00b",
    "%ED%A0%80",
    "%FF",
    "1" * 250,
    "-1",
    "0",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "%27",
    "a" * 5000,
    "0" * 40,
    "true",
)
GOOD = {"target": "demo", "name": "demo", "kernel": "fused", "metric": "operations", "case_id": "n1"}


@pytest.fixture(autouse=True)
def _demo(session_factory: SessionFactory, payloads: SimpleNamespace) -> None:
    with session_factory.begin() as session:
        register_target(session, payloads.target(), registered_by="test")
        ingest(session, payloads.result(payloads.commit("a")), body_digest="1" * 64, posted_by="test")


def _requests(document: dict[str, Any], sha: str) -> Iterator[tuple[str, str]]:
    """(method, address) of every route with nonsense in one parameter, and good values in the others."""
    good = GOOD | {"sha": sha, "job_id": "1", "token_id": "999", "finding_id": "1"}
    for template, methods in document["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                for text in NONSENSE:
                    values = good | {parameter["name"]: text} if parameter["in"] == "path" else good
                    query = f"?{parameter['name']}={text}" if parameter["in"] == "query" else ""
                    yield method, template.format(**values) + query


def test_no_parameter_makes_the_service_fail(
    client: Client, headers: dict[str, dict[str, str]], payloads: SimpleNamespace
) -> None:
    document = client.get("/openapi.json").json()
    addresses = sorted(set(_requests(document, payloads.sha("a"))))
    assert len(addresses) > 300
    failed = []
    for method, address in addresses:
        if "wait=Infinity" in address or "wait=1" in address:  # waits as long as the service lets anyone wait
            continue
        status = client.request(method, quote(address, safe="/%?=&"), headers=headers["admin"]).status_code
        failed += [(method, address[:80], status)] if status >= 500 else []
    assert failed == []


def test_the_extremes_of_what_the_wire_takes_can_be_judged_and_read(
    session_factory: SessionFactory, client: Client, headers: dict[str, dict[str, str]], payloads: SimpleNamespace
) -> None:
    extremes = {"b": (5e-324, 1.0), "c": (1.7e308, float((1 << 63) - 1024)), "d": (5e-324, 1.0), "e": (0.0, 0.0)}
    parent = "a"
    for name, (error, count) in extremes.items():
        values = payloads.values | {"g_rel_l2_lp": [error], "operations": [count]}
        posted = payloads.result(payloads.commit(name, [parent]), [payloads.measurement(values=values)])
        with session_factory.begin() as session:
            ingest(session, posted, body_digest=name * 64, posted_by="test")
        parent = name
    for name in "abcde":  # whoever judges: the service beside it may have the target in hand
        path = f"/api/v1/targets/demo/commits/{payloads.sha(name)}/verdict?wait=30"
        answer = client.get(path, headers=headers["read"])
        assert (answer.status_code, answer.json()["state"] != "missing") == (200, True)
    series = client.get("/api/v1/targets/demo/series", headers=headers["read"]).json()["items"]
    address = f"/api/v1/targets/demo/series/fused/{series[0]['case_id']}"
    for metric in ("g_rel_l2_lp", "operations"):
        assert client.get(f"{address}/{metric}", headers=headers["read"]).status_code == 200
