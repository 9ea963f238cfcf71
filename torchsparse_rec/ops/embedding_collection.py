"""
Family ``embedding_collection``: the pooled lookups of many features in many tables, in one call, and their gradients.

Contract and order of summation: csrc/embedding_collection.h. Kernels: csrc/cpu/embedding_collection.cpp,
csrc/cuda/embedding_collection.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _reduction
from .._torch import any_requires_grad, backward_number, below_autograd, is_seen
from ..typing import Pooling
from ._offsets import check_not_empty
from .autograd import call, not_differentiable, only_once, register
from .embedding import Mark, coo_tensor

__all__ = ["embedding_collection"]

_ops = torch.ops.torchsparse_rec


def embedding_collection(
    weights: Sequence[Tensor],
    indices: Tensor,
    offsets: Tensor | None = None,
    *,
    tables: Sequence[int],
    keys: Sequence[int],
    modes: Sequence[Pooling],
    bags: Sequence[int],
    per_sample_weights: Tensor | None = None,
    padding_idx: Sequence[int | None] | None = None,
    side_by_side: bool = True,
    sparse: bool = False,
) -> Tensor:
    """
    Look up many features in many tables and pool the rows of each bag, in one pass.

    Features are called keys here: key ``k`` owns ``bags[k]`` consecutive bags of ``offsets``, and their
    ids. Lookup ``l`` pools the bags of key ``keys[l]`` in table ``tables[l]`` by ``modes[l]``, exactly as
    :func:`embedding_bag` does. Lookups may share tables and keys.

    Args:
        weights: the tables, ``[V, D]`` each, of one dtype (float16, bfloat16, float32, float64) and device.
        indices: ``[N]``, int32 or int64: the ids of all keys, key by key.
        offsets: ``[sum(bags) + 1]``, int32 or int64, not decreasing, from 0 to ``N``. None: each id is a bag by itself,
            and ``bags`` holds the number of ids of each key.
        tables: the number of the table in ``weights`` that each lookup reads.
        keys: the number of the key that each lookup pools.
        modes: the mode of each lookup, as of :class:`torchsparse_rec.nn.EmbeddingBag`; without ``offsets`` ``"sum"``.
        bags: the number of bags of each key.
        per_sample_weights: ``[N]``, with the dtype of ``weights``; not with extremes.
        padding_idx: the row of each table whose entries are left out of the bags and receive no gradient, or None;
            default: none has one.
        side_by_side: whether to put the lookups' columns side by side; else their results follow one another.
        sparse: whether to give the tables sparse COO gradients whose rows are unique and sorted (coalesced), instead of
            dense ones. The sums are the same, bit for bit.

    Returns:
        Side by side, ``[B, sum of the lookups' D]``, where all keys that are looked up have ``B`` bags. Else a vector:
        lookup after lookup, its ``[bags, D]`` row by row. Differentiable in ``weights`` and ``per_sample_weights``,
        once.

    Raises:
        IndexError: an index outside its table, named with its position.
        ValueError: bad offsets, NaN weights, weights with an extreme; lists that do not fit each other; wrong shapes,
            dtypes or devices.

    On CUDA nothing waits for the device, and CUDA graphs can capture it (the gradient too if it is not sparse).

    Source: ``torch.nn.functional.embedding_bag``; FBGEMM's table-batched embeddings.

    Example:
        >>> users, items = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]])
        >>> indices, offsets = torch.tensor([1, 0, 2, 0, 1]), torch.tensor([0, 1, 2, 4, 5])
        >>> embedding_collection(
        ...     [users, items], indices, offsets, tables=[0, 1], keys=[0, 1], modes=["sum", "mean"], bags=[2, 2]
        ... )
        tensor([[2.0000, 1.0000, 1.5000],
                [1.0000, 1.0000, 1.5000]])
    """
    for mode in modes:
        if mode not in _reduction.POOLING:
            raise ValueError(f"modes must be of {', '.join(map(repr, _reduction.POOLING))}, got {mode!r}")
    lists = (
        list(tables),
        list(keys),
        [_reduction.POOLING[mode] for mode in modes],
        list(bags),
        _padding(padding_idx, len(weights)),
    )
    check_not_empty("embedding_collection", offsets, indices)
    return lookup(list(weights), indices, offsets, per_sample_weights, *lists, side_by_side, sparse)[0]


def _padding(padding_idx: Sequence[int | None] | None, tables: int) -> list[int]:
    if padding_idx is None:
        return [-1] * tables
    for k, row in enumerate(padding_idx):
        if row is not None and row < 0:
            raise ValueError(f"padding_idx[{k}] must be None or >= 0, got {row}")
    return [-1 if row is None else row for row in padding_idx]


# ---- Fake kernels ---------------------------------------------------------------------------------------------------


def _check_devices(operator: str, weights: Sequence[Tensor]) -> None:
    """
    Raise ``ValueError`` if tables are on different devices.

    One table on ``meta`` is enough for the fake kernel to run, whose results must not pass for real ones.
    """
    for k, weight in enumerate(weights):
        if weight.device != weights[0].device:
            raise ValueError(
                f"{operator}: weights[{k}] must be on the device of weights[0], {weights[0].device}, got"
                f" {weight.device}"
            )


def _fake_lookup(
    operator: str, weights: Sequence[Tensor], inputs: tuple, lists: tuple[Sequence[int], ...], side_by_side: bool
) -> tuple[Tensor, Tensor]:
    _check_devices(operator, weights)
    tables, keys, modes, bags = lists[:4]
    sizes = [(bags[key], weights[table].shape[1]) for table, key in zip(tables, keys, strict=True)]
    elements = [rows * columns for rows, columns in sizes]
    shape = (sizes[0][0], sum(columns for _, columns in sizes)) if side_by_side else (sum(elements),)
    of_extremes = sum(size for size, mode in zip(elements, modes, strict=True) if _reduction.is_extreme(mode))
    return weights[0].new_empty(shape), inputs[0].new_empty(of_extremes, dtype=torch.int64)


# Each lookup's arguments end alike: three inputs of the bags, then five lists and side_by_side.
@torch.library.register_fake("torchsparse_rec::embedding_collection")
def _(weights: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_lookup("embedding_collection", weights, rest[:3], rest[3:8], rest[8])


@torch.library.register_fake("torchsparse_rec::embedding_collection_current")
def _(
    weights: list[Tensor], states: list[Tensor], last_steps: list[Tensor], history: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return _fake_lookup("embedding_collection_current", weights, rest[:3], rest[3:8], rest[8])


@torch.library.register_fake("torchsparse_rec::embedding_collection_dense_backward")
def _(
    grad: Tensor, indices: Tensor, offsets: Any, weights: Any, argmax: Any, num_embeddings: Any, dims: Any, *rest: Any
) -> list[Tensor]:
    sizes = zip(num_embeddings, dims, rest[-1], strict=True)
    return [grad.new_empty(rows if wanted else 0, columns) for rows, columns, wanted in sizes]


@torch.library.register_fake("torchsparse_rec::embedding_collection_sparse_backward")
def _(
    grad: Tensor, indices: Tensor, offsets: Any, weights: Any, argmax: Any, num_embeddings: Any, dims: Any, *rest: Any
) -> tuple[list[Tensor], list[Tensor]]:
    return _fake_rows(grad, indices, dims, rest[-1])


def _fake_rows(grad: Tensor, indices: Tensor, dims: Any, wanted: list[bool]) -> tuple[list[Tensor], list[Tensor]]:
    sizes = [torch.library.get_ctx().new_dynamic_size() if want else 0 for want in wanted]
    values = [grad.new_empty(rows, columns) for rows, columns in zip(sizes, dims, strict=True)]
    return values, [indices.new_empty(rows, dtype=torch.int64) for rows in sizes]


@torch.library.register_fake("torchsparse_rec::embedding_collection_coo_backward")
def _(
    grad: Tensor, indices: Tensor, offsets: Any, weights: Any, argmax: Any, num_embeddings: Any, dims: Any, *rest: Any
) -> list[Tensor]:
    values, rows = _fake_rows(grad, indices, dims, rest[-1])
    return [coo_tensor(*each) for each in zip(values, rows, num_embeddings, strict=True)]


@torch.library.register_fake("torchsparse_rec::embedding_collection_weights_backward")
def _(grad: Tensor, weights: list[Tensor], *rest: Any) -> Tensor:
    _check_devices("embedding_collection_weights_backward", weights)
    per_sample_weights = rest[5]
    return per_sample_weights.new_empty(per_sample_weights.shape)


@torch.library.register_fake("torchsparse_rec::embedding_collection_update_")
def _(weights: list[Tensor], *rest: Any) -> None:
    _check_devices("embedding_collection_update_", weights)


# ---- Autograd -------------------------------------------------------------------------------------------------------


# The marks of the tables' sparse gradients; None for a table without one, or for all.
Marks = Sequence[Mark | None] | None


class _Saved:
    """Whatever the gradients of one call need besides tensors."""

    def __init__(self, weights: Sequence[Tensor], lists: tuple, sparse: bool, marks: Marks = None) -> None:
        shapes = [weight.shape for weight in weights]
        self.num_embeddings = [shape[0] for shape in shapes]
        self.dims = [shape[1] for shape in shapes]
        self.lists = lists  # tables, keys, modes, bags, padding_idx, side_by_side
        self.sparse = sparse
        self.marks = marks

    def table_gradients(self, grad: Tensor, inputs: tuple, wanted: list[bool]) -> list[Tensor | None]:
        """Return the wanted tables' gradients. ``inputs``: indices, offsets, per_sample_weights, argmax."""
        if not any(wanted):
            return [None] * len(wanted)
        arguments = (grad, *inputs, self.num_embeddings, self.dims, *self.lists, wanted)
        if not self.sparse:
            made = _call("embedding_collection_dense_backward", arguments)
        elif _is_kernel_enough():
            made = _call("embedding_collection_coo_backward", arguments)
            tell(self.marks, made)
        else:  # others see the operators' strided results
            values, rows = _call("embedding_collection_sparse_backward", arguments)
            made = [coo_tensor(*each) for each in zip(values, rows, self.num_embeddings, strict=True)]
        return [x if want else None for x, want in zip(made, wanted, strict=True)]


