"""Lookups of single tables: checks of ids, renormalised rows, and the choice between torch's operators and ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._reduction import POOLING
from ..jagged.checks import checked_integers, not_a_tensor
from ..ops.embedding import lookup_bags, lookup_rows, padding_number, with_last_offset
from ._refusals import NO_TORCHSCRIPT
from .gradients import coalesced_mark

# Small plain lookups on CPU with dense gradients go to torch.embedding. Its derivative is part of torch. Our operator's
# is a Python function, which takes some 25 us, most of the time of a small lookup. torch's backward adds in the order
# of the ids, as ours does, so both give the same bits. It is slower per id (its threads all read all ids), so larger
# lookups gain from ours. The limit was fitted on two busy cores. Both took the same time there at about 1,500, 1,300
# and 450 ids of 8, 32 and 128 elements: an id costs as much as 40 elements do.
_SMALL_LOOKUP = 75_000
_ELEMENTS_PER_ID = 40

ID_DTYPES = (torch.int64, torch.int32)
# The dtypes of tables that torch.embedding may look up: not half types, which torch adds in their own precision.
_TORCH_DTYPES = (torch.float32, torch.float64)
# The dtypes of tables without a gradient.
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def nested_like(input: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of the values of a nested tensor as a nested tensor with its offsets, holes included."""
    its: Any = input
    where = {"offsets": its.offsets(), "lengths": its.lengths(), "jagged_dim": its._ragged_idx}
    return torch.nested.nested_tensor_from_jagged(rows, **where)


def rows_like(input: Tensor, rows: Tensor) -> Tensor:
    """Return one row for each id of ``input``, ``[N, D]``, in the shape of ``input``."""
    ids: Tensor = input.values() if input.is_nested else input
    rows = rows.reshape(*ids.shape, rows.shape[-1])
    return nested_like(input, rows) if input.is_nested else rows


def checked_ids(module: str, input: Tensor) -> Tensor:
    """Return ids as int32 or int64; raise ``TypeError`` or ``ValueError`` unless ``input`` is a tensor of integers."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{module}: input must be a tensor of int32 or int64, got {not_a_tensor(input)}")
    return checked_integers(f"{module}: input", input)


def bad_id(module: str, input: Tensor, num_embeddings: int, argument: str = "input") -> IndexError | None:
    """Return the error for the first id of ``input`` outside ``[0, num_embeddings)``, or None."""
    bad = ((input < 0) | (input >= num_embeddings)).nonzero()
    if bad.shape[0] == 0:
        return None
    position = tuple(bad[0].tolist())
    where = f"[{', '.join(map(str, position))}]" if position else ""
    return IndexError(f"{module}: {argument}{where} must be in [0, {num_embeddings}), got {input[position].item()}")


def _check_traced(module: str) -> None:
    """Raise ``RuntimeError`` if ``torch.jit.trace`` would meet a derivative in Python, which it cannot keep."""
    if torch.jit.is_tracing() and torch.is_grad_enabled():
        raise RuntimeError(NO_TORCHSCRIPT.format(module))


def renormalise(module: str, weight: Tensor, input: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows in ``input`` down to ``max_norm``, in place, without a gradient."""
    if input.numel() == 0 or weight.shape[0] == 0:
        return
    if input.device.type == "cpu" and not torch.compiler.is_compiling():
        lowest, highest = torch.aminmax(input)
        if lowest < 0 or highest >= weight.shape[0]:
            error = bad_id(module, input, weight.shape[0])
            assert error is not None
            raise error
    else:
        # A bad id in torch's kernel would make the device unusable for the process. The lookup reports it instead.
        input = input.clamp(0, weight.shape[0] - 1)
    torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)


def look_up(
    weight: Tensor, input: Tensor, padding_idx: int | None, scale_grad_by_freq: bool, sparse_grad: bool
) -> Tensor:
    """Return one row per id of ``input``; see :class:`Embedding`."""
    if weight.dtype in _INTEGERS:
        return _look_up_integers(weight, input)
    if torch.compiler.is_compiling():
        return lookup_rows(weight, input, padding_number(padding_idx), scale_grad_by_freq, False)
    try:
        if (
            not sparse_grad
            and not scale_grad_by_freq
            and input.numel() * (weight.size(-1) + _ELEMENTS_PER_ID) <= _SMALL_LOOKUP
            and weight.is_cpu
            and weight.dtype in _TORCH_DTYPES
        ):
            return torch.embedding(weight, input, -1 if padding_idx is None else padding_idx)
        _check_traced("Embedding")
        mark = coalesced_mark(weight) if sparse_grad else None
        return lookup_rows(weight, input, padding_number(padding_idx), scale_grad_by_freq, sparse_grad, mark)
    except (IndexError, RuntimeError):
        error = bad_id("Embedding", input, weight.size(0))
        if error is None:
            raise
        raise error from None


def _look_up_integers(weight: Tensor, input: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        # Before the lookup, as a bad id in torch's kernel would make a device unusable for the process.
        error = bad_id("Embedding", input, weight.size(0))
        if error is not None:
            raise error
    return torch.embedding(weight, input)


def pool(
    weight: Tensor,
    input: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    sparse_grad: bool,
    include_last_offset: bool,
) -> Tensor:
    """Return one row per bag of the flat ``input``; see :class:`EmbeddingBag`."""
    if not torch.compiler.is_compiling():
        _check_traced("EmbeddingBag")
    else:
        offsets, include_last_offset = with_last_offset(offsets, input.shape[0], include_last_offset), True
    mark = coalesced_mark(weight) if sparse_grad else None
    rest = (POOLING[mode], padding_number(padding_idx), scale_grad_by_freq, sparse_grad, include_last_offset, mark)
    return lookup_bags(weight, input, offsets, per_sample_weights, *rest)
