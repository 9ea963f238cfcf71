"""
Family ``table``: initial values, lookups and assignments of the rows of keys.

Contract: csrc/table.h. Kernels: csrc/cpu/table_rows.cpp, csrc/cuda/table_rows.cu. Keys: table.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from .._torch import tell_autograd
from ..typing import InitialKind
from ._in_place import without_result
from .autograd import not_differentiable

__all__ = ["table_assign_", "table_initialize_", "table_lookup"]

# In the order of csrc/table.h's InitialKind.
INITIAL_KINDS = get_args(InitialKind)

_ops = torch.ops.torchsparse_rec


def table_initialize_(
    weight: Tensor,
    rows: Tensor,
    keys: Tensor,
    *,
    values: Tensor | None = None,
    kind: InitialKind = "constant",
    parameters: Sequence[float] = (0.0,),
    seed: int = 0,
) -> None:
    """
    Write the initial values of rows, in place: functions of only the seed, the key and the column.

    They are the same on every device.

    Args:
        weight: ``[R, D]``, float16, bfloat16, float32 or float64, written.
        rows: ``[M]`` int64, distinct; negative ones are left out.
        keys: the key of each row, ``[M]``, int32 or int64.
        values: ``[P, D]``, dtype of ``weight``: a key starts from row ``key mod P`` of them. Default: by ``kind``.
        kind: ``"constant"`` (the default), ``"uniform"``, ``"normal"`` or ``"truncated_normal"``, which keeps within
            two standard deviations.
        parameters: the constant; or low and high; or mean and standard deviation. Default: 0.
        seed: the random kinds' seed.

    Raises:
        IndexError: a row that the weight does not have (on CUDA it is left out and recorded).
        RuntimeError: ``weight`` requires grad and grad mode is enabled.
        ValueError: wrong shapes, dtypes, kind or parameters; tensors that share memory.

    Computed in float64 and rounded once. On CUDA nothing waits for the device.

    Source: DeepRec's ``InitializerOption``.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> table_initialize_(weight, torch.tensor([1]), torch.tensor([70]), kind="uniform", parameters=(-1.0, 1.0))
        >>> bool((weight[0] == 0).all()), bool((weight[1].abs() < 1).all())
        (True, True)
    """
    _check_written(weight)
    initial = _initial("table_initialize_", kind, parameters, seed)
    _ops.table_initialize_.default(weight, rows, keys, values, *initial)
    tell_autograd([weight])


def table_lookup(
    index: Tensor,
    entries: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    missing: Tensor | None = None,
    values: Tensor | None = None,
    kind: InitialKind = "constant",
    parameters: Sequence[float] = (0.0,),
    seed: int = 0,
) -> Tensor:
    """
    Look up the rows of keys in a table, in one pass; a missing key has its initial value, and is not inserted.

    Args:
        index: the argument of :func:`table_find`.
        entries: the argument of :func:`table_find`.
        weight: ``[R, D]``, float16, bfloat16, float32 or float64; with ``missing`` also uint8.
        ids: the keys, ``[N]``, int32 or int64.
        missing: ``[D]``, the row that missing keys read. Default: their initial values, as of
            :func:`table_initialize_`.
        values: the argument of :func:`table_initialize_`.
        kind: the argument of :func:`table_initialize_`.
        parameters: the argument of :func:`table_initialize_`.
        seed: the argument of :func:`table_initialize_`.

    Returns:
        ``[N, D]``, dtype of ``weight``. It has no gradient.

    Raises:
        ValueError: wrong shapes, dtypes, layouts, kind or parameters.

    On CUDA nothing waits for the device.

    Source: ``tf.lookup.experimental.DenseHashTable.lookup``.

    Example:
        >>> from torchsparse_rec.ops import table_find_or_insert_, table_rehash
        >>> entries, counters = torch.full((4, 2), -1), torch.zeros(8, dtype=torch.int64)
        >>> index = table_rehash(entries, counters, 1)
        >>> free = torch.empty(0, dtype=torch.int32)
        >>> _ = table_find_or_insert_(index, entries, counters, free, torch.tensor([70, -5]))
        >>> table_lookup(index, entries, torch.arange(8.0).reshape(4, 2), torch.tensor([-5, 8]))
        tensor([[2., 3.],
                [0., 0.]])
    """
    initial = _initial("table_lookup", kind, parameters, seed)
    return _ops.table_lookup.default(index, entries, weight, ids, missing, values, *initial)


def table_assign_(weight: Tensor, rows: Tensor, values: Tensor) -> None:
    """
    Write rows of a table in place: ``weight[rows[i]] = values[i]``; of several values for a row the last counts.

    Args:
        weight: ``[R, D]``, float16, bfloat16, float32, float64 or uint8, written.
        rows: ``[M]`` int64; negative ones are left out.
        values: ``[M, D]``, dtype of ``weight``.

    Raises:
        IndexError: a row that the weight does not have (on CUDA it is left out and recorded).
        RuntimeError: ``weight`` requires grad and grad mode is enabled.
        ValueError: wrong shapes or dtypes; tensors that share memory.

    On CUDA nothing waits for the device.

    Source: ``tf.raw_ops.ResourceScatterUpdate``, which leaves open which of several values counts.

    Example:
        >>> weight = torch.zeros(2, 2)
        >>> table_assign_(weight, torch.tensor([1, -1, 1]), torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))
        >>> weight
        tensor([[0., 0.],
                [3., 3.]])
    """
    _check_written(weight)
    _ops.table_assign_.default(weight, rows, values)
    tell_autograd([weight])


def _check_written(weight: Tensor) -> None:
    if weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("rows are written in place, which is not differentiable: do it under torch.no_grad()")


def _initial(op: str, kind: str, parameters: Sequence[float], seed: int) -> tuple[int, list[float], int]:
    if kind not in INITIAL_KINDS:
        raise ValueError(f"{op}: kind must be one of {', '.join(map(repr, INITIAL_KINDS))}, got {kind!r}")
    return INITIAL_KINDS.index(kind), [float(x) for x in parameters], seed


@torch.library.register_fake("torchsparse_rec::table_lookup")
def _(index, entries, weight, ids, *rest):
    return weight.new_empty((ids.shape[0], weight.shape[1]))


without_result("table_initialize_", "table_assign_")
not_differentiable("table_lookup")
