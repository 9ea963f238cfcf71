"""Edge cases of the family ``row_update``: order, layouts, errors, threads, autograd and compilation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import among_columns, assert_same_bits
from devices import KERNELS
from pairs import in_pairs
from samples.row_update import NUMBERS, row_update_sample
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchsparse_rec.compat._parity.reference.row_update import row_update
from torchsparse_rec.ops.row_update import RowRule, row_update_

_operator = torch.ops.torchsparse_rec.row_update.default
each_rule = pytest.mark.parametrize("rule", NUMBERS)


def _call(arguments: tuple) -> list[Tensor]:
    """Return what the operator leaves in copies of the tensors that it writes."""
    arguments = tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments)
    assert _operator(*arguments) is None
    return [x for x in arguments[:4] if x is not None]


def _assert_all_same(actual: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(actual, wanted, strict=True):
        assert_same_bits(x, y)


# ---- Order ----------------------------------------------------------------------------------------------------------


@in_pairs(rule=NUMBERS, dtype=[torch.float32, torch.float16], kernels=KERNELS)
def test_a_batch_is_its_items_one_after_another(rule: str, dtype: torch.dtype, kernels: str) -> None:
    *tables, grad, ids, number, hyperparameters = row_update_sample("", rule, rows=5, items=20, dtype=dtype).arguments
    wanted = [x.clone() if x is not None else None for x in tables]
    for i in range(ids.shape[0]):
        _operator(*wanted, grad[i : i + 1], ids[i : i + 1], number, hyperparameters)
    actual = _call((*tables, grad, ids, number, hyperparameters))
    _assert_all_same(actual, [x for x in wanted if x is not None])


@each_rule
def test_untouched_rows_keep_their_bits(rule: str, kernels: str) -> None:
    *tables, grad, _, number, hyperparameters = row_update_sample("", rule, rows=6, items=2).arguments
    tables = [x if x is None else x.index_fill(0, torch.tensor([0, 4]), torch.nan) for x in tables]
    results = _call((*tables, grad, torch.tensor([5, 2]), number, hyperparameters))
    for before, after in zip((x for x in tables if x is not None), results, strict=True):
        assert_same_bits(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
        assert not after[[2, 5]].isnan().any()


@in_pairs(rule=NUMBERS, bad=[torch.nan, torch.inf, -torch.inf], kernels=KERNELS)
def test_a_gradient_without_sense_stays_in_its_elements(rule: str, bad: float, kernels: str) -> None:
    *tables, grad, _, number, hyperparameters = row_update_sample("", rule, rows=3, items=2, shape=(5,)).arguments
    ids = torch.tensor([2, 2])
    clean = _call((*tables, grad, ids, number, hyperparameters))
    grad = grad.clone()
    grad[0, 3] = bad
    others = [0, 1, 2, 4]
    for spoilt, same in zip(_call((*tables, grad, ids, number, hyperparameters)), clean, strict=True):
        assert_same_bits(spoilt[:2], same[:2])
        assert_same_bits(spoilt[2, others], same[2, others])
    assert not _call((*tables, grad, ids, number, hyperparameters))[0][2, 3].isfinite()


# ---- Threads --------------------------------------------------------------------------------------------------------


def _popular(rule: str, dtype: torch.dtype = torch.float32) -> tuple:
    """Return enough work for several threads; row 7 has two thirds of the items."""
    arguments = list(row_update_sample("", rule, rows=500, items=6000, shape=(67,), dtype=dtype).arguments)
    arguments[5] = torch.where(torch.arange(6000) % 3 == 0, arguments[5], 7)
    return tuple(arguments)


@pytest.mark.parametrize("rule", ["gradient_descent", "adagrad", "ftrl", "centered_rmsprop"])
def test_threads_do_not_change_the_bits(rule: str, restore_threads: None) -> None:
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append(_call(_popular(rule)))
    for other in results[1:]:
        _assert_all_same(other, results[0])
    for actual, wanted in zip(results[0], row_update(*_popular(rule)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


# ---- Layouts --------------------------------------------------------------------------------------------------------


def _all_but_one_column(x: Tensor) -> Tensor:
    """Return the same values in memory where the first row begins at an aligned address and the other rows do not."""
    return torch.cat([x, x.new_full((x.shape[0], 1), 99)], dim=1)[:, :-1]


@pytest.mark.parametrize("layout", [among_columns, _all_but_one_column, lambda x: x.repeat_interleave(2, 0)[::2]])
def test_rows_may_be_any_distance_apart(layout: Callable[[Tensor], Tensor], kernels: str) -> None:
    arguments = list(row_update_sample("", "centered_rmsprop", shape=(8,)).arguments)
    wanted = _call(tuple(arguments))
    spread = [layout(x) for x in arguments[:4]]
    assert not spread[0].is_contiguous()
    around = [x._base.clone() for x in spread if x._base is not None]
    _operator(*spread, *arguments[4:])
    _assert_all_same(spread, wanted)
    for x, before in zip((x._base for x in spread), around, strict=True):
        outside = torch.ones_like(before, dtype=torch.bool)
        outside.as_strided(spread[0].shape, spread[0].stride(), spread[0].storage_offset()).fill_(False)
        assert torch.equal(x[outside], before[outside])


@pytest.mark.parametrize("more", [4, 1])
def test_weight_and_states_may_have_strides_of_their_own(more: int, kernels: str) -> None:
    """Begin every row at an aligned address, or those of the weight alone."""
    arguments = list(row_update_sample("", "centered_rmsprop", shape=(8,)).arguments)
    wanted = _call(tuple(arguments))
    spread = [torch.cat([x, x.new_zeros(x.shape[0], more * k)], dim=1)[:, :8] for k, x in enumerate(arguments[:4])]
    assert len({x.stride(0) for x in spread}) == 4
    _operator(*spread, *arguments[4:])
    _assert_all_same(spread, wanted)


def test_states_may_lie_beside_the_weight(kernels: str) -> None:
    *tables, grad, ids, number, hyperparameters = row_update_sample("", "rmsprop").arguments
    wanted = _call((*tables, grad, ids, number, hyperparameters))
    together = torch.cat(tables[:3], dim=1)
    _operator(*together.split(3, dim=1), None, grad, ids, number, hyperparameters)
    _assert_all_same(list(together.split(3, dim=1)), [x.contiguous() for x in wanted])


def test_vectors_with_a_stride(kernels: str) -> None:
    wide = torch.zeros(8)
    row_update_(RowRule.GRADIENT_DESCENT, [wide[1::2]], torch.ones(3), torch.tensor([3, 0, 3]), [1.0])
    assert wide.tolist() == [0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -2.0]


# ---- Errors ---------------------------------------------------------------------------------------------------------

_TABLE = torch.ones(4, 3)
_FTRL = {"lr": 0.1, "l1": 0.0, "l2": 0.0, "l2_shrinkage": 0.0, "lr_power": -0.5}
_BAD = {
    "indices must have rank 1, got shape [1, 1]": {"indices": torch.tensor([[0]])},
    "indices must be int32 or int64, got Float": {"indices": torch.tensor([0.0])},
    "weight must be float16, bfloat16, float32 or float64, got Int": {"weight": torch.ones(4, 3, dtype=torch.int32)},
    "weight must have rank >= 1, got a scalar": {"weight": torch.tensor(1.0)},
    "weight must have rows that are contiguous and do not overlap, as it is written in place, got strides [1, 4]": {
        "weight": torch.ones(3, 4).t()
    },
    "got strides [0, 1] of shape [4, 3]": {"weight": torch.ones(1, 3).expand(4, 3)},
    "grad must have one row of weight, whose shape is [4, 3], for each of the 1 indices, got shape [1, 2]": {
        "grad": torch.ones(1, 2)
    },
    "for each of the 1 indices, got shape [2, 3]": {"grad": torch.ones(2, 3)},
    "for each of the 1 indices, got shape [3]": {"grad": torch.ones(3)},
    "grad must have the dtype of weight, Float, got Double": {"grad": torch.ones(1, 3, dtype=torch.float64)},
    "accumulator must have the dtype of weight, Float, got Half": {"accumulator": torch.ones(4, 3).half()},
    "accumulator must have the shape of weight, [4, 3], got [4, 2]": {"accumulator": torch.ones(4, 2)},
    "linear must have rows that are contiguous": {"linear": torch.ones(3, 4).t()},
    "lr must be > 0, got 0": {"lr": 0.0},
    "lr must be > 0, got nan": {"lr": torch.nan},
    "lr must be >= 0, got -1": {"lr": -1.0, "rule": RowRule.FTRL_SCALED_LINEAR},
    "l1 must be >= 0, got -0.5": {"l1": -0.5},
    "l2 must be >= 0, got -0.5": {"l2": -0.5},
    "l2_shrinkage must be >= 0, got -0.5": {"l2_shrinkage": -0.5},
    "lr_power must be <= 0, got 0.5": {"lr_power": 0.5},
}


@pytest.mark.parametrize("message", _BAD)
def test_bad_arguments(message: str, kernels: str) -> None:
    arguments = {
        "weight": torch.ones(4, 3),
        "accumulator": torch.ones(4, 3),
        "linear": torch.ones(4, 3),
        "grad": torch.ones(1, 3),
        "indices": torch.tensor([1]),
    }
    given = arguments | _BAD[message]
    numbers = [given.get(x, y) for x, y in _FTRL.items()]
    with pytest.raises(ValueError) as caught:
        tables = [given[name] for name in ("weight", "accumulator", "linear")]
        row_update_(given.get("rule", RowRule.FTRL), tables, given["grad"], given["indices"], numbers)
    assert str(caught.value).startswith("sparse_apply_ftrl_: ") and message in str(caught.value)
    for name in ("weight", "accumulator", "linear"):
        assert torch.equal(arguments[name], _TABLE)


@pytest.mark.parametrize("index", [-1, 4, 2**40])
@pytest.mark.parametrize("items", [3, 3000])
def test_a_bad_index_leaves_everything_as_it_was(index: int, items: int) -> None:
    weight, sums = torch.ones(4, 100), torch.ones(4, 100)
    ids = torch.zeros(items, dtype=torch.int64)
    ids[items - 1] = index
    with pytest.raises(IndexError, match=rf"^sparse_apply_adagrad_: indices\[{items - 1}\] must be in \[0, 4\), got"):
        row_update_(RowRule.ADAGRAD, [weight, sums], torch.ones(items, 100), ids, [0.1, 0.0])
    assert torch.equal(weight, torch.ones(4, 100)) and torch.equal(sums, torch.ones(4, 100))


def test_a_bad_index_is_skipped_by_emulated_kernels(emulated: Callable[[], int]) -> None:
    """Apply the good items, and report the first bad one."""
    from emulation import fixture

    weight, sums, ids = torch.ones(4, 5), torch.zeros(4, 5), torch.tensor([2, 4, 2, -1, 0])
    grad = torch.arange(1.0, 26.0).reshape(5, 5)
    wanted = [weight.clone(), sums.clone()]
    kept = [0, 2, 4]
    row_update_(RowRule.ADAGRAD, wanted, grad[kept], ids[kept], [0.1, 0.0])
    for order in ("ascending", "descending", "random"):
        fixture.set_order(order)
        written = [weight.clone(), sums.clone()]
        fixture.operator("row_update")(*written, None, None, grad, ids, NUMBERS["adagrad"], [0.1, 0.0])
        with pytest.raises(IndexError, match=r"^sparse_apply_adagrad_: indices\[1\] must be in \[0, 4\), got 4$"):
            fixture.check_errors()
        _assert_all_same(written, wanted)


def test_shared_memory_is_refused(kernels: str) -> None:
    table, overlapping = torch.ones(4, 3), torch.ones(4, 6)
    cases = [
        (RowRule.ADAGRAD, [table, table], torch.ones(1, 3), "accumulator must not share memory with weight"),
        (RowRule.FTRL, [torch.ones(4, 3), table, table], torch.ones(1, 3), "linear must not share memory with acc"),
        (RowRule.GRADIENT_DESCENT, [table], table[2:3], "grad must not share memory with weight"),
        (RowRule.ADAGRAD, [torch.ones(4, 3), table], table[2:3], "grad must not share memory with accumulator"),
        (RowRule.ADAGRAD, [overlapping[:, :4], overlapping[:, 2:]], torch.ones(1, 4), "accumulator must not share"),
    ]
    numbers = {RowRule.GRADIENT_DESCENT: [0.1], RowRule.ADAGRAD: [0.1, 0.0], RowRule.FTRL: [*_FTRL.values()]}
    for rule, tables, grad, message in cases:
        with pytest.raises(ValueError, match=message):
            row_update_(rule, tables, grad, torch.tensor([1]), numbers[rule])


def test_a_wrong_number_of_states_or_hyperparameters() -> None:
    table, grad, ids = torch.ones(4, 3), torch.ones(1, 3), torch.tensor([1])
    with pytest.raises(ValueError, match="sparse_apply_adagrad_: states must be 1, got 0"):
        _operator(table, None, None, None, grad, ids, NUMBERS["adagrad"], [0.1, 0.0])
    with pytest.raises(ValueError, match="states must be 0, got 1"):
        _operator(table, torch.ones(4, 3), None, None, grad, ids, 0, [0.1])
    with pytest.raises(ValueError, match="hyperparameters must be 1, got 2"):
        _operator(table, None, None, None, grad, ids, 0, [0.1, 0.2])
    with pytest.raises(ValueError, match=r"rule must be in \[0, 15\), got 15"):
        _operator(table, None, None, None, grad, ids, 15, [0.1])


# ---- Autograd and compilation ---------------------------------------------------------------------------------------


def test_gradients_are_refused_as_torch_does() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 1))
    grad, ids = torch.ones(1, 1), torch.tensor([1])
    with pytest.raises(RuntimeError, match=r"not differentiable: call it under torch\.no_grad\(\)"):
        row_update_(RowRule.GRADIENT_DESCENT, [weight], grad, ids, [0.5])
    with pytest.raises(RuntimeError, match="not differentiable"):
        row_update_(RowRule.GRADIENT_DESCENT, [torch.ones(2, 1)], grad.requires_grad_(), ids, [0.5])
    with torch.no_grad():
        row_update_(RowRule.GRADIENT_DESCENT, [weight], grad, ids, [0.5])
    assert weight.tolist() == [[1.0], [0.5]] and weight.requires_grad
    with torch.inference_mode():
        row_update_(RowRule.GRADIENT_DESCENT, [torch.ones(2, 1)], grad, ids, [0.5])


def test_a_graph_notices_that_its_tensors_were_written() -> None:
    weight, sums = torch.nn.Parameter(torch.ones(2, 1)), torch.ones(2, 1)
    loss = (weight * weight).sum()
    with torch.no_grad():
        row_update_(RowRule.ADAGRAD, [weight, sums], torch.ones(1, 1), torch.tensor([1]), [0.5, 0.0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled_code_writes_its_inputs(kernels: str) -> None:
    """Compile one graph for every size. The backend may add empty ones, where a call in place is made functional."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(*tensors: Tensor) -> None:
        *tables, grad, ids = tensors
        row_update_(RowRule.FTRL, tables, grad, ids, list(_FTRL.values()))

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for size in (4, 7, 13):
        *tables, _, grad, ids, _, _ = row_update_sample("", "ftrl", rows=size, items=3 * size).arguments
        copies = [x.clone() for x in tables]
        step(*copies, grad, ids)
        compiled(*tables, grad, ids)
        _assert_all_same(tables, copies)
    graphs = [graph for graph in counter.graphs if any(node.op == "call_function" for node in graph.graph.nodes)]
    assert len(graphs) == 1
