"""A target's function in our signature."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from runners.binding import UnmeasurableError, find_entry, omitted_arguments, unpack, with_our_signature
from runners.instruments.subject import ResultShapeError
from service.wire import TargetKernel

LOGITS = torch.zeros(3, 5)
TARGETS = torch.zeros(3, dtype=torch.int64)
COLUMN = torch.tensor([[1.0], [2.0], [3.0]])
ROW = torch.tensor([4.0, 5.0, 6.0])


def mapping(**arguments: str) -> TargetKernel:
    mapped = {"logits": "x", "targets": "y", **arguments}
    return TargetKernel(name="fused", entry="loss:f", arguments=mapped, returns=["log_prob", "entropy"])


def test_arguments_are_passed_by_the_names_of_the_target() -> None:
    seen: dict[str, Any] = {}

    def function(**given: Any) -> tuple[torch.Tensor, None]:
        seen.update(given)
        return ROW, None

    passed = {"logits": "x", "targets": "y", "chunk_size": "rows", "keep_mask": "mask", "with_entropy": "entropy"}
    run = with_our_signature(function, passed, {"chunk_size": -1}, ["log_prob", "entropy"])
    log_prob, entropy = run(LOGITS, TARGETS, with_entropy=False, temperature=0.5)
    assert seen == {"x": LOGITS, "y": TARGETS, "rows": -1, "mask": None, "entropy": False}
    assert (log_prob, entropy) == (ROW, None)
    run(LOGITS, TARGETS, chunk_size=2)
    assert seen["rows"] == 2


@pytest.mark.parametrize(
    ("returned", "returns", "log_prob", "entropy"),
    [
        ((ROW, ROW + 1), ["log_prob", "entropy"], ROW, ROW + 1),
        ((COLUMN, None), ["log_prob[:, 0]", "entropy"], COLUMN[:, 0], None),
        ([ROW, COLUMN, "shape"], ["entropy", "-log_prob[:, 0]", "_"], -COLUMN[:, 0], ROW),
        (ROW, ["-log_prob"], -ROW, None),
    ],
)
def test_outputs_are_taken_as_the_target_names_them(
    returned: Any, returns: list[str], log_prob: torch.Tensor, entropy: torch.Tensor | None
) -> None:
    found, found_entropy = unpack(returned, returns, 3)
    assert torch.equal(found, log_prob)
    assert found_entropy is entropy if entropy is None else torch.equal(found_entropy, entropy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "returns", "complaint"),
    [
        ((ROW,), ["log_prob", "entropy"], "returned 1 outputs, the target's returns has 2"),
        ((COLUMN, None), ["log_prob", "entropy"], r"'log_prob': the function returned shape \(3, 1\), .* says \(3,\)"),
        ((ROW, None), ["log_prob[:, 0]", "entropy"], r"returned shape \(3,\), the target says \(3, 1\)"),
        ((COLUMN.expand(3, 2),), ["log_prob[:, 0]"], r"returned shape \(3, 2\)"),
        ((ROW[:2],), ["log_prob"], r"returned shape \(2,\)"),
        ((None, None), ["log_prob", "entropy"], "'log_prob': the function returned a NoneType, not a tensor"),
        ((ROW, 0.5), ["log_prob", "entropy"], "'entropy': the function returned a float"),
    ],
)
def test_an_output_that_does_not_fit_is_named(returned: Any, returns: list[str], complaint: str) -> None:
    with pytest.raises(ResultShapeError, match=complaint):
        unpack(returned, returns, 3)


def test_the_gradient_flows_back_through_a_negated_column() -> None:
    column = COLUMN.clone().requires_grad_()
    log_prob, _ = unpack(column, ["-log_prob[:, 0]"], 3)
    log_prob.backward(ROW)
    assert column.grad is not None
    assert torch.equal(column.grad, -ROW.unsqueeze(1))


def test_an_argument_is_left_out_only_where_it_may_be() -> None:
    def older(x: Any, y: Any) -> None: ...

    kernel = mapping(with_entropy_grad="grad")
    assert omitted_arguments(kernel, older, {"with_entropy_grad"}) == ["with_entropy_grad"]
    with pytest.raises(UnmeasurableError, match="loss:f takes no parameter 'grad', to which the target maps"):
        omitted_arguments(kernel, older, {"keep_mask"})


def test_an_argument_that_the_function_takes_is_passed_even_if_it_might_be_left_out() -> None:
    def newer(x: Any, y: Any, *, grad: bool = True) -> None: ...

    assert omitted_arguments(mapping(with_entropy_grad="grad"), newer, {"with_entropy_grad"}) == []


def test_a_parameter_that_nothing_fills_makes_the_entry_uncallable() -> None:
    def greedy(x: Any, y: Any, loss_mask: Any) -> None: ...

    with pytest.raises(UnmeasurableError, match="needs parameter 'loss_mask', which the target does not map"):
        omitted_arguments(mapping(), greedy, ())


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Passes on what it is given, and tells what it wraps."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return call


def with_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Passes on what it is given, and an argument of its own."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*given, group=None, **named)

    return call


def untold(function: Callable[..., Any]) -> Callable[..., Any]:
    """Passes on what it is given, and does not tell what it wraps."""

    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return call


def narrowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Takes less than what it wraps."""

    @wraps(function)
    def call(x: Any, y: Any) -> Any:
        return function(x, y)

    return call