def tell(marks: Marks, gradients: Sequence[Tensor]) -> None:
    """Tell the tables' marks of sparse gradients that the running backward is about to give them."""
    if marks is not None:
        backward = backward_number()
        with below_autograd():
            for mark, gradient in zip(marks, gradients, strict=True):
                if mark is not None:
                    mark.arrives(gradient, backward)


def _is_kernel_enough() -> bool:
    """Say whether neither autograd nor a compiler, a transform or a mode wants to see an operator."""
    return not (torch.is_grad_enabled() or is_seen())


def _call(name: str, arguments: tuple) -> Any:
    """Call an operator: its kernel directly, if that is enough."""
    if not _is_kernel_enough():
        return call(name, *arguments)
    with below_autograd():
        return getattr(_ops, name).default(*arguments)


def _save(
    ctx: Any, saved: _Saved, inputs: tuple, output: tuple[Tensor, Tensor], weights: Sequence[Tensor], weighted: bool
) -> None:
    """
    Save the inputs of a lookup's gradients; ``weighted``: also of the gradient of per_sample_weights.

    ``inputs``: indices, offsets, per_sample_weights.
    """
    pooled, argmax = output
    ctx.mark_non_differentiable(argmax)
    ctx.saved = saved
    ctx.save_for_backward(
        *inputs,
        argmax if any(map(_reduction.is_extreme, saved.lists[2])) else None,
        pooled if weighted else None,
        *(weights if weighted else ()),
    )


