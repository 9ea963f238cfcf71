"""Keras's layers that hash: :class:`Hashing` and :class:`HashedCrossing`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ...typing import Encoding
from ..tensorflow import RaggedTensor, SparseTensor
from ..tensorflow.arguments import holds_integers
from ..tensorflow.tensors import as_values
from .arguments import checked_salt
from .encode import ENCODINGS, as_inputs, encode, mapped_values
from .layer import Encoder


class Hashing(Encoder):
    """
    Hash categories to bins.

    Integers are hashed as their decimal text, floats are truncated to integers first, booleans are hashed as ``true``
    and ``false``, strings as their UTF-8.

    Args:
        num_bins: the number of bins, the bin of ``mask_value`` included.
        mask_value: the value whose bin is 0; then all others have bins from 1 on (unless there is only one bin). It is
            compared with inputs before floats are truncated, and must be of their kind.
        salt: an integer, or two: the key of a SipHash (one integer stands for two). None: FarmHash, without a key.
        output_mode: the form of the output. ``"int"``: the bins; ``"one_hot"``: a vector of ``num_bins`` for each
            input, with a 1 at its bin. ``"multi_hot"``, ``"count"``: such a vector for each row of inputs, with ones or
            with the numbers of inputs.
        sparse: whether the vectors are given as a ``SparseTensor``.
        name: the layer's name.
        dtype: the dtype of the result; default: int64, for vectors torch's default dtype.
        trainable: an argument that is ignored.

    Shapes:
        A tensor, numpy array or nested list of any shape. ``"int"`` keeps it; ``"one_hot"`` appends ``num_bins`` to it,
        after dropping a last dimension of 1; ``"multi_hot"`` and ``"count"`` replace dimension 1, or a vector's
        dimension. A ``SparseTensor`` of rank 1 or 2 (not for ``"one_hot"``) or a ``RaggedTensor`` of two dimensions
        likewise.

    Raises:
        ValueError, TypeError: for arguments or inputs that Keras refuses too.

    Source: ``keras.layers.Hashing``.

    Example:
        >>> Hashing(num_bins=3)([["A"], ["B"], ["C"], ["D"], ["E"]]).flatten()
        tensor([1, 0, 1, 1, 2])
    """

    _fields = ("name", "dtype", "num_bins", "output_mode", "sparse", "trainable", "salt", "mask_value")

    def __init__(
        self,
        num_bins: int,
        mask_value: Any = None,
        salt: Any = None,
        output_mode: Encoding | Literal["int"] = "int",
        sparse: bool = False,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = True,
    ) -> None:
        if not isinstance(num_bins, int) or num_bins < 1:
            raise ValueError(f"num_bins must be an integer of at least 1, got {num_bins!r}")
        default = torch.int64 if output_mode == "int" else None
        super().__init__(output_mode, ("int", *ENCODINGS), sparse, name or "hashing", dtype, default)
        if output_mode == "int" and self.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"dtype must be int32 or int64 for output_mode 'int', got {self.dtype}")
        self._refuse_sparse_places()
        self.num_bins, self.mask_value, self.salt = num_bins, mask_value, checked_salt(salt)

    def forward(self, inputs: Any) -> Any:
        """Return the bins of the inputs, or their encoding."""
        bins = mapped_values(as_inputs(inputs), self._bins)
        if self.output_mode == "int":
            return mapped_values(bins, lambda values: values.to(self.dtype))
        if self.output_mode == "one_hot" and isinstance(bins, Tensor):
            if bins.dim() == 0:
                raise ValueError("inputs must have at least 1 dimension for output_mode 'one_hot', got a scalar")
            bins = bins.squeeze(-1)
        return encode(bins, self.output_mode, self.num_bins, self.dtype, self.sparse)

    def _bins(self, values: Tensor | np.ndarray) -> Tensor:
        """Return the bins of values of any kind, int64, in the shape of the values."""
        masked = None
        count = self.num_bins
        if self.mask_value is not None and count > 1:
            masked = _equal(values, self.mask_value)
            count -= 1
        if isinstance(values, Tensor) and values.is_floating_point():
            values = values.to(torch.int64)
        if isinstance(values, Tensor) and values.dtype == torch.bool:
            words = self._hashed(np.array([b"false", b"true"], dtype=object), count).to(values.device)
            bins = words[values.long()]
        else:
            bins = self._hashed(values, count)
        return bins if masked is None else torch.where(masked.to(bins.device), 0, bins + 1)

    def _hashed(self, values: Tensor | np.ndarray, count: int) -> Tensor:
        if self.salt is None:
            return ops.to_hash_bucket_fast(values, count)
        return ops.to_hash_bucket_strong(values, count, self.salt)


def _equal(values: Tensor | np.ndarray, mask_value: Any) -> Tensor:
    """Say of each value whether it is the mask value, which TensorFlow must be able to convert to the values' dtype."""
    if isinstance(values, np.ndarray):
        if not isinstance(mask_value, (str, bytes)):
            raise TypeError(f"mask_value must be a string like the inputs, got {mask_value!r}")
        wanted = mask_value.encode() if isinstance(mask_value, str) else mask_value
        same = [value == wanted for value in values.reshape(-1).tolist()]
        return torch.tensor(same, dtype=torch.bool).reshape(values.shape)
    boolean = isinstance(mask_value, (bool, np.bool_))
    number = isinstance(mask_value, (int, np.integer))
    floating = number or isinstance(mask_value, (float, np.floating))
    fits = boolean if values.dtype == torch.bool else floating if values.is_floating_point() else number
    if not fits:
        raise TypeError(f"mask_value must be of the dtype of the inputs, {values.dtype}, got {mask_value!r}")
    if values.dtype != torch.bool and not values.is_floating_point():
        mask_value = _wrapped(int(mask_value), torch.iinfo(values.dtype))
    return values == torch.tensor(mask_value, dtype=values.dtype, device=values.device)


