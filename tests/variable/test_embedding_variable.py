"""Embedding variables in daily use: DeepRec's demo, their arguments, capacities, gradients."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from variable.cases import on_disk, rows_of, step

from torchsparse_rec import initializers, nn, optim, variable
from torchsparse_rec.nn import EmbeddingVariable, get_embedding_variable, lookup_sparse
from torchsparse_rec.variable import (
    CBFFilter,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    L2WeightEvict,
    LFUEvict,
    LRUEvict,
    StorageOption,
)

# ---- DeepRec's documents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_mode", ["sparse", "dense", "fused"])
def test_the_demo_of_deeprec(grad_mode: str) -> None:
    """Train DeepRec's demo, sum(lookup) * 2 by Adagrad: a row that occurs n times has the gradient 2 n everywhere."""
    table = EmbeddingVariable(3, initializer=1.0, grad_mode=grad_mode)
    optimizer = optim.Adagrad(table.parameters(), lr=0.1, initial_accumulator_value=0.1, eps=0.0, in_backward=True)
    ids = torch.tensor([1, 1, 3, 4, 5]), torch.tensor([0, 2, 5])  # row ids [0, 0, 1, 1, 1]
    expected = {1: (1.0, 0.1, 4.0), 3: (1.0, 0.1, 2.0), 4: (1.0, 0.1, 2.0), 5: (1.0, 0.1, 2.0)}
    seen = []
    for _ in range(3):
        pooled = lookup_sparse(table, ids, "sum")
        sums = [2 * expected[1][0], sum(expected[key][0] for key in (3, 4, 5))]
        torch.testing.assert_close(pooled.detach(), torch.tensor(sums).unsqueeze(1).expand(2, 3))
        seen.append(pooled[:, 0].tolist())
        optimizer.zero_grad()
        (pooled * 2).sum().backward()
        optimizer.step()
        for key, (weight, squares, gradient) in expected.items():
            squares += gradient * gradient
            expected[key] = weight - 0.1 * gradient / math.sqrt(squares), squares, gradient
    assert seen[0] == [2.0, 3.0]
    assert seen[1] == pytest.approx([1.8006, 2.7037], abs=5e-5)
    assert table.total_count() == 4
    assert table.export().frequencies.tolist() == [6, 3, 3, 3]