def _gradients_of(ctx: Any, grad: Tensor, wanted: list[bool], weights_wanted: bool) -> tuple[list, Tensor | None]:
    indices, offsets, per_sample_weights, argmax, pooled, *weights = ctx.saved_tensors
    saved: _Saved = ctx.saved
    grads = saved.table_gradients(grad, (indices, offsets, per_sample_weights, argmax), wanted)
    if not weights_wanted:
        return grads, None
    # No states, steps, history and rule: no row is stale.
    arguments = (grad, weights, [], [], None, indices, offsets, per_sample_weights, pooled, *saved.lists, 0, [], 0, 0)
    return grads, _call("embedding_collection_weights_backward", arguments)


def _lookup_setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    weights, *bags, tables, keys, modes, counts, padding_idx, side_by_side, sparse = inputs
    saved = _Saved(weights, (tables, keys, modes, counts, padding_idx, side_by_side), sparse)
    _save(ctx, saved, tuple(bags), output, weights, bags[2] is not None and bags[2].requires_grad)


def _lookup_backward(ctx: Any, grad: Tensor, _argmax: Any) -> tuple:
    grads, weights_grad = _gradients_of(ctx, grad, list(ctx.needs_input_grad[0]), ctx.needs_input_grad[3])
    return grads, None, None, weights_grad, *(None,) * 7


