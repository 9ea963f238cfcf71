"""
Conversions to and from TensorFlow: dense tensors, ``tf.SparseTensor``, ``tf.IndexedSlices`` and ``tf.RaggedTensor``,
feature columns and Keras's preprocessing layers.

Conversion from torch to TensorFlow shares memory where that is safe, and copies otherwise; ``share=False`` always
copies. Safe is contiguous CPU memory aligned to 64 bytes: TensorFlow ends the process on other memory. A shared
TensorFlow tensor changes when the torch tensor is written to, although TensorFlow takes its tensors for constant.

TensorFlow to torch copies; ``share=True`` shares TensorFlow's memory, which must then not be written to.

Gradients do not flow through a conversion. Results are on the CPU. TensorFlow is imported by the first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._columns import feature_column_to_tensorflow, feature_column_to_torch, keras_layer_to_column
from ._dense import check_dtype, tensor_to_tensorflow, tensor_to_torch
from .installed import tensorflow

__all__ = [
    "feature_column_to_tensorflow",
    "feature_column_to_torch",
    "indexed_slices_to_tensorflow",
    "indexed_slices_to_torch",
    "keras_layer_to_column",
    "nested_to_tensorflow",
    "ragged_tensor_to_nested",
    "ragged_tensor_to_tensorflow",
    "ragged_tensor_to_torch",
    "sparse_tensor_to_tensorflow",
    "sparse_tensor_to_torch",
    "sparse_tensor_to_triple",
    "tensor_to_tensorflow",
    "tensor_to_torch",
    "triple_to_tensorflow",
]


# ---- tf.SparseTensor ------------------------------------------------------------------------------------------------


def sparse_tensor_to_torch(sparse: Any, *, share: bool = False) -> Tensor:
    """
    Return a torch sparse COO tensor with the entries of a ``tf.SparseTensor``, in their order.

    Args:
        sparse: ``tf.SparseTensor`` of any rank.
        share: whether to share TensorFlow's memory instead of copying it.

    Returns:
        A sparse COO tensor of shape ``dense_shape``, not marked as coalesced: TensorFlow does not promise an order.

    Raises:
        TypeError: for string values.
        ValueError: for an index outside ``dense_shape``, which TensorFlow does not check.

    Example:
        >>> import tensorflow as tf
        >>> sparse_tensor_to_torch(tf.SparseTensor([[0, 2], [1, 0]], [5.0, 6.0], [2, 3])).to_dense()
        tensor([[0., 0., 5.],
                [6., 0., 0.]])
    """
    indices, values, shape = sparse_tensor_to_triple(sparse, share=share)
    try:
        return torch.sparse_coo_tensor(indices.t(), values, shape.tolist(), check_invariants=True)
    except RuntimeError as error:
        raise ValueError(f"sparse is not a valid sparse tensor: {error}") from error


def sparse_tensor_to_tensorflow(tensor: Tensor, *, share: bool = True) -> Any:
    """
    Return a ``tf.SparseTensor`` with the entries of a torch sparse COO tensor, in their order.

    Args:
        tensor: sparse COO without dense dimensions, coalesced or not; duplicates are kept.
        share: whether to share the memory where that is safe.

    Returns:
        ``tf.SparseTensor``.

    Raises:
        TypeError: for another layout.
        ValueError: for dense dimensions, which ``tf.SparseTensor`` does not have (``tf.IndexedSlices`` has).

    Example:
        >>> sparse_tensor_to_tensorflow(torch.eye(2).to_sparse()).indices.numpy().tolist()
        [[0, 0], [1, 1]]
    """
    _check_coo(tensor)
    if tensor.dense_dim():
        raise ValueError(
            f"tensor must have no dense dimensions, got {tensor.dense_dim()}: use indexed_slices_to_tensorflow for a "
            "sparse gradient"
        )
    shape = torch.tensor(tensor.shape, dtype=torch.int64)
    return triple_to_tensorflow(tensor._indices().t(), tensor._values(), shape, share=share)


def sparse_tensor_to_triple(sparse: Any, *, share: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """
    Return the ``(indices, values, dense_shape)`` of a ``tf.SparseTensor`` as torch tensors.

    Args:
        sparse: ``tf.SparseTensor`` of any rank R with N entries.
        share: whether to share TensorFlow's memory instead of copying it.

    Returns:
        ``indices`` ``[N, R]`` int64, ``values`` ``[N]``, ``dense_shape`` ``[R]`` int64.

    Raises:
        TypeError: for string values.

    Example:
        >>> import tensorflow as tf
        >>> sparse_tensor_to_triple(tf.SparseTensor([[0, 2]], [5], [2, 3]))
        (tensor([[0, 2]]), tensor([5], dtype=torch.int32), tensor([2, 3]))
    """
    check_dtype(sparse.values.dtype)
    parts = (sparse.indices, sparse.values, sparse.dense_shape)
    indices, values, shape = (tensor_to_torch(part, share=share) for part in parts)
    return indices, values, shape


def triple_to_tensorflow(indices: Tensor, values: Tensor, dense_shape: Tensor, *, share: bool = True) -> Any:
    """
    Return a ``tf.SparseTensor`` of ``(indices, values, dense_shape)``.

    Args:
        indices: ``[N, R]``, integers.
        values: ``[N]``.
        dense_shape: ``[R]``, integers; a tensor, ``torch.Size`` or list.
        share: whether to share the memory where that is safe.

    Returns:
        ``tf.SparseTensor``.

    Raises:
        ValueError: for shapes that do not fit.

    Example:
        >>> triple_to_tensorflow(torch.tensor([[0, 2]]), torch.tensor([5.0]), [2, 3]).dense_shape.numpy().tolist()
        [2, 3]
    """
    tf = tensorflow()
    dense_shape = torch.as_tensor(dense_shape, dtype=torch.int64)
    if indices.dim() != 2 or values.dim() != 1 or indices.shape != (values.shape[0], dense_shape.numel()):
        raise ValueError(
            "indices, values and dense_shape must have shapes [N, R], [N] and [R], got "
            f"{list(indices.shape)}, {list(values.shape)} and {list(dense_shape.shape)}"
        )
    return tf.SparseTensor(
        tensor_to_tensorflow(indices.to(torch.int64), share=share),
        tensor_to_tensorflow(values, share=share),
        tensor_to_tensorflow(dense_shape, share=share),
    )


def _check_coo(tensor: Tensor) -> None:
    if tensor.layout != torch.sparse_coo:
        raise TypeError(f"tensor must be sparse COO, got layout {tensor.layout}: call to_sparse() first")


# ---- tf.IndexedSlices -----------------------------------------------------------------------------------------------


def indexed_slices_to_torch(slices: Any, *, share: bool = False) -> Tensor:
    """
    Return a torch sparse gradient with the rows of a ``tf.IndexedSlices``, in order; duplicates are kept.

    Args:
        slices: ``tf.IndexedSlices`` with a ``dense_shape``.
        share: whether to share TensorFlow's memory instead of copying it (int32 indices are copied: torch has int64
            ones).

    Returns:
        A sparse COO tensor with one sparse dimension, not marked as coalesced.

    Raises:
        ValueError: without ``dense_shape``, or for an index outside of it.

    Example:
        >>> import tensorflow as tf
        >>> slices = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([3, 3]), tf.constant([4, 1]))
        >>> indexed_slices_to_torch(slices).to_dense().flatten()
        tensor([0., 0., 0., 2.])
    """
    if slices.dense_shape is None:
        raise ValueError("slices.dense_shape is None: torch needs the number of rows")
    shape = tensor_to_torch(slices.dense_shape).tolist()
    rows = tensor_to_torch(slices.indices, share=share).to(torch.int64)
    values = tensor_to_torch(slices.values, share=share)
    try:
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, check_invariants=True)
    except RuntimeError as error:
        raise ValueError(f"slices are not a valid gradient: {error}") from error


def indexed_slices_to_tensorflow(gradient: Tensor, *, share: bool = True) -> Any:
    """
    Return a ``tf.IndexedSlices`` with the rows of a torch sparse gradient, in order; duplicates are kept.

    Args:
        gradient: sparse COO with one sparse dimension, coalesced or not, as sparse embeddings give.
        share: whether to share the memory where that is safe.

    Returns:
        ``tf.IndexedSlices`` with int64 indices.

    Raises:
        TypeError: for another layout.
        ValueError: for more than one sparse dimension.

    Example:
        >>> gradient = torch.sparse_coo_tensor([[3, 3]], torch.ones(2, 1), (4, 1), check_invariants=True)
        >>> indexed_slices_to_tensorflow(gradient).indices.numpy().tolist()
        [3, 3]
    """
    _check_coo(gradient)
    if gradient.sparse_dim() != 1:
        raise ValueError(f"gradient must have one sparse dimension, got {gradient.sparse_dim()}")
    return tensorflow().IndexedSlices(
        tensor_to_tensorflow(gradient._values(), share=share),
        tensor_to_tensorflow(gradient._indices()[0], share=share),
        tensor_to_tensorflow(torch.tensor(gradient.shape, dtype=torch.int64), share=share),
    )


# ---- tf.RaggedTensor ------------------------------------------------------------------------------------------------


def ragged_tensor_to_torch(ragged: Any, *, share: bool = False) -> tuple[Tensor, Tensor]:
    """
    Return the ``(values, offsets)`` of a ``tf.RaggedTensor`` with one ragged dimension.

    Args:
        ragged: ``tf.RaggedTensor`` of ragged rank 1 with S rows.
        share: whether to share TensorFlow's memory instead of copying it.

    Returns:
        ``values`` ``[N, ...]`` and ``offsets`` ``[S + 1]``, in the dtype of ``ragged.row_splits``.

    Raises:
        ValueError: for more ragged dimensions.
        TypeError: for strings.

    Example:
        >>> import tensorflow as tf
        >>> ragged_tensor_to_torch(tf.ragged.constant([[1, 2], [], [3]]))
        (tensor([1, 2, 3], dtype=torch.int32), tensor([0, 2, 2, 3]))
    """
    if ragged.ragged_rank != 1:
        raise ValueError(
            f"ragged must have one ragged dimension, got {ragged.ragged_rank}: join them with merge_dims first"
        )
    return tensor_to_torch(ragged.values, share=share), tensor_to_torch(ragged.row_splits, share=share)


def ragged_tensor_to_tensorflow(values: Tensor, offsets: Tensor, *, share: bool = True) -> Any:
    """
    Return a ``tf.RaggedTensor`` of ``(values, offsets)``.

    Args:
        values: ``[N, ...]``.
        offsets: ``[S + 1]``, int32 or int64, from 0 to N, not decreasing.
        share: whether to share the memory where that is safe.

    Returns:
        ``tf.RaggedTensor`` with S rows.

    Raises:
        ValueError: for offsets that are not such a sequence.

    Example:
        >>> ragged_tensor_to_tensorflow(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3])).to_list()
        [[1, 2], [], [3]]
    """
    if offsets.dim() != 1 or offsets.shape[0] == 0 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "offsets must be a vector of int32 or int64 with one element more than there are rows, got "
            f"{offsets.dtype} of shape {list(offsets.shape)}"
        )
    if values.dim() == 0:
        raise ValueError("values must have rank >= 1, got a scalar")
    if offsets[0] != 0 or offsets[-1] != values.shape[0] or bool((offsets.diff() < 0).any()):
        raise ValueError(f"offsets must rise from 0 to the number of values, {values.shape[0]}")
    return tensorflow().RaggedTensor.from_row_splits(
        tensor_to_tensorflow(values, share=share), tensor_to_tensorflow(offsets, share=share), validate=False
    )


def ragged_tensor_to_nested(ragged: Any, *, share: bool = False) -> Tensor:
    """
    Return a ``torch.nested`` tensor of jagged layout with the rows of a ``tf.RaggedTensor``.

    The arguments and errors are as in :func:`ragged_tensor_to_torch`: one dimension is ragged.

    Example:
        >>> import tensorflow as tf
        >>> [row.tolist() for row in ragged_tensor_to_nested(tf.ragged.constant([[1, 2], [], [3]])).unbind()]
        [[1, 2], [], [3]]
    """
    values, offsets = ragged_tensor_to_torch(ragged, share=share)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def nested_to_tensorflow(nested: Tensor, *, share: bool = True) -> Any:
    """
    Return a ``tf.RaggedTensor`` with the rows of a ``torch.nested`` tensor of jagged layout.

    Args:
        nested: jagged layout, ragged in dimension 1; with holes between its rows it is copied.
        share: whether to share the memory where that is safe.

    Returns:
        ``tf.RaggedTensor`` of ragged rank 1.

    Raises:
        TypeError: for another layout.
        ValueError: if another dimension than 1 is the ragged one.

    Example:
        >>> nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
        >>> nested_to_tensorflow(nested).to_list()
        [[1, 2], [3]]
    """
    if nested.layout != torch.jagged:
        raise TypeError(f"nested must have the layout torch.jagged, got {nested.layout}")
    jagged: Any = nested.detach()
    if jagged._ragged_idx != 1:
        raise ValueError(f"nested must be ragged in dimension 1, got {jagged._ragged_idx}: transpose it back first")
    values, offsets, lengths = jagged.values(), jagged.offsets(), jagged.lengths()
    if lengths is None:
        # Values may lie before the first row and after the last.
        values, offsets = values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]
    else:
        starts = offsets[:-1] if offsets.shape[0] == lengths.shape[0] + 1 else offsets
        values = torch.cat(
            [values[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
            or [values[:0]]
        )
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(offsets.dtype)
    return ragged_tensor_to_tensorflow(values, offsets, share=share)
