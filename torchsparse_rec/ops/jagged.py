"""
Conversions between the forms of rows of different lengths.

The library's own form is ``(values, offsets)``: row ``r`` is ``values[offsets[r] : offsets[r + 1]]``. Others are row
ids, lengths, a padded matrix, ``torch.nested`` jagged, and a sparse tensor's ``(indices, values, dense_shape)``.

Contract of the operators: csrc/sparse_tensor.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._offsets import check_not_empty
from ._scalars import scalar_like
from .autograd import not_differentiable

__all__ = [
    "jagged_to_nested",
    "jagged_to_padded",
    "jagged_to_sparse",
    "lengths_to_offsets",
    "nested_to_jagged",
    "offsets_to_lengths",
    "offsets_to_row_ids",
    "padded_to_jagged",
    "row_ids_to_offsets",
    "sparse_to_jagged",
]

_ops = torch.ops.torchsparse_rec


# ---- Row ids, offsets, lengths --------------------------------------------------------------------------------------


def row_ids_to_offsets(row_ids: Tensor, num_rows: int) -> Tensor:
    """
    Convert the row ids of items sorted by row to offsets: where each row begins, and where the last ends.

    Args:
        row_ids: ``[N]``, int32 or int64: the row of each item, sorted; rows may be missing. Any stride: a column of a
            sparse tensor's indices is not copied.
        num_rows: the number of rows.

    Returns:
        ``[num_rows + 1]``, int64, from 0 to N. Not differentiable.

    Raises:
        IndexError: an id outside ``[0, num_rows)``.
        ValueError: ids that decrease; a wrong rank or dtype.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.RaggedTensor.from_value_rowids``.

    Example:
        >>> row_ids_to_offsets(torch.tensor([0, 0, 2]), 4)
        tensor([0, 2, 2, 3, 3])
    """
    return _ops.row_ids_to_offsets.default(row_ids, num_rows)


def offsets_to_row_ids(offsets: Tensor, num_items: int | None = None) -> Tensor:
    """
    Convert the offsets of rows to row ids: the row of each item.

    Args:
        offsets: ``[S + 1]``, int32 or int64, from 0 to ``num_items``, never decreasing.
        num_items: the number of items; default: the last offset, which on CUDA is read back.

    Returns:
        ``[num_items]``, int64, sorted. Not differentiable.

    Raises:
        ValueError: offsets that do not go from 0 to ``num_items`` without decreasing; a wrong rank or dtype.

    On CUDA, with ``num_items``, nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.RaggedTensor.value_rowids``.

    Example:
        >>> offsets_to_row_ids(torch.tensor([0, 2, 2, 3]))
        tensor([0, 0, 2])
    """
    if num_items is None:
        if offsets.dim() != 1 or offsets.shape[0] == 0:
            raise ValueError(
                f"offsets_to_row_ids: offsets must be a vector of at least one element, got shape {list(offsets.shape)}"
            )
        num_items = int(offsets[-1])
    return _ops.offsets_to_row_ids.default(offsets, num_items)


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """
    Convert the lengths of rows to offsets: 0, and the running sums of the lengths.

    Args:
        lengths: ``[S]``, an integer dtype, not negative (negative ones give offsets that decrease, which every
            operator refuses).

    Returns:
        ``[S + 1]``, int64: 0, and the sums of the first lengths.

    Raises:
        ValueError: a wrong rank or dtype.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.RaggedTensor.from_row_lengths``.

    Example:
        >>> lengths_to_offsets(torch.tensor([2, 0, 1]))
        tensor([0, 2, 2, 3])
    """
    _check_integer_vector("lengths_to_offsets", "lengths", lengths)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


def offsets_to_lengths(offsets: Tensor) -> Tensor:
    """
    Convert the offsets of rows to their lengths.

    Args:
        offsets: ``[S + 1]``, an integer dtype.

    Returns:
        ``[S]``, int64.

    Raises:
        ValueError: a wrong rank or dtype, or no element.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.RaggedTensor.row_lengths``.

    Example:
        >>> offsets_to_lengths(torch.tensor([0, 2, 2, 3]))
        tensor([2, 0, 1])
    """
    _check_integer_vector("offsets_to_lengths", "offsets", offsets)
    if offsets.shape[0] == 0:
        raise ValueError("offsets_to_lengths: offsets must have at least one element, got none")
    return offsets.long().diff()


def _check_integer_vector(function: str, argument: str, x: Tensor) -> None:
    if x.dim() != 1 or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{function}: {argument} must be a vector of integers, got {x.dtype} of shape {list(x.shape)}")


# ---- Padded ---------------------------------------------------------------------------------------------------------


def padded_to_jagged(padded: Tensor, padding_value: float = 0) -> tuple[Tensor, Tensor]:
    """
    Convert a padded matrix to jagged rows, ``(values, offsets)``: drop every element that equals the padding value.

    Args:
        padded: ``[S, L]``, any dtype but complex.
        padding_value: the value whose equals are all dropped, wherever they stand; NaN drops NaNs.

    Returns:
        ``(values [N], offsets [S + 1])``: the other elements in row-major order. Differentiable in ``padded``.

    Raises:
        ValueError: a wrong rank.

    On CUDA the number of values is read back, so it waits for the device.

    Source: ``tf.RaggedTensor.from_tensor`` with ``padding``, which drops the elements at the end of a row only.

    Example:
        >>> padded_to_jagged(torch.tensor([[3, 1, 0], [0, 0, 0], [4, 0, 0]]))
        (tensor([3, 1, 4]), tensor([0, 2, 2, 3]))
    """
    if padded.dim() != 2:
        raise ValueError(f"padded_to_jagged: padded must have rank 2, got shape {list(padded.shape)}")
    kept = padded.isnan().logical_not() if padding_value != padding_value else padded != padding_value
    return padded[kept], lengths_to_offsets(kept.sum(1))


def jagged_to_padded(values: Tensor, offsets: Tensor, length: int | None = None, padding_value: float = 0) -> Tensor:
    """
    Convert jagged rows, ``(values, offsets)``, to a matrix: shorter rows are padded, longer ones cut.

    Args:
        values: ``[N, ...]``, any dtype.
        offsets: ``[S + 1]``, int32 or int64. They are not checked: elements of a row that ``values`` does not have
            are padding.
        length: columns of the result, ``L``; longer rows are cut. Default: the length of the longest row, which on
            CUDA is read back.
        padding_value: the value of all other elements.

    Returns:
        ``[S, L, ...]``, with the dtype of ``values``. Differentiable in ``values``.

    Raises:
        ValueError: a wrong rank or dtype, a negative ``length``.

    On CUDA, with ``length``, nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.RaggedTensor.to_tensor``.

    Example:
        >>> jagged_to_padded(torch.tensor([3, 1, 4]), torch.tensor([0, 2, 2, 3]), padding_value=-1)
        tensor([[ 3,  1],
                [-1, -1],
                [ 4, -1]])
    """
    check_not_empty("jagged_to_padded", offsets, values, "values")
    lengths = offsets_to_lengths(offsets)
    if values.dim() == 0:
        raise ValueError("jagged_to_padded: values must have rank >= 1, got a scalar")
    if length is None:
        length = int(lengths.max()) if lengths.shape[0] > 0 else 0
    if length < 0:
        raise ValueError(f"jagged_to_padded: length must be >= 0, got {length}")
    size = values.shape[0]
    places = offsets[:-1].long().unsqueeze(1) + torch.arange(length, device=values.device)
    exists = (places < offsets[1:].unsqueeze(1)) & (places >= 0) & (places < size)
    # The last row is the padding.
    padding = scalar_like("padding_value", padding_value, values).expand(1, *values.shape[1:])
    rows = torch.cat([values, padding])
    return rows[torch.where(exists, places, size)]


# ---- Sparse tensors -------------------------------------------------------------------------------------------------


def sparse_to_jagged(indices: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """
    Convert a sparse tensor whose entries are sorted by row to jagged rows, ``(values, offsets)``.

    Args:
        indices: ``[N, R]``, int32 or int64: the first column is the row, sorted. Other columns are not looked at.
        values: ``[N, ...]``, any dtype.
        num_rows: the first size of the sparse tensor's shape.

    Returns:
        ``(values, offsets [num_rows + 1])``; ``values`` are those given. Differentiable in ``values``.

    Raises:
        IndexError: a row outside ``[0, num_rows)``.
        ValueError: rows that decrease (see :func:`sparse_reorder`); wrong shapes or dtypes.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.RaggedTensor.from_sparse``, which checks the other columns too.

    Example:
        >>> indices = torch.tensor([[0, 0], [0, 1], [2, 0]])
        >>> sparse_to_jagged(indices, torch.tensor([3, 1, 4]), 3)
        (tensor([3, 1, 4]), tensor([0, 2, 2, 3]))
    """
    if indices.dim() != 2 or indices.shape[1] == 0 or values.dim() == 0 or values.shape[0] != indices.shape[0]:
        raise ValueError(
            "sparse_to_jagged: indices must be [N, R] with R >= 1 and values must have N rows, got shapes "
            f"{list(indices.shape)} and {list(values.shape)}"
        )
    return values, row_ids_to_offsets(indices[:, 0], num_rows)


def jagged_to_sparse(values: Tensor, offsets: Tensor, length: int | None = None) -> tuple[Tensor, Tensor, tuple]:
    """
    Convert jagged rows, ``(values, offsets)``, to a sparse tensor of rank 2: its indices, values and shape.

    Args:
        values: ``[N]``, any dtype.
        offsets: ``[S + 1]``, int32 or int64, from 0 to N, never decreasing.
        length: the second size of the shape; default: the length of the longest row, which on CUDA is read back.

    Returns:
        ``(indices [N, 2], values [N], dense_shape)``: entries are in order, and ``dense_shape`` is ``(S, length)``;
        ``values`` are those given.

    Raises:
        ValueError: offsets that do not go from 0 to N without decreasing; a wrong rank or dtype.

    On CUDA, with ``length``, nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.RaggedTensor.to_sparse``.

    Example:
        >>> jagged_to_sparse(torch.tensor([3, 1, 4]), torch.tensor([0, 2, 2, 3]))
        (tensor([[0, 0],
                [0, 1],
                [2, 0]]), tensor([3, 1, 4]), (3, 2))
    """
    if values.dim() != 1:
        raise ValueError(f"jagged_to_sparse: values must have rank 1, got shape {list(values.shape)}")
    check_not_empty("jagged_to_sparse", offsets, values, "values")
    size = values.shape[0]
    row_ids = offsets_to_row_ids(offsets, size)
    columns = torch.arange(size, device=values.device) - offsets.long().index_select(0, row_ids)
    rows = offsets.shape[0] - 1
    if length is None:
        length = int(offsets_to_lengths(offsets).max()) if rows > 0 else 0
    return torch.stack([row_ids, columns], 1), values, (rows, length)


# ---- torch.nested ---------------------------------------------------------------------------------------------------


def nested_to_jagged(nested: Tensor) -> tuple[Tensor, Tensor]:
    """
    Convert a ``torch.nested`` tensor of layout ``torch.jagged`` to jagged rows, ``(values, offsets)``.

    Args:
        nested: ``torch.nested`` with the layout ``torch.jagged``, ragged in its second dimension.

    Returns:
        ``(values [N, ...], offsets [S + 1])``, both views where the nested tensor has no holes. Differentiable in
        ``nested``.

    Raises:
        ValueError: another kind of tensor, or one ragged in another dimension.

    On CUDA nothing waits for the device, except a nested tensor with holes, which is packed first.

    Example:
        >>> nested = torch.nested.nested_tensor([torch.tensor([3, 1]), torch.tensor([4])], layout=torch.jagged)
        >>> nested_to_jagged(nested)
        (tensor([3, 1, 4]), tensor([0, 2, 3]))
    """
    if not (nested.is_nested and nested.layout == torch.jagged):
        raise ValueError(
            f"nested_to_jagged: nested must be a nested tensor with the layout torch.jagged, got {nested.layout}"
        )
    ragged = nested._ragged_idx  # type: ignore[attr-defined]
    if ragged != 1:
        raise ValueError(f"nested_to_jagged: nested must be ragged in dimension 1, got a tensor ragged in {ragged}")
    if nested.lengths() is not None:  # type: ignore[attr-defined]
        nested = nested.contiguous()
    return nested.values(), nested.offsets()  # type: ignore[attr-defined]


def jagged_to_nested(values: Tensor, offsets: Tensor) -> Tensor:
    """
    Convert jagged rows, ``(values, offsets)``, to a ``torch.nested`` tensor of layout ``torch.jagged``, a view.

    Args:
        values: ``[N, ...]``, any dtype.
        offsets: ``[S + 1]``, int32 or int64. They are not checked, nor does ``torch.nested`` check them.

    Returns:
        ``torch.nested`` with the layout ``torch.jagged``, a view of ``values``. Differentiable in ``values``.

    Raises:
        ValueError: a wrong rank or dtype.

    On CUDA nothing waits for the device.

    Source: ``torch.nested.nested_tensor_from_jagged``.

    Example:
        >>> nested = jagged_to_nested(torch.tensor([3, 1, 4]), torch.tensor([0, 2, 3]))
        >>> [row.tolist() for row in nested.unbind()]
        [[3, 1], [4]]
    """
    _check_integer_vector("jagged_to_nested", "offsets", offsets)
    if values.dim() == 0:
        raise ValueError("jagged_to_nested: values must have rank >= 1, got a scalar")
    check_not_empty("jagged_to_nested", offsets, values, "values")
    return torch.nested.nested_tensor_from_jagged(values, offsets)


# ---- Fake kernels ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("torchsparse_rec::row_ids_to_offsets")
def _(row_ids: Tensor, num_rows: int) -> Tensor:
    return row_ids.new_empty(num_rows + 1, dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::offsets_to_row_ids")
def _(offsets: Tensor, num_items: int) -> Tensor:
    return offsets.new_empty(num_items, dtype=torch.int64)


not_differentiable("row_ids_to_offsets", "offsets_to_row_ids")