class _Lookup(torch.autograd.Function):
    """The lookup with its gradients, for eager calls: the registered way would cost them more than a small lookup."""

    @staticmethod
    def forward(ctx, lists, sparse, marks, indices, offsets, per_sample_weights, *weights):
        """Look up; ``weights`` come last, one by one, since autograd does not see tensors in a list."""
        inputs = (indices, offsets, per_sample_weights)
        with below_autograd():
            output = _ops.embedding_collection.default(weights, *inputs, *lists, sparse)
        _save(ctx, _Saved(weights, lists, sparse, marks), inputs, output, weights, ctx.needs_input_grad[5])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any, _argmax: Any) -> tuple:
        """Return the gradients of ``per_sample_weights`` and of each of ``weights``."""
        wanted = ctx.needs_input_grad
        grads, weights_grad = _gradients_of(ctx, grad, list(wanted[6:]), wanted[5])
        return None, None, None, None, None, weights_grad, *grads


def lookup(
    weights: list[Tensor],
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    tables: list[int],
    keys: list[int],
    modes: list[int],
    bags: list[int],
    padding_idx: list[int],
    side_by_side: bool,
    sparse: bool,
    marks: Marks = None,
) -> tuple[Tensor, Tensor]:
    """
    Call the operator ``embedding_collection``, with its arguments, by the shortest way: modules call it so.

    The ``marks`` of sparse gradients are called with them, or watch the tables.
    """
    lists = (tables, keys, modes, bags, padding_idx, side_by_side)
    inputs = (indices, offsets, per_sample_weights)
    if is_seen():
        for mark, weight in () if marks is None else zip(marks, weights, strict=True):
            if mark is not None:
                mark.watch(weight)
        return call("embedding_collection", weights, *inputs, *lists, sparse)
    if torch.is_grad_enabled() and any_requires_grad(per_sample_weights, *weights):
        return _Lookup.apply(lists, sparse, marks, *inputs, *weights)
    with below_autograd():
        return _ops.embedding_collection.default(weights, *inputs, *lists, sparse)


register("embedding_collection", _lookup_backward, _lookup_setup_context)
for _name in ("dense_backward", "sparse_backward", "coo_backward", "weights_backward"):
    register(f"embedding_collection_{_name}", *only_once(f"embedding_collection_{_name}"))
# Modules call it below autograd, and differentiate with respect to the up-to-date tables themselves.
not_differentiable("embedding_collection_current", "planned_collection", "planned_collection_current")
