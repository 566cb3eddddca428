"""torch's settings: what is changed is noticed and set back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from runners.instruments.torch_state import StatedSettings


class _Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.fixture
def settings() -> Iterator[StatedSettings]:
    found = StatedSettings()
    yield found
    found.restore()


CHANGES: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
    ("default dtype", lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    ("default device", lambda: torch.set_default_device("meta"), torch.get_default_device),
    ("gradient mode", lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    ("threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    (
        "deterministic algorithms",
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    (
        "float32 matmul precision",
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    ("autocast", lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
    ("anomaly detection", lambda: torch.set_anomaly_enabled(True), torch.is_anomaly_enabled),
    ("function modes", lambda: _Mode().__enter__(), torch._C._len_torch_function_stack),
]


@pytest.mark.parametrize(("name", "change", "read"), CHANGES, ids=[name for name, *_ in CHANGES])
def test_what_is_changed_is_set_back_and_told(
    settings: StatedSettings, name: str, change: Callable[[], object], read: Callable[[], object]
) -> None:
    stated = read()
    assert settings.note == ""
    change()
    assert read() != stated
    settings.restore()
    assert read() == stated
    assert f"{name} " in settings.note
    assert f"not {stated}" in settings.note


def test_a_replaced_name_in_torch_is_not_called(settings: StatedSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch, "set_default_dtype", lambda _dtype: None)
    settings.restore()
    assert torch.get_default_dtype() is torch.float32


def test_a_function_runs_under_the_stated_settings_each_time(settings: StatedSettings) -> None:
    def run(*_given: Any, **_named: Any) -> Any:
        seen.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)

    seen: list[torch.dtype] = []
    held = settings.around(run)
    held(torch.ones(1, 1), torch.zeros(1))
    held(torch.ones(1, 1), torch.zeros(1))
    assert seen == [torch.float32, torch.float32]


def test_what_an_instrument_sets_for_a_call_is_left_to_it(settings: StatedSettings) -> None:
    def run(*_given: Any, **_named: Any) -> Any:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert settings.around(run)(torch.ones(1, 1), torch.zeros(1)) == (False, True)
    assert settings.note == ""
