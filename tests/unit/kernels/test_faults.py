"""The table of seeded faults: complete, in the catalogue's words, and made of edits that fit the kernel."""

from itertools import chain

import pytest
import torch

from runners.kernels import fused
from runners.kernels.faults.mutation import EditError, edited, mutated
from runners.kernels.faults.table import FAULTS, KERNEL, UNMEASURED, Fault, Unmeasured
from runners.kernels.inputs import make_inputs
from runners.kernels.registry import KERNELS, kernel
from service.catalogue import BY_NAME, Family, MetricClass, Rule

EACH = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
LISTED = {*map(str, range(1, 22)), "10a", "10b"} - {"10"}


def test_every_listed_fault_is_measured_or_says_why_not() -> None:
    numbers = [fault.number for fault in chain[Fault | Unmeasured](FAULTS, UNMEASURED)]
    assert sorted(numbers) == sorted(LISTED)
    assert all(fault.reason for fault in UNMEASURED)


def test_names_differ() -> None:
    names = [fault.name for fault in chain[Fault | Unmeasured](FAULTS, UNMEASURED)]
    assert len(set(names)) == len(names)


@EACH
def test_signals_are_metrics_that_decide_or_families(fault: Fault) -> None:
    assert fault.required
    for name in fault.required:
        assert BY_NAME[name].rule is not Rule.INFORMATIONAL
        assert BY_NAME[name].metric_class is not MetricClass.TIMING
    assert fault.allowed <= {*BY_NAME, *map(str, Family)}


@EACH
def test_a_mutant_is_the_kernel_but_for_its_edits(fault: Fault) -> None:
    assert fault.edits
    mutant = mutated(kernel(KERNEL), fault.edits)
    assert (mutant.name, mutant.contract) == (fused.KERNEL.name, fused.KERNEL.contract)
    assert mutant.run is not fused.run


def test_no_mutant_is_among_the_kernels() -> None:
    assert not {fault.name for fault in FAULTS} & {known.name for known in KERNELS}


def test_a_mutation_leaves_the_kernel_itself_alone() -> None:
    mutant = mutated(kernel(KERNEL), FAULTS[0].edits)
    wrong, right = (_gradient(run) for run in (mutant.run, fused.run))
    assert torch.equal(wrong, wrong.bfloat16().float())
    assert not torch.equal(right, wrong)


def test_without_an_edit_the_mutant_computes_what_the_kernel_does() -> None:
    assert torch.equal(_gradient(mutated(kernel(KERNEL), ()).run), _gradient(fused.run))


@pytest.mark.parametrize(("source", "count"), [("a = 1\n", 0), ("b = 1\nb = 1\n", 2)])
def test_an_edit_that_does_not_fit_is_refused_with_its_text(source: str, count: int) -> None:
    with pytest.raises(EditError, match=rf"'b = 1', which occurs {count} times"):
        edited(source, [("b = 1", "b = 2")])


def _gradient(run: object) -> torch.Tensor:
    inputs = make_inputs(tokens=4, vocabulary=50)
    logits = inputs.logits.requires_grad_()
    log_prob, _ = run(logits, inputs.targets, with_entropy=False)  # type: ignore[operator]
    return torch.autograd.grad(log_prob, logits, inputs.upstream_log_prob)[0]