def older(x: Any, y: Any) -> None: ...


def newer(x: Any, y: Any, grad: bool = True) -> None: ...


def grouped(x: Any, y: Any, group: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "omitted"),
    [
        (logged(older), ["with_entropy_grad"]),
        (logged(logged(older)), ["with_entropy_grad"]),
        (logged(newer), []),
        (narrowed(newer), ["with_entropy_grad"]),
        (logged(narrowed(newer)), ["with_entropy_grad"]),
        (with_group(grouped), ["with_entropy_grad"]),
        (untold(older), ["with_entropy_grad"]),
    ],
)
def test_a_decorated_function_lacks_what_it_does_not_pass_on(function: Callable[..., Any], omitted: list[str]) -> None:
    assert omitted_arguments(mapping(with_entropy_grad="grad"), function, {"with_entropy_grad"}) == omitted


def test_a_decorated_function_must_not_lack_what_it_always_had() -> None:
    with pytest.raises(UnmeasurableError, match="takes no parameter 'grad'"):
        omitted_arguments(mapping(with_entropy_grad="grad"), logged(older), ())


@pytest.mark.parametrize("function", [lambda **given: given, torch.Tensor.item])
def test_a_function_that_names_no_parameters_is_left_to_the_call(function: Callable[..., Any]) -> None:
    assert omitted_arguments(mapping(chunk_size="rows"), function, ()) == []


@pytest.mark.parametrize(
    ("source", "entry", "complaint"),
    [
        ("import surely_absent", "f", r"cannot be imported: ModuleNotFoundError: No module named 'surely_absent'"),
        ("raise RuntimeError('one\\ntwo')", "f", "cannot be imported: RuntimeError: one"),
        ("import sys; sys.exit(3)", "f", "cannot be imported: SystemExit: 3"),
        ("def f(:", "f", "cannot be imported: SyntaxError"),
        ("def g(): ...", "f", "does not exist: strange_loss has no 'f'"),
        ("class A: f = 1", "A.f", "is not callable but a int"),
    ],
)
def test_an_entry_that_is_not_there_is_unmeasurable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, entry: str, complaint: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strange_loss", raising=False)
    (tmp_path / "strange_loss.py").write_text(source)
    with pytest.raises(UnmeasurableError, match=complaint):
        find_entry(f"strange_loss:{entry}", tmp_path)


def test_an_entry_may_be_a_method_of_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loss_with_class.py").write_text("class A:\n    @staticmethod\n    def f(): return 7")
    assert find_entry("loss_with_class:A.f", tmp_path)() == 7


def test_a_module_from_elsewhere_is_not_taken_for_the_commits(tmp_path: Path) -> None:
    with pytest.raises(UnmeasurableError, match="colorsys is not in the commit"):
        find_entry("colorsys:rgb_to_hsv", tmp_path)