def _wrapped(number: int, limits: torch.iinfo) -> int:
    """Wrap the mask value into a narrow dtype: TensorFlow drops the upper bits that the dtype cannot hold."""
    if not -(2**63) <= number <= max(limits.max, 2**63 - 1):
        raise ValueError(f"mask_value must be an integer of 64 bits, got {number}")
    return (number - limits.min) % (limits.max - limits.min + 1) + limits.min


class HashedCrossing(Encoder):
    """
    Cross features: hash each combination of their values to a bin.

    Integers are crossed by value, not as their text, strings as their FarmHash.

    Args:
        num_bins: the number of bins; 0: as many as there are integers below 2 ** 63 - 1.
        output_mode: ``"int"``: the bins; ``"one_hot"``: vectors of ``num_bins`` with a 1 at the bin.
        sparse: whether vectors are given as a ``SparseTensor``.
        name: the layer's name.
        dtype: the dtype of the result; default: int64, for vectors torch's default dtype.

    Shapes:
        A list or tuple of at least two features of integers or strings, all scalars, of shape ``[B]`` or ``[B, 1]``.
        ``"int"`` keeps the shape; ``"one_hot"`` gives ``[B, num_bins]``.

    Raises:
        ValueError: for arguments or inputs that Keras refuses too.

    Source: ``keras.layers.HashedCrossing``.

    Example:
        >>> HashedCrossing(num_bins=5)((["A", "B", "A", "B", "A"], [101, 101, 101, 102, 102]))
        tensor([1, 4, 1, 1, 3])
    """

    _fields = ("name", "dtype", "num_bins", "output_mode", "sparse")

    def __init__(
        self,
        num_bins: int,
        output_mode: Literal["int", "one_hot"] = "int",
        sparse: bool = False,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        if not isinstance(num_bins, int) or num_bins < 0:
            raise ValueError(f"num_bins must be an integer that is not negative, got {num_bins!r}")
        default = torch.int64 if output_mode == "int" else None
        super().__init__(output_mode, ("int", "one_hot"), sparse, name or "hashedcrossing", dtype, default)
        self.num_bins = num_bins

    def forward(self, inputs: Any) -> Any:
        """Return the bins of the crosses, or their encoding."""
        if not isinstance(inputs, (list, tuple)) or len(inputs) < 2:
            raise ValueError(f"inputs must be a list or tuple of at least two features, got {inputs!r}")
        features = [_feature(position, feature) for position, feature in enumerate(inputs)]
        shape = tuple(features[0].shape)
        if len(shape) > 2 or shape[1:] not in ((), (1,)):
            raise ValueError(f"inputs must have the shape [], [B] or [B, 1], got {list(shape)}")
        for position, feature in enumerate(features):
            if tuple(feature.shape) != shape:
                raise ValueError(
                    f"inputs must have equal shapes, got {list(shape)} and, in position {position}, "
                    f"{list(feature.shape)}"
                )
        device = next((feature.device for feature in features if isinstance(feature, Tensor)), None)
        values = [x.reshape(-1) if isinstance(x, Tensor) else ops.fingerprint64(x.reshape(-1)) for x in features]
        crosses, _ = ops.cross_hashed([x.to(device) for x in values], self.num_bins)
        bins = crosses.reshape(shape)
        if self.output_mode == "int":
            return bins.to(self.dtype)
        return encode(bins, self.output_mode, self.num_bins, self.dtype, self.sparse)


def _feature(position: int, feature: Any) -> Tensor | np.ndarray:
    if isinstance(feature, (SparseTensor, RaggedTensor)):
        raise ValueError(f"inputs[{position}] must be dense, got a {type(feature).__name__}")
    values = as_values(f"inputs[{position}]", feature)
    if isinstance(values, Tensor) and not holds_integers(values):
        raise ValueError(f"inputs[{position}] must hold integers or strings, got {values.dtype}")
    return values
