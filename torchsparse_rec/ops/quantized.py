"""
Family ``quantized``: lookups in tables of fewer bytes, for inference, in torch's own formats.

Contract and formats: csrc/quantized.h. Kernels: csrc/cpu/quantized.cpp, csrc/cuda/quantized.cu. Most programs want
:func:`torchsparse_rec.nn.quantize`, which is made of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _reduction
from ..typing import Pooling, RowsFormat
from ._offsets import check_not_empty
from .autograd import not_differentiable
from .embedding import padding_number

__all__ = ["quantize_rows", "quantized_embedding", "quantized_embedding_bag"]

_ops = torch.ops.torchsparse_rec


class RowFormat(NamedTuple):
    """How a table's rows are stored."""

    dtype: torch.dtype  # of the table
    bits: int  # of an element
    scales: int  # bytes at the end of a row

    def width(self, dim: int) -> int:
        """Return the table's columns for rows of ``dim`` elements."""
        return dim if self.bits == 16 else dim * self.bits // 8 + self.scales


#: The formats by name.
ROW_FORMATS = {
    "int8": RowFormat(torch.uint8, 8, 8),
    "int4": RowFormat(torch.uint8, 4, 4),
    "float16": RowFormat(torch.float16, 16, 0),
    "bfloat16": RowFormat(torch.bfloat16, 16, 0),
}


def format_of(function: str, rows: str) -> RowFormat:
    """Return the format of that name, or raise ``ValueError``."""
    if rows not in ROW_FORMATS:
        raise ValueError(f"{function}: rows must be one of {', '.join(map(repr, ROW_FORMATS))}, got {rows!r}")
    return ROW_FORMATS[rows]


def quantize_rows(weight: Tensor, rows: RowsFormat = "int8") -> Tensor:
    """
    Store the rows of a table in fewer bytes, for :func:`quantized_embedding` and :func:`quantized_embedding_bag`.

    Args:
        weight: ``[V, D]``, of floats, all finite; float64 is first rounded to float32.
        rows: the format.

            * ``"int8"`` (default): what ``torch.ops.quantized.embedding_bag_byte_prepack`` gives, byte for byte. An
              element becomes one of 256 levels between its row's least and largest, ``low`` and ``high``, and is off by
              ``(high - low) / 510 + 1e-8`` at most;
            * ``"int4"``: what ``torch.ops.quantized.embedding_bag_4bit_prepack`` gives: 16 levels, whose step and least
              are float16. Off by ``(high - low) / 30 * (1 + 2**-11) + abs(low) * 2**-11 + 1e-6`` at most;
            * ``"float16"``, ``"bfloat16"``: rounded to these: off by a part of ``2**-11`` and ``2**-8``; below
              ``2**-14``, float16 by ``2**-25``.

            To the first two come two roundings of float32, ``2**-23 * max(abs(low), abs(high))`` each.

    Returns:
        ``[V, D + 8]`` uint8, ``[V, D / 2 + 4]`` uint8, or ``[V, D]`` of the dtype, on the device of ``weight``; without
        a gradient. Rows on CUDA are quantised on the CPU.

    Raises:
        ValueError: another rank or format; no columns; an odd D for int4; numbers that are not finite, or that the
            format cannot hold.

    Not differentiable.

    Example:
        >>> table = quantize_rows(torch.tensor([[0.0, 1.0, 2.0, 255.0]]))
        >>> table[0, :4], table.shape
        (tensor([  0,   1,   2, 255], dtype=torch.uint8), torch.Size([1, 12]))
    """
    check_rows("quantize_rows", weight, rows)
    return packed_rows(weight, rows)


@torch.no_grad()
def check_rows(function: str, weight: Tensor, rows: str) -> None:
    """Raise ``ValueError`` unless a format can hold a table; ``function`` begins the error."""
    format_of(function, rows)
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise ValueError(
            f"{function}: weight must be [V, D] of floats, got {weight.dtype} of shape {tuple(weight.shape)}"
        )
    dim = weight.shape[1]
    if dim == 0 or (rows == "int4" and dim % 2):
        wanted = "an even number of columns for rows='int4'" if dim else "at least one column"
        raise ValueError(f"{function}: weight must have {wanted}, got shape {tuple(weight.shape)}")
    if weight.shape[0] == 0 or weight.is_meta:
        return
    low, high = (x.double() for x in weight.detach().aminmax(dim=1))
    largest, spread = torch.maximum(low.abs(), high.abs()), high - low
    filled = {  # the part of what the format can hold
        "int8": torch.maximum(largest, spread) / torch.finfo(torch.float32).max,
        "int4": torch.maximum(low.abs(), spread / 15) / torch.finfo(torch.float16).max,
        "float16": largest / torch.finfo(torch.float16).max,
        "bfloat16": largest / torch.finfo(torch.bfloat16).max,
    }
    beyond = ~(filled[rows] <= 1)  # also of NaN
    if bool(beyond.any()):
        row = int(beyond.nonzero()[0])
        raise ValueError(
            f"{function}: weight must be finite and within what rows={rows!r} can hold, got a row {row} from "
            f"{float(low[row]):g} to {float(high[row]):g}"
        )


