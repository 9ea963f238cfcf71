"""The family ``table`` under torch.compile: one graph for all sizes, eager's bits; fake tensors; opcheck."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import assert_same_bits, operator
from devices import cpu_only
from samples.operators import SAMPLES
from samples.sample import Sample
from samples.table import FAMILY, filled, keys_of, state_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchsparse_rec import ops

pytestmark = pytest.mark.usefixtures("kernels")


def _step(
    index: Tensor, entries: Tensor, counters: Tensor, free_rows: Tensor, weight: Tensor, sketch: Tensor, ids: Tensor
) -> tuple[Tensor, ...]:
    """Make a training step of a dynamic table, with everything that it can do. Return the results."""
    enough = ops.count_min_sketch_(sketch, ids, num_hashes=3) >= 2
    rows, born = ops.table_find_or_insert_(
        index, entries, counters, free_rows, ids, allowed=enough, version=4, count=True
    )
    ops.table_initialize_(weight, born, ids, kind="truncated_normal", parameters=(0.0, 0.1), seed=3)
    read = ops.table_lookup(index, entries, weight, ids, missing=weight.new_zeros(weight.shape[1]))
    ops.table_assign_(weight, rows, read * 2)
    freed = ops.table_erase_(index, entries, ids.flip(0), mask=enough)
    found = ops.table_find(index, entries, ids)
    after = ops.table_lookup(index, entries, weight, ids, kind="uniform", parameters=(-1.0, 1.0), seed=4)
    return rows, born, read, freed, found, after, ops.table_rehash(entries, counters, ids.shape[0])


def _arguments(size: int) -> tuple[Tensor, ...]:
    """Return arguments of sizes that never coincide, so that no two are taken for one symbol."""
    table = filled(size, 13 * size, keys_of(5 * size, seed=size), 3)
    weight = torch.randn(13 * size, 2 * size + 1, generator=torch.Generator().manual_seed(size))
    keys = keys_of(7 * size + 1, seed=size)
    ids = torch.tensor(keys + keys[::3])
    return *state_of(table), weight, torch.zeros(50 * size, dtype=torch.int32), ids


def _compare(compiled: Callable, size: int) -> None:
    wanted, actual = _arguments(size), _arguments(size)
    results, compiled_results = _step(*wanted), compiled(*actual)
    for x, y in zip((*compiled_results, *actual), (*results, *wanted), strict=True):
        assert_same_bits(x, y)
    assert (results[1] >= 0).any() and (results[3] >= 0).any() and (results[4] < 0).any()


def test_a_step_compiles_once_for_all_sizes() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_step, backend=counter, fullgraph=True, dynamic=True)
    _compare(compiled, 4)
    graphs = counter.frame_count  # torch analyses a frame with floats a second time
    for size in (7, 13):
        _compare(compiled, size)
    assert counter.frame_count == graphs


@cpu_only
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from inside inductor
def test_inductor_keeps_the_order_of_what_is_written() -> None:
    def replaced(index: Tensor, entries: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        before = ops.table_lookup(index, entries, weight, ids)
        ops.table_assign_(weight, ops.table_erase_(index, entries, ids), before + 1)
        return before + ops.table_lookup(index, entries, weight, ids, parameters=(4.0,))

    torch._dynamo.reset()
    wanted, actual = ([*_arguments(5)[:2], *_arguments(5)[4::2]] for _ in range(2))
    result = replaced(*wanted)
    assert_same_bits(torch.compile(replaced, fullgraph=True)(*actual), result)
    for x, y in zip(actual, wanted, strict=True):
        assert_same_bits(x, y)


# Some samples that are not representative, and so get no opcheck in tests/ops/test_operators.py.
_OTHERS = [sample for name in FAMILY.samples for sample in SAMPLES[name][2::17] if not sample.representative]


@pytest.mark.parametrize("sample", _OTHERS, ids=str)
def test_opcheck(sample: Sample) -> None:
    torch.library.opcheck(operator(sample.operator), sample.to("cpu").arguments)
