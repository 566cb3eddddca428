"""The OpenAPI document is complete enough to make a client from."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from service.app import API_PREFIX, create_app
from service.settings import Settings

METHODS = ("get", "post", "put", "delete")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of a service that is never started."""
    return create_app(Settings(database_url=f"sqlite:///{tmp_path_factory.mktemp('api')}/unused.sqlite3")).openapi()


def _operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, item[method]) for path, item in document["paths"].items() for method in METHODS if method in item
    ]


def test_every_operation_has_a_name_of_its_own_and_says_what_it_does(document: dict[str, Any]) -> None:
    operations = _operations(document)
    assert len(operations) >= 25
    names = Counter(operation["operationId"] for _, _, operation in operations)
    assert max(names.values()) == 1
    assert [path for path, _, operation in operations if not operation.get("description")] == []
    assert [path for path, _, _ in operations if not path.startswith(API_PREFIX)] == []


def test_every_operation_tells_of_its_problems(document: dict[str, Any]) -> None:
    for path, _, operation in _operations(document):
        content = operation["responses"]["default"]["content"]
        assert content["application/problem+json"]["schema"]["$ref"].endswith("/Problem"), path
        assert "422" not in operation["responses"], path


def test_every_answer_with_a_body_has_a_schema(document: dict[str, Any]) -> None:
    for path, method, operation in _operations(document):
        for status, response in operation["responses"].items():
            if status not in {"204", "default"}:
                assert response["content"]["application/json"]["schema"], (path, method, status)


def test_every_body_has_a_schema(document: dict[str, Any]) -> None:
    bodies = {
        (method, path): operation["requestBody"]["content"]["application/json"]["schema"]
        for path, method, operation in _operations(document)
        if method in {"post", "put"}
    }
    assert bodies["post", f"{API_PREFIX}/results"] == {"$ref": "#/components/schemas/Result"}
    assert all(bodies.values())


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= set(schemas)
    assert {"Result", "Measurement", "Case", "Problem", "VerdictView"} <= set(schemas)


def test_only_health_needs_no_token(document: dict[str, Any]) -> None:
    open_to_all = {path for path, _, operation in _operations(document) if not operation.get("security")}
    assert open_to_all == {f"{API_PREFIX}/health", f"{API_PREFIX}/ready"}