@torch.no_grad()
def packed_rows(weight: Tensor, rows: str) -> Tensor:
    """Do as :func:`quantize_rows` with a table that :func:`check_rows` has passed."""
    row_format, weight = ROW_FORMATS[rows], weight.detach()
    if row_format.bits == 16:
        return weight.to(row_format.dtype, copy=True).contiguous()
    shape = (weight.shape[0], row_format.width(weight.shape[1]))
    if weight.is_meta or weight.shape[0] == 0:
        return weight.new_empty(shape, dtype=row_format.dtype)
    prepack = {8: torch.ops.quantized.embedding_bag_byte_prepack, 4: torch.ops.quantized.embedding_bag_4bit_prepack}
    return prepack[row_format.bits](weight.cpu().float().contiguous()).to(weight.device)  # type: ignore[no-any-return]


def quantized_embedding(weight: Tensor, indices: Tensor, *, rows: RowsFormat = "int8") -> Tensor:
    """
    Look up rows of a table that :func:`quantize_rows` has made: ``out[i]`` is row ``indices[i]``, decoded.

    Args:
        weight: the table of V rows.
        indices: ids of any shape, int32 or int64, in ``[0, V)``.
        rows: the format of the rows, as of :func:`quantize_rows`.

    Returns:
        ``[*indices.shape, D]``, float32. Not differentiable.

    Raises:
        IndexError: an index outside ``[0, V)``, named with its position.
        ValueError: wrong shapes, dtypes or devices.

    Example:
        >>> table = quantize_rows(torch.tensor([[0.0, 255.0], [-1.0, 1.0]]))
        >>> quantized_embedding(table, torch.tensor([1, 0]))
        tensor([[ -1.,   1.],
                [  0., 255.]])
    """
    return _ops.quantized_embedding.default(weight, indices, bits_of("quantized_embedding", weight, rows))


def quantized_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    *,
    rows: RowsFormat = "int8",
    per_sample_weights: Tensor | None = None,
    mode: Pooling = "sum",
    padding_idx: int | None = None,
) -> Tensor:
    """
    Look up rows of a table that :func:`quantize_rows` has made and pool them per bag, as :func:`embedding_bag` does.

    No decoded copy of a row is made. On the CPU the result has the bits that :func:`embedding_bag` gives for the
    decoded table.

    Args:
        weight: the table of V rows.
        indices: ``[N]``, int32 or int64, in ``[0, V)``.
        offsets: ``[B + 1]``, int32 or int64, not decreasing, from 0 to ``N``.
        rows: the table's format, as of :func:`quantize_rows`.
        per_sample_weights: ``[N]``, float32, without a gradient.
        mode: a mode of :class:`torchsparse_rec.nn.EmbeddingBag`. Default ``"sum"``.
        padding_idx: a row whose entries are left out of the bags.

    Returns:
        ``[B, D]``, float32. Not differentiable.

    Raises:
        IndexError: an index outside ``[0, V)``, named with its position.
        RuntimeError: ``per_sample_weights`` that require a gradient.
        ValueError: bad offsets, NaN weights, weights with an extreme; wrong shapes, dtypes or devices.

    Source: ``torch.ops.quantized.embedding_bag_byte_rowwise_offsets``.

    Example:
        >>> table = quantize_rows(torch.tensor([[0.0, 255.0], [-1.0, 1.0]]))
        >>> quantized_embedding_bag(table, torch.tensor([1, 0, 1]), torch.tensor([0, 2, 3]))
        tensor([[ -1., 256.],
                [ -1.,   1.]])
    """
    if mode not in _reduction.POOLING:
        raise ValueError(f"mode must be one of {', '.join(map(repr, _reduction.POOLING))}, got {mode!r}")
    refuse_gradient("quantized_embedding_bag", per_sample_weights)
    bits = bits_of("quantized_embedding_bag", weight, rows)
    check_not_empty("quantized_embedding_bag", offsets, indices)
    rest = (bits, _reduction.POOLING[mode], padding_number(padding_idx))
    return _ops.quantized_embedding_bag.default(weight, indices, offsets, per_sample_weights, *rest)


def bits_of(function: str, weight: Tensor, rows: str) -> int:
    """Return the bits of an element of a table whose format has that name; raise ``ValueError`` if it has another."""
    row_format = format_of(function, rows)
    if weight.dtype != row_format.dtype:
        raise ValueError(f"{function}: weight must be {row_format.dtype} where rows={rows!r}, got {weight.dtype}")
    return row_format.bits


def refuse_gradient(function: str, per_sample_weights: Tensor | None) -> None:
    """Raise ``RuntimeError`` where a gradient of the weights would be asked for: it would silently be zero."""
    if per_sample_weights is not None and per_sample_weights.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{function}: per_sample_weights must not require a gradient, as quantised tables are for inference: look "
            "up under torch.no_grad(), or detach the weights; to train, look up in the table from before"
        )


@torch.library.register_fake("torchsparse_rec::quantized_embedding")
def _(weight: Tensor, indices: Tensor, bits: int) -> Tensor:
    return weight.new_empty(*indices.shape, dim_of(weight, bits), dtype=torch.float32)


@torch.library.register_fake("torchsparse_rec::quantized_embedding_bag")
def _(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    bits: int,
    mode: int,
    padding_idx: int,
    include_last_offset: bool = True,
    first_bag: Any = 0,
    bags: Any = None,
) -> Tensor:
    count = offsets.shape[0] - int(include_last_offset) - first_bag if bags is None else bags
    return weight.new_empty(count, dim_of(weight, bits), dtype=torch.float32)


def dim_of(weight: Tensor, bits: int) -> Any:
    """Return the number of elements of a row of a quantised table."""
    width = weight.shape[1]
    return {4: 2 * (width - 4), 8: width - 8, 16: width}[bits]


not_differentiable("quantized_embedding", "quantized_embedding_bag")
