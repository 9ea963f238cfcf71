"""Losses over all rows of a table: ``ops.linear_cross_entropy`` beside torch's, and what its kernels refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import assert_same_bits
from devices import cpu_only
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.jagged import JaggedTensor

N, V, D = 12, 70, 6
REDUCTIONS = ("mean", "sum", "none")


def _problem(dtype: torch.dtype = torch.float32, n: int = N, rows: int = V, dim: int = D) -> list[Tensor]:
    """Return input, rows, bias, weights of the classes and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((n, dim), (rows, dim), (rows,))
    input, table, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    target = torch.randint(rows, (n,), generator=generator)
    target[::5] = -100
    return [input, table, bias, torch.rand(rows, generator=generator).to(dtype) + 0.1, target]


def _of_all_scores(input: Tensor, table: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Return the loss by way of all scores."""
    if options.pop("normalize", False):
        input, table = F.normalize(input, dim=1), F.normalize(table, dim=1)
    bias, excluded = options.pop("linear_bias", None), options.pop("excluded", None)
    scores = input @ table.T / options.pop("temperature", 1.0)
    scores = scores if bias is None else scores + bias
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return F.cross_entropy(scores, target, **options)


def _with_gradients(
    function: Callable[..., Tensor], leaves: list[Tensor], target: Tensor, **options: Any
) -> list[Tensor]:
    """Return a loss and its gradients with respect to input, rows, and the bias if there are three leaves."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    if len(leaves) == 3:
        options["linear_bias"] = leaves[2]
    loss = function(leaves[0], leaves[1], target, **options)
    factors = torch.linspace(2, 0.5, loss.numel(), dtype=loss.dtype, device=loss.device).reshape(loss.shape) / 2
    return [loss.detach(), *torch.autograd.grad((loss * factors).sum(), leaves)]


def _assert_near(actual: list[Tensor], wanted: list[Tensor], tolerance: float = 3e-6) -> None:
    """Compare within a part of the largest entry."""
    for x, y in zip(actual, wanted, strict=True):
        if y.numel():
            assert float((x.double() - y).abs().max()) <= tolerance * max(float(y.abs().max()), 1e-30)


# ---- Beside torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, 7, 64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_gradients_are_those_of_all_scores(reduction: str, block: int | None, device: str) -> None:
    """Go through all combinations of the options, beside float64."""
    input, table, bias, weight, target = _problem()
    for smoothing, weighted, biased, (normalize, temperature) in itertools.product(
        (0.0, 0.1, 1.0), (False, True), (False, True), ((False, 1.0), (True, 0.25))
    ):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        options |= {"normalize": normalize, "temperature": temperature}
        leaves = [input, table, bias][: 2 + biased]
        of_classes = {"weight": weight} if weighted else {}
        wide = {name: x.double() for name, x in of_classes.items()}
        wanted = _with_gradients(_of_all_scores, [x.double() for x in leaves], target, **options, **wide)
        options |= {"block": block} | {name: x.to(device) for name, x in of_classes.items()}
        there = [x.to(device) for x in leaves]
        actual = _with_gradients(ops.linear_cross_entropy, there, target.to(device), **options)
        _assert_near([x.cpu() for x in actual], wanted)


def test_blocks_of_one_row(device: str) -> None:
    input, table, bias, weight, target = _problem(rows=9)
    options = {"label_smoothing": 0.1, "normalize": True}
    leaves = [x.double() for x in (input, table, bias)]
    wanted = _with_gradients(_of_all_scores, leaves, target, **options, weight=weight.double())
    leaves, options = [x.to(device) for x in (input, table, bias)], options | {"weight": weight.to(device), "block": 1}
    actual = _with_gradients(ops.linear_cross_entropy, leaves, target.to(device), **options)
    _assert_near([x.cpu() for x in actual], wanted)


@pytest.mark.parametrize("form", ["matrix", "jagged"])
def test_excluded_classes_do_not_count_but_for_the_target(form: str, device: str) -> None:
    input, table, bias, _, target = _problem()
    excluded = torch.randint(-1, V, (N, 9), generator=torch.Generator().manual_seed(1))
    excluded[3] = target[3]
    mask = torch.zeros(N, V + 1, dtype=torch.bool).scatter_(1, excluded.where(excluded >= 0, V), True)[:, :V]
    mask[torch.arange(N), target.clamp_min(0)] &= target < 0
    wanted = _with_gradients(_of_all_scores, [x.double() for x in (input, table, bias)], target, excluded=mask)
    given: Any = excluded.to(device)
    if form == "jagged":
        rows = [row[row >= 0] for row in excluded]
        given = JaggedTensor(
            torch.cat(rows).to(device), lengths=torch.tensor([len(row) for row in rows], device=device)
        )
    leaves = [x.to(device) for x in (input, table, bias)]
    actual = _with_gradients(ops.linear_cross_entropy, leaves, target.to(device), excluded=given, block=16)
    _assert_near([x.cpu() for x in actual], wanted)


def test_a_sample_of_which_all_else_is_excluded_loses_nothing(device: str) -> None:
    input, table, _, _, _ = _problem(n=2)
    excluded = torch.arange(V, device=device).repeat(2, 1)
    target = torch.tensor([3, V - 1], device=device)
    loss, *gradients = _with_gradients(
        ops.linear_cross_entropy, [input.to(device), table.to(device)], target, excluded=excluded, block=8
    )
    assert loss == 0 and not any(x.any() for x in gradients)


@pytest.mark.parametrize("of_rows", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_have_scores_in_float32(dtype: torch.dtype, of_rows: torch.dtype, device: str) -> None:
    input, table, bias, _, target = _problem(dtype)
    table, bias = table.to(of_rows), bias.to(of_rows)
    wanted = _with_gradients(_of_all_scores, [x.double() for x in (input, table, bias)], target)
    leaves = [x.to(device) for x in (input, table, bias)]
    loss, *gradients = _with_gradients(ops.linear_cross_entropy, leaves, target.to(device), block=16)
    assert loss.dtype == torch.float32 and [x.dtype for x in gradients] == [dtype, of_rows, of_rows]
    _assert_near([loss.cpu()], wanted[:1])
    for gradient, near in zip(gradients, wanted[1:], strict=True):
        _assert_near([gradient.cpu()], [near], {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(gradient.dtype, 3e-6))


def test_autocast_changes_nothing() -> None:
    input, table, _, _, target = _problem()
    wanted = _with_gradients(ops.linear_cross_entropy, [input, table], target)
    with torch.autocast("cpu", torch.bfloat16):
        actual = _with_gradients(ops.linear_cross_entropy, [input, table], target)
    for x, y in zip(actual, wanted, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0)])
def test_samples_may_have_any_shape(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    input, table, _, _, target = _problem(n=count)
    losses = ops.linear_cross_entropy(input.reshape(*shape, D), table, target.reshape(shape).int(), reduction="none")
    assert losses.shape == shape
    _assert_near([losses.flatten()], [_of_all_scores(input, table, target, reduction="none").double()])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_where_no_sample_counts(reduction: str) -> None:
    """Give what torch gives: the mean is NaN, and gradients are 0."""
    input, table, bias, _, target = _problem()
    results = [
        _with_gradients(function, [input, table, bias], torch.full_like(target, -100), reduction=reduction)
        for function in (ops.linear_cross_entropy, _of_all_scores)
    ]
    torch.testing.assert_close(*results, equal_nan=True, rtol=0, atol=0)


def test_a_sample_that_is_not_finite_spoils_its_own_loss_alone() -> None:
    input, table, _, _, target = _problem()
    input[1, 0], input[3, 2] = torch.nan, torch.inf
    losses = ops.linear_cross_entropy(input, table, target, reduction="none")
    wanted = _of_all_scores(input, table, target, reduction="none")
    assert losses.isnan().tolist() == wanted.isnan().tolist() and losses.isnan().sum() == 2


def test_far_scores_neither_overflow_nor_vanish() -> None:
    input, table = torch.tensor([[1e4], [-1e4], [1.0]]), torch.tensor([[1.0], [1 - 2**-10], [-1.0], [0.0]])
    target = torch.tensor([1, 2, 3])
    wanted = _with_gradients(_of_all_scores, [input.double(), table.double()], target, reduction="none")
    _assert_near(_with_gradients(ops.linear_cross_entropy, [input, table], target, reduction="none", block=1), wanted)


# ---- Derivatives and compilers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "normalize": True, "temperature": 0.5}], ids=str)
def test_gradcheck(options: dict[str, Any], device: str) -> None:
    input, table, bias, weight, target = (x.to(device) for x in _problem(torch.float64, n=5, rows=9, dim=3))

    def loss(input: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        return ops.linear_cross_entropy(input, table, target, linear_bias=bias, weight=weight, block=4, **options)

    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in (input, table, bias)])


@pytest.mark.parametrize("leaf", [0, 1, 2])
def test_gradients_that_are_not_wanted_are_not_made(leaf: int) -> None:
    input, table, bias, _, target = _problem()
    leaves = [input, table, bias]
    wanted = _with_gradients(ops.linear_cross_entropy, leaves, target)
    leaves[leaf] = leaves[leaf].clone().requires_grad_()
    ops.linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2]).backward()
    assert_same_bits(leaves[leaf].grad, wanted[1 + leaf])


