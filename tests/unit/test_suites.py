"""The named sets of cases: each id once, what divides divides, and the page that lists them."""

from pathlib import Path

import pytest

from runners.kernels.registry import KERNELS
from runners.suites import NEEDS_CUDA, SUITES, suite
from runners.targets import fitting_cases
from service.wire import CASE_ARGUMENTS, TargetKernel

PAGE = Path(__file__).resolve().parents[2] / "docs/kernels.md"
EACH = pytest.mark.parametrize("name", SUITES)


@EACH
def test_no_case_is_asked_twice(name: str) -> None:
    ids = [case.id for case in suite(name)]
    assert ids
    assert len(set(ids)) == len(ids)


@EACH
def test_a_kernel_that_takes_everything_can_be_asked_all_of_it(name: str) -> None:
    arguments = {argument: argument for argument in CASE_ARGUMENTS}
    kernel = TargetKernel(name="all", entry="a:b", arguments=arguments, returns=["log_prob", "entropy"])
    assert fitting_cases(kernel, suite(name)) == list(suite(name))


def test_only_the_parallel_suites_take_several_ranks() -> None:
    several = {name for name in SUITES if any(case.tensor_parallel > 1 for case in suite(name))}
    assert several == {"parallel", "selftest_parallel"}
    assert {case.tensor_parallel for case in suite("parallel")} == {2, 4}


def test_the_huge_cases_are_beyond_32_bits_signed_and_unsigned() -> None:
    signed, unsigned = (case.tokens * case.vocabulary for case in suite("huge"))
    assert 1 << 31 < signed < 1 << 32 < unsigned


def test_the_page_lists_every_suite_with_its_device_and_number_of_cases() -> None:
    lines = [
        line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    told = {
        cells[0].strip(" `"): (cells[1].strip(), int(cells[2]))
        for cells in lines
        if cells[1].strip() in ("CPU", "CUDA")
    }
    wanted = {name: ("CUDA" if name in NEEDS_CUDA else "CPU", len(suite(name))) for name in SUITES}
    assert told == wanted


def test_the_page_lists_every_kernel_with_what_its_contract_says() -> None:
    for known in KERNELS:
        contract = known.contract
        gradient = (
            contract.gradient
            if contract.gradient_on_cuda is None
            else f"{contract.gradient}, on CUDA {contract.gradient_on_cuda}"
        )
        told = (gradient, ", ".join(sorted(contract.inaccurate_on)) or "-", "yes" if contract.overflows else "no")
        row = f"| `{known.name}` | {' | '.join(told)} | {'any' if contract.tensor_parallel else '1'} | "
        assert sum(line.startswith(row) for line in PAGE.read_text(encoding="utf-8").splitlines()) == 1, row


def test_an_unknown_suite_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="unknown suite 'slow'; known are core, demo, huge, odd, parallel, precision"):
        suite("slow")
