"""torch's own settings, which a stranger's code can change for its whole process: noticed, and set back."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _pop_mode

from runners.kernels.contract import LogProbEntropy


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting. `read` and `write` are references of ours: a name that is replaced in torch later is not called.

    What is not held `within_calls` is the instruments' own to set there.
    """

    words: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    within_calls: bool = True


def _popping(length: Callable[[], int], pop: Callable[[], object]) -> Callable[[int], None]:
    def write(depth: int) -> None:
        while length() > depth:
            pop()

    return write


def _autocast(is_on: bool, write: Callable[[str, bool], None] = torch.set_autocast_enabled) -> None:
    write("cpu", is_on)


def _has_autocast(read: Callable[[str], bool] = torch.is_autocast_enabled) -> bool:
    return read("cpu")


def _unset_device(_stated: torch.device, write: Callable[[None], None] = torch.set_default_device) -> None:
    write(None)


_depths = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_SETTINGS = (
    # None takes the mode away again that a device of one's own needs; here nothing but the CPU is stated.
    _Setting("default device", torch.get_default_device, _unset_device),
    _Setting("function modes", _depths[0], _popping(_depths[0], torch._C._pop_torch_function_stack), False),
    _Setting("dispatch modes", _depths[1], _popping(_depths[1], _pop_mode), False),
    _Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("gradient mode", torch.is_grad_enabled, torch._C._set_grad_enabled, False),
    _Setting("autocast", _has_autocast, _autocast, False),
    _Setting("threads", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "deterministic algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    _Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Setting("mkldnn", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    _Setting("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
)


class StatedSettings:
    """The settings as they are when this is made, under which everything is measured.

    `changed` tells by setting what has been found changed since, and set back.
    """

    def __init__(self) -> None:
        self.changed: dict[str, str] = {}
        self._stated = {setting.words: setting.read() for setting in _SETTINGS}
        self._inference_mode = torch.inference_mode
        self._is_inference = torch.is_inference_mode_enabled

    def restore(self) -> None:
        """Set back what differs."""
        for setting in _SETTINGS:
            self._restore(setting)

    def around(self, run: LogProbEntropy) -> LogProbEntropy:
        """The same function, called under the stated settings."""
        held = [setting for setting in _SETTINGS if setting.within_calls]

        def stated_run(*given: Any, **named: Any) -> Any:
            for setting in held:
                self._restore(setting)
            return run(*given, **named)

        return stated_run

    def _restore(self, setting: _Setting) -> None:
        found, stated = setting.read(), self._stated[setting.words]
        if found != stated:
            self.changed[setting.words] = f"{setting.words} {found}, not {stated}"
            setting.write(stated)

    def outside_inference(self) -> AbstractContextManager[None]:
        """A region outside inference mode, which cannot be left for good from within."""
        if self._is_inference():
            self.changed["inference mode"] = "inference mode on, not off"
        return self._inference_mode(False)

    @property
    def note(self) -> str:
        """What was changed, in words; empty if nothing was."""
        return "; ".join(story for _, story in sorted(self.changed.items()))