def test_second_derivatives_are_refused() -> None:
    input, table, _, _, target = _problem()
    loss = ops.linear_cross_entropy(input.requires_grad_(), table, target)
    (gradient,) = torch.autograd.grad(loss, input, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^linear_cross_entropy: its gradients have no second derivatives"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("is_live", [False, True])
def test_opcheck(is_live: bool) -> None:
    input, table, bias, weight, target = _problem()
    options = (0.1, True, 16, 3, torch.arange(len(table)) % 7 != 3 if is_live else None)
    of_rows = (None, None) if is_live else (bias, weight)
    given = (input.requires_grad_(), table.requires_grad_(), target.where(target >= 0, -1), *of_rows, None, None)
    torch.library.opcheck(torch.ops.torchsparse_rec_scores.loss.default, (*given, *options))
    losses, maximum, total = torch.ops.torchsparse_rec_scores.loss.default(*given, *options)
    gradient = (torch.ones_like(losses), maximum.detach(), total, *(x if x is None else x.detach() for x in given))
    torch.library.opcheck(
        torch.ops.torchsparse_rec_scores.loss_backward.default, (*gradient, *options, [True, False, not is_live])
    )


def test_compiles_whole() -> None:
    input, table, bias, _, target = _problem()
    excluded = torch.tensor([[1, -1]] * N)

    def loss(input: Tensor, table: Tensor, target: Tensor, **options: Any) -> Tensor:
        return ops.linear_cross_entropy(input, table, target, excluded=excluded, block=16, **options)

    wanted = _with_gradients(loss, [input, table, bias], target)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for x, y in zip(_with_gradients(compiled, [input, table, bias], target), wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_functional_gradients() -> None:
    input, table, _, _, target = _problem()
    _, of_input, of_table = _with_gradients(ops.linear_cross_entropy, [input, table], target, reduction="sum")

    def loss(input: Tensor, table: Tensor) -> Tensor:
        return ops.linear_cross_entropy(input, table, target, reduction="sum")

    for x, y in zip(torch.func.grad(loss, (0, 1))(input, table), (of_input, of_table), strict=True):
        torch.testing.assert_close(x, y)
    per_sample = torch.func.vmap(lambda x, t: ops.linear_cross_entropy(x, table, t, reduction="none"))(input, target)
    torch.testing.assert_close(per_sample, ops.linear_cross_entropy(input, table, target, reduction="none"))


@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits_again(threads: int) -> None:
    input, table, bias, _, target = _problem(n=64, rows=3000, dim=16)
    before = torch.get_num_threads()
    wanted = _with_gradients(ops.linear_cross_entropy, [input, table, bias], target)
    try:
        torch.set_num_threads(threads)
        for x, y in zip(_with_gradients(ops.linear_cross_entropy, [input, table, bias], target), wanted, strict=True):
            assert_same_bits(x, y)
    finally:
        torch.set_num_threads(before)


# ---- Bad input -------------------------------------------------------------------------------------------------------

INPUT, TABLE, TARGET = torch.ones(3, 2), torch.ones(5, 2), torch.tensor([0, 4, 1])
FLOATS = "torch.float32 or torch.bfloat16 or torch.float16"
REFUSED: dict[str, dict[str, Any]] = {
    "reduction must be 'mean', 'sum' or 'none', got 'max'": {"reduction": "max"},
    "label_smoothing must be in [0, 1], got 1.5": {"label_smoothing": 1.5},
    "label_smoothing must be in [0, 1], got nan": {"label_smoothing": torch.nan},
    "label_smoothing must be 0 where classes are excluded, as it gives all a share of the target, got 0.1": {
        "label_smoothing": 0.1,
        "excluded": torch.zeros(3, 1, dtype=torch.int64),
    },
    "temperature must be finite and above 0, got 0": {"temperature": 0},
    "block must be at least 1 row, got 0": {"block": 0},
    "input must be [..., D] of floats, got torch.int64": {"input": torch.ones(3, 2, dtype=torch.int64)},
    f"linear_weight must be [V, 2] of {FLOATS}, as input is torch.float32, got torch.float32 of shape (5, 3)": {
        "linear_weight": torch.ones(5, 3)
    },
    f"linear_weight must be [V, 2] of {FLOATS}, as input is torch.float32, got torch.float64": {
        "linear_weight": TABLE.double()
    },
    "linear_weight must be [V, 2] of torch.float64, as input is torch.float64, got torch.float32": {
        "input": INPUT.double()
    },
    "linear_weight must have at least one row, got shape (0, 2)": {"linear_weight": torch.ones(0, 2)},
    "target must be int32 or int64 of shape (3,), a class for each sample, got torch.int64 of shape (4,)": {
        "target": torch.zeros(4, dtype=torch.int64)
    },
    "target must be int32 or int64 of shape (3,), a class for each sample, got torch.float32 of shape (3, 5)": {
        "target": torch.ones(3, 5)
    },
    f"linear_bias must be [5] of {FLOATS}, a number for each row of linear_weight, got torch.float32": {
        "linear_bias": torch.ones(4)
    },
    f"weight must be [5] of {FLOATS}, a number for each row of linear_weight, got torch.int64": {
        "weight": torch.ones(5, dtype=torch.int64)
    },
    "target must be on the device of input, cpu, got meta": {"target": TARGET.to("meta")},
    "excluded must have a row of int32 or int64 ids for each of 3 samples, on cpu, got torch.int64 of shape (2, 1)": {
        "excluded": torch.zeros(2, 1, dtype=torch.int64)
    },
    "excluded must have a row of int32 or int64 ids for each of 3 samples, on cpu, got torch.float32": {
        "excluded": torch.ones(3, 1)
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message: str) -> None:
    given = {"input": INPUT, "linear_weight": TABLE, "target": TARGET} | REFUSED[message]
    with pytest.raises(ValueError) as error:
        ops.linear_cross_entropy(**given)
    assert str(error.value).startswith(f"linear_cross_entropy: {message}")


@pytest.mark.parametrize("bad", [-2, 5, 2**40])
def test_targets_out_of_range(bad: int, device: str) -> None:
    input, table, target = INPUT.to(device), TABLE.to(device), torch.tensor([0, -100, bad], device=device)
    message = rf"^scores_targets: target\[2\] must be in \[0, 5\) or ignore_index, -100, got {bad}$"
    with pytest.raises(IndexError, match=message):
        ops.linear_cross_entropy(input, table, target)
        torch.ops.torchsparse_rec.check_errors.default(target)
    excluded = torch.tensor([[0, -1], [1, bad], [2, 2]], device=device)
    message = rf"^scores_targets: excluded\[3\] must be in \[0, 5\) or -1, got {bad}$"
    with pytest.raises(IndexError, match=message):
        ops.linear_cross_entropy(input, table, target.clamp(0, 4), excluded=excluded)
        torch.ops.torchsparse_rec.check_errors.default(target)


@pytest.mark.parametrize("argument", ["input", "linear_weight", "target", "linear_bias", "weight", "excluded"])
def test_arguments_are_tensors(argument: str) -> None:
    given = {"input": INPUT, "linear_weight": TABLE, "target": TARGET} | {argument: [1, 2, 3]}
    with pytest.raises(TypeError, match=f"^linear_cross_entropy: {argument} must be a tensor, got list"):
        ops.linear_cross_entropy(**given)


def test_inputs_without_columns() -> None:
    loss = ops.linear_cross_entropy(torch.ones(3, 0), torch.ones(5, 0), TARGET, reduction="none")
    torch.testing.assert_close(loss, torch.full((3,), math.log(5)))


def test_weights_of_classes_have_no_gradient() -> None:
    with pytest.raises(RuntimeError, match="^linear_cross_entropy: weight must not require a gradient: detach it$"):
        ops.linear_cross_entropy(INPUT, TABLE, TARGET, weight=torch.ones(5, requires_grad=True))


@cpu_only
def test_kernels_check_what_they_are_given(kernels: str) -> None:
    scores, numbers, targets = torch.ones(3, 4), torch.ones(3), torch.zeros(3, dtype=torch.int64)
    lse, softmax = torch.ops.torchsparse_rec.scores_lse_.default, torch.ops.torchsparse_rec.scores_softmax_.default
    exclude = torch.ops.torchsparse_rec.scores_exclude_.default
    calls: dict[str, Callable[[], None]] = {
        "scores_lse_: scores must have rank 2": lambda: lse(numbers, targets, 0, numbers, numbers.double(), numbers),
        "scores_lse_: scores must be float32 or float64, got Half": lambda: lse(
            scores.half(), targets, 0, numbers, numbers.double(), numbers.clone()
        ),
        "scores_lse_: sum must be Double of shape [3], as scores, got Float": lambda: lse(
            scores, targets, 0, numbers, numbers.clone(), numbers.clone()
        ),
        "scores_lse_: first_row and the number of columns must be in [0, 2^63), also together": lambda: lse(
            scores, targets, 2**63 - 3, numbers, numbers.double(), numbers.clone()
        ),
        "scores_softmax_: scores must be contiguous, as it is written in place": lambda: softmax(
            torch.ones(4, 3).T, numbers, targets, 0, numbers, numbers
        ),
        "scores_softmax_: factor must be Float of shape [3], as scores, got Float of shape [2]": lambda: softmax(
            scores, numbers, targets, 0, numbers[:2], numbers
        ),
        "scores_exclude_: samples must be Long of shape [3], got Long of shape [2]": lambda: exclude(
            scores, targets, targets[:2], 0
        ),
    }
    for message, refused in calls.items():
        with pytest.raises(ValueError) as error:
            refused()
        assert str(error.value).startswith(message)
    with pytest.raises(IndexError, match=r"^scores_exclude_: samples\[1\] must be in \[0, 3\), got 3$"):
        exclude(scores, targets[:2], torch.tensor([0, 3]), 0)