def test_evictions() -> None:
    by_step = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(evict_option=GlobalStepEvict(1, every=2)))
    for key in (1, 2, 3, 4, 5):
        by_step(torch.tensor([key]))
    assert sorted(rows_of(by_step)) == [3, 4, 5]
    by_size = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(evict_option=L2WeightEvict(1.0)))
    by_size.insert([1, 2], [[1.0, 0.9], [1.0, 1.1]])
    assert by_size.evict() == 1
    assert list(rows_of(by_size)) == [2]
    assert by_size.stats()["evicted"] == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CounterFilter(-1), "filter_freq must be an integer of at least 0, got -1"),
        (lambda: CBFFilter(3), "max_element_size must be an integer of at least 1, got 0"),
        (lambda: CBFFilter(3, 10, 1.5), "false_positive_probability must be in (0, 1), got 1.5"),
        (lambda: CBFFilter(300, 10, 0.1, torch.int8), "filter_freq must be at most 127, got 300"),
        (lambda: GlobalStepEvict(-1), "steps_to_live must be an integer of at least 0, got -1"),
        (lambda: L2WeightEvict(-1.0), "l2_weight_threshold must be at least 0, got -1.0"),
        (lambda: LRUEvict(0), "capacity must be an integer of at least 1, got 0"),
        (lambda: StorageOption("SSD"), "storage_type must be one of"),
        (lambda: StorageOption("DRAM_SSD"), "storage_path must be a folder for DRAM_SSD, got None"),
        (lambda: StorageOption("HBM_DRAM_SSD", "x", [1]), "storage_size must have the bytes of 2 tiers, got 1"),
        (lambda: EmbeddingVariableOption(filter_option=3), "filter_option must be CounterFilter or CBFFilter or None"),
        (lambda: EmbeddingVariableOption(evict_option=[LRUEvict(1), LFUEvict(1)]), "one capacity at most, got several"),
        (lambda: EmbeddingVariable(2, seed=1.5), "seed must be an integer of 64 bits, got 1.5"),
        (lambda: EmbeddingVariable(2, seed=2**63), "seed must be an integer of 64 bits"),
        (lambda: EmbeddingVariable(2, name=5), "name must be a string, got int"),
        (lambda: EmbeddingVariable(2, device="meta"), "device must have memory"),
        (lambda: EmbeddingVariable(2, initializer=torch.ones_like), "initializer must fill the tensor"),
        (lambda: EmbeddingVariable(2, initializer="ones"), "initializer must be a number, rows, a function"),
        (lambda: EmbeddingVariable(2).restore([]), "path must be a folder or several, got none"),
    ],
)
def test_errors_of_options(make: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        make()
    assert text in str(raised.value)


def test_variables_by_name() -> None:
    table = get_embedding_variable("of this test", 4)
    assert get_embedding_variable("of this test", 4) is table
    with pytest.raises(ValueError, match="embedding_dim of 'of this test' must be 4, as before, got 5"):
        get_embedding_variable("of this test", 5)
    del table
    assert get_embedding_variable("of this test", 5).embedding_dim == 5


def test_functions_as_initializers_leave_random_numbers_alone() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    table = EmbeddingVariable(2, initializer=torch.nn.init.normal_)
    assert torch.rand(3).equal(wanted)
    assert not table.lookup(torch.tensor([1, 2])).eq(0).any()
    assert EmbeddingVariable(2, initializer=np.ones((1, 2))).lookup(torch.tensor([9])).tolist() == [[1.0, 1.0]]


# ---- What is given ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["forward", "lookup", "prefetch"])
def test_ids_that_are_none(method: str) -> None:
    table = EmbeddingVariable(2)
    for bad in (torch.tensor([1.5]), torch.tensor([True])):
        with pytest.raises(ValueError, match="input must be int32 or int64, got"):
            getattr(table, method)(bad)
    with pytest.raises(TypeError, match="input must be a tensor of int32 or int64, got list"):
        getattr(table, method)([1])


def test_shapes_of_ids() -> None:
    table = EmbeddingVariable(2, initializer=1.0)
    for mode in (True, False):
        table.train(mode)
        assert table(torch.tensor(5)).shape == table.lookup(torch.tensor(5)).shape == (2,)
        assert table(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 2)
        nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
        for rows in (table(nested), table.lookup(nested)):
            assert rows.is_nested
            assert rows.values().shape == (3, 2)


@pytest.mark.parametrize("method", ["insert", "erase"])
def test_keys_that_are_none(method: str) -> None:
    table = EmbeddingVariable(2, key_dtype=torch.int32)
    rest = () if method == "erase" else (torch.zeros(1, 2),)
    for bad in ([1.5], [True], [[1]]):
        with pytest.raises(ValueError, match=f"EmbeddingVariable.{method}: keys must be int32 or int64 of rank 1"):
            getattr(table, method)(bad, *rest)
    with pytest.raises(ValueError, match=f"{method}: keys must be of the key_dtype, int32, got 1099511627776"):
        getattr(table, method)([2**40], *rest)
    assert not getattr(table, method)([], *([] for _ in rest))
    assert table.total_count() == 0


def test_numbers_that_are_none() -> None:
    table = EmbeddingVariable(2)
    row = torch.zeros(1, 2)
    for numbers, text in (
        ({"frequencies": [-1]}, "frequencies must be in [0, 2**31 - 1), got -1"),
        ({"frequencies": [2**33]}, "frequencies must be in [0, 2**31 - 1), got 8589934592"),
        ({"frequencies": [1.5]}, "frequencies must be integers, got torch.float32"),
        ({"versions": [-2]}, "versions must be in [-1, 2**31 - 1), got -2"),
        ({"versions": [1, 2]}, "versions must be [1], one for each key, got [2]"),
    ):
        with pytest.raises(ValueError) as raised:
            table.insert([1], row, **numbers)
        assert text in str(raised.value)
    assert table.total_count() == 0


def test_duplicates() -> None:
    table = EmbeddingVariable(2)
    table.insert([7, 8, 7], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    assert rows_of(table) == {7: [3.0, 3.0], 8: [2.0, 2.0]}
    assert table.erase([7, 7, 9]) == 1


# ---- Capacities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evict", [LRUEvict, LFUEvict])
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_capacity_is_kept(evict: Any, tiers: bool, filtered: bool, tmp_path: Path) -> None:
    """Keep a capacity that is below a table's first size, and that holds for all tiers together."""
    option = EmbeddingVariableOption(
        evict_option=evict(40),
        storage_option=on_disk(tmp_path) if tiers else StorageOption(),
        filter_option=CounterFilter(2) if filtered else None,
    )
    table = EmbeddingVariable(2, ev_option=option)
    for k in range(40):
        table(torch.arange(3 * k, 3 * k + 8).repeat(2))
        assert table.total_count() <= 40
    assert table.total_count() > 20
    assert table.stats()["evicted"] == table.stats()["admitted"] - table.total_count() or tiers
    assert table.stats()["failed"] == 0
    assert {117, 124} <= rows_of(table).keys()


@pytest.mark.parametrize("method", ["forward", "insert"])
def test_a_step_that_does_not_fit_leaves_no_key(method: str) -> None:
    table = EmbeddingVariable(2, initializer=5.0, ev_option=EmbeddingVariableOption(evict_option=LRUEvict(4)))
    table(torch.tensor([50]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a capacity of 4 rows must hold the ids of one step"):
            table(torch.arange(6)) if method == "forward" else table.insert(torch.arange(6), torch.ones(6, 2))
    assert table.total_count() <= 1
    buckets = len(table.keys.index)
    assert table(torch.arange(3)).tolist() == [[5.0, 5.0]] * 3
    assert len(table.keys.index) == buckets


def test_smaller_capacities_take_the_rows_that_they_can(tmp_path: Path) -> None:
    table = EmbeddingVariable(2, initializer=5.0)
    for k in range(5):
        table(torch.arange(k * 10, k * 10 + 10))
    table.save(tmp_path)
    option = EmbeddingVariableOption(evict_option=LRUEvict(15))
    restored = EmbeddingVariable(2, ev_option=option)
    restored.restore(tmp_path)
    assert restored.total_count() == 15
    assert set(range(40, 50)) <= rows_of(restored).keys()
    loaded = EmbeddingVariable(2, ev_option=option)
    loaded.load_state_dict(table.state_dict())
    loaded(torch.tensor([1000]))
    assert loaded.total_count() == 15


@pytest.mark.parametrize("evict", [LRUEvict, LFUEvict])
def test_ids_of_a_step_do_not_make_room_for_its_others(evict: Any) -> None:
    table = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(evict_option=evict(4)))
    table.insert([1, 2, 3, 4], torch.full((4, 2), 9.0))
    rows = table(torch.tensor([1, 1, 1, 7, 7, 7]))
    assert rows[0].tolist() == [9.0, 9.0]
    assert {1, 7} <= rows_of(table).keys()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_of_whole_cache_lines_begin_with_one(dtype: torch.dtype) -> None:
    """Check that rows begin at cache lines, because a row across two lines takes as long to read as two."""
    table = EmbeddingVariable(32, capacity=2, dtype=dtype)
    optimizer = optim.Adam(table.parameters(), lr=0.1)
    for _ in range(14):
        step(table, optimizer, torch.arange(table.total_count() + 1))
        states = [x for x in optimizer.state[table.weight].values() if isinstance(x, torch.Tensor) and x.dim() == 2]
        assert len(states) == 2
        assert all(x.data_ptr() % 64 == 0 and x.is_contiguous() for x in (table.weight, *states))


# ---- Gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad_mode", "accumulates"),
    [("sparse", False), ("sparse", True), ("dense", False), ("dense", True), ("fused", False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_growth_between_lookup_and_backward(grad_mode: str, dtype: torch.dtype, accumulates: bool) -> None:
    results = []
    for capacity in (2, 1024):
        table = EmbeddingVariable(3, capacity=capacity, grad_mode=grad_mode, dtype=dtype)
        optimizer = optim.Adam(table.parameters(), lr=0.1, in_backward=True)
        for k in range(3):
            ids = [torch.arange(3 * k, 3 * k + 3), torch.arange(11 * k, 11 * k + 40), torch.arange(5)]
            if accumulates:
                for some in ids:
                    table(some).square().sum().backward()
            else:
                sum(rows.square().sum() for rows in [table(some) for some in ids]).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        results.append(table.export())
    for grown, whole in zip(*results, strict=True):
        assert grown.equal(whole)


@pytest.mark.parametrize("grad_mode", ["sparse", "dense"])
def test_optimizers_of_torch_that_keep_states_by_row_are_refused(grad_mode: Any) -> None:
    """A row may have another key later: torch's optimizers would give it the states of the key before."""
    table = EmbeddingVariable(2, name="users", grad_mode=grad_mode)
    makers = {name: getattr(torch.optim, name) for name in ("Adagrad", "Adam", "AdamW", "RMSprop", "SparseAdam")}
    for name, make in {**makers, "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}.items():
        optimizer = make(list(table.parameters()))
        table(torch.tensor([7])).sum().backward()
        text = rf"'users': torch.optim.{name} keeps its states by row.*torchsparse_rec"
        with pytest.raises(RuntimeError, match=text):
            optimizer.step()
        optimizer.zero_grad()
    before = table.lookup(torch.tensor([7]))
    table(torch.tensor([7])).sum().backward()
    torch.optim.SGD(table.parameters(), lr=0.1).step()
    assert (before - table.lookup(torch.tensor([7]))).allclose(torch.full((1, 2), 0.1))


def test_the_gradient_of_the_whole_table_outlives_growth() -> None:
    table = EmbeddingVariable(2, capacity=4, grad_mode="dense")
    total = table.weight.sum()  # its gradient is one number, expanded
    table(torch.arange(50))
    total.backward()
    grad = table.weight.grad
    assert grad is not None
    assert grad.tolist() == [[1.0, 1.0]] * 4 + [[0.0, 0.0]] * 60


def test_hooks_stay() -> None:
    table = EmbeddingVariable(2, capacity=4)
    shapes = []
    table.weight.register_hook(lambda grad: shapes.append(tuple(grad.shape)))
    rows = table(torch.tensor([1, 2]))
    table(torch.arange(50))
    rows.sum().backward()
    assert shapes == [(64, 2)]


@pytest.mark.parametrize("grad_mode", ["sparse", "fused"])
def test_absent_ids_in_eval_touch_no_row(grad_mode: str) -> None:
    table = EmbeddingVariable(2, initializer=3.0, grad_mode=grad_mode)
    optimizer = optim.Adam(table.parameters(), lr=0.1, lazy=True, in_backward=True)
    step(table, optimizer, [1])
    before = table.lookup(torch.tensor([1]))
    step(table.eval(), optimizer, [99])
    assert table.lookup(torch.tensor([1])).equal(before)
    step(table, optimizer, [99, 1])
    assert not table.lookup(torch.tensor([1])).equal(before)


def test_data_parallel_replicas_do_not_lose_rows_in_silence() -> None:
    table = EmbeddingVariable(2)
    replica = table._replicate_for_data_parallel()
    replica.weight = table.stored_weight().detach()
    with pytest.raises(RuntimeError, match="replicas of torch.nn.DataParallel cannot train"):
        replica(torch.arange(3))


@pytest.mark.parametrize("name", [name for name, value in vars(variable).items() if isinstance(value, type)])
def test_options_are_still_found_in_nn(name: str) -> None:
    assert getattr(nn, name) is getattr(variable, name) and name not in dir(nn)


def test_pickles_may_name_the_modules_where_options_were() -> None:
    found = pickle.loads(b"ctorchsparse_rec.nn.variable.options\nEmbeddingVariableOption\n.")
    assert found is variable.EmbeddingVariableOption
    assert pickle.loads(b"ctorchsparse_rec.nn.variable.initial\nUniform\n.") is initializers.Uniform
