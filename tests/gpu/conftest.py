"""For tests on a CUDA device: the device, and room on it. Without one each test is skipped by name."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch


def _has_device() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where a driver is missing or too old
        return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """The current CUDA device, whose memory is given back after each test."""
    if not _has_device():
        pytest.skip("needs a CUDA device")
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def needs_bytes(device: torch.device) -> Callable[[int], None]:
    """Skip a test for which the device has too little free memory."""

    def check(wanted: int) -> None:
        free, _ = torch.cuda.mem_get_info(device)
        if free < wanted:
            pytest.skip(f"needs a CUDA device with {-(-wanted >> 30)} GiB free")

    return check
