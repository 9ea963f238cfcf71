"""Conversions of dense tensors to and from TensorFlow; the first two functions are public in converters.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .installed import tensorflow

# TensorFlow's kernels check this alignment of every operand, and end the process where it is missing.
_ALIGNMENT = 64
# The dtypes that torch and TensorFlow have under one name.
_DTYPES = {
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def tensor_to_tensorflow(tensor: Tensor, *, share: bool = True) -> Any:
    """
    Return a ``tf.Tensor`` with the elements of a strided torch tensor.

    Args:
        tensor: a tensor of any shape, of every dtype both libraries have, also bool and bfloat16, on any device.
        share: whether to share the memory where that is safe.

    Returns:
        ``tf.Tensor``, same shape and dtype.

    Raises:
        TypeError: for a sparse or nested tensor, or a dtype TensorFlow does not have.

    Example:
        >>> tensor_to_tensorflow(torch.tensor([1, 2])).numpy().tolist()
        [1, 2]
    """
    if tensor.layout != torch.strided:
        raise TypeError(f"tensor must be strided, got layout {tensor.layout}: use the converter of its kind")
    tf = tensorflow()
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"TensorFlow has no dtype for {tensor.dtype}: convert the tensor first")
    if share and _can_be_shared(tensor):
        return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))
    if tensor.dtype == torch.bfloat16:
        return tf.constant(tensor.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype))
    return tf.constant(tensor.numpy())


def tensor_to_torch(tensor: Any, *, share: bool = False) -> Tensor:
    """
    Return a torch tensor with the elements of a ``tf.Tensor`` or ``tf.Variable``.

    Args:
        tensor: a tensor of any shape, of every dtype both libraries have.
        share: whether to share TensorFlow's memory instead of copying it.

    Returns:
        A strided tensor on the CPU, same shape and dtype.

    Raises:
        TypeError: for strings, or another dtype torch does not have.

    Example:
        >>> import tensorflow as tf
        >>> tensor_to_torch(tf.constant([True, False]))
        tensor([ True, False])
    """
    tf = tensorflow()
    tensor = tf.convert_to_tensor(tensor)
    check_dtype(tensor.dtype)
    with tf.device("CPU"):
        shared = torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tf.identity(tensor)))
    return shared if share else shared.clone()


def _can_be_shared(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def check_dtype(dtype: Any) -> None:
    """Refuse a dtype of TensorFlow's that torch does not have: on sharing strings TensorFlow would end the process."""
    if dtype.name == "string":
        raise TypeError(
            "torch has no strings: hash them to ids first, with tf.strings.to_hash_bucket_fast or, on the numpy array "
            "of tensor.numpy(), torchsparse_rec.ops.to_hash_bucket_fast"
        )
    if getattr(torch, dtype.name, None) not in _DTYPES:
        raise TypeError(f"torch has no dtype for TensorFlow's {dtype.name}: tf.cast the tensor first")
