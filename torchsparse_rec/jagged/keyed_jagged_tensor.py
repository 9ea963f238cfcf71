"""``KeyedJaggedTensor``: rows of different lengths of several features."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..ops.jagged import lengths_to_offsets, offsets_to_row_ids
from ._keyed_rows import InverseIndices, KeyedRows
from ._node import register
from .checks import as_no_rows, check_keyed_rows, check_keys, check_per_key, check_sizes, lengths_beside
from .jagged_tensor import JaggedTensor


@register
class KeyedJaggedTensor(KeyedRows):
    """
    The ids of a batch by feature: each feature has one row of any length per example. Optionally weighted.

    Rows lie feature after feature: with F features and a batch of B examples, row ``f * B + b`` holds the ids of
    feature ``f`` in example ``b``. Features may have batches of different sizes. Names and argument order are
    TorchRec's. A pytree node: it can be an argument and a result of compiled and exported functions. Under
    ``torch.compile`` and ``torch.export`` nothing is checked. ``str()`` is TorchRec's; where there are many values, or
    they are not on the CPU, it shows shapes, as ``repr()``.

    Methods that need the start of one feature's values wait for a CUDA device: :meth:`length_per_key`,
    :meth:`offset_per_key`, ``x[key]``, :meth:`to_dict`, :meth:`split` and :meth:`permute` to fewer features. The first
    of them reads it back, and the object keeps it. It is known beforehand where there is one feature, after
    :meth:`sync` on the CPU and :meth:`to`, and from :meth:`from_jt_dict`. Nothing else waits.

    Args:
        keys: F distinct strings, the features' names.
        values: ``[N]``, any dtype: the ids, row after row.
        weights: ``[N]``, any dtype: one for each id. Default: none.
        lengths: ``[S]``, int32 or int64: the number of ids in each row; they add up to N. S is ``F * B``, or the sum of
            the features' own batch sizes.
        offsets: ``[S + 1]``, int32 or int64: where each row begins, and the end. Lengths or offsets must be given. Both
            are compared on the CPU; on CUDA the offsets count. That they fit N values is not checked here: on CUDA it
            would wait for the device. The operators check it. Without values, tensors without elements mean no rows,
            whatever their dtype.
        stride: the batch size B. Default: from the number of rows.
        stride_per_key_per_rank: the batch sizes of each feature on each process of a distributed program, for features
            with batches of different sizes: a feature's batch size is their sum. Lists, or a tensor on the CPU.
        stride_per_key: the batch size of each feature: ``[2, 3]`` for two features with batches of 2 and 3 examples.
        length_per_key: the number of ids of each feature, if known: nothing then waits for the device. Compared on the
            CPU; on CUDA it is believed.
        offset_per_key: the sums of ``length_per_key``, compared on the CPU; not used otherwise.
        lengths_offset_per_key, index_per_key, jt_dict: TorchRec's caches, for its argument order; not used.
        inverse_indices: keys and a tensor with the row of each example of the full batch, for features whose equal rows
            were merged. Carried along, not used.

    Raises:
        TypeError: keys that are no strings; another argument that is no tensor.
        ValueError: keys that are not distinct; neither lengths nor offsets; a number of rows that does not fit the keys
            and strides. Also arguments that contradict each other, and wrong dtypes, ranks, sizes or devices.

    Source: ``torchrec.sparse.jagged_tensor.KeyedJaggedTensor``.

    Example:
        >>> ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
        >>> x = KeyedJaggedTensor(["user", "item"], ids, lengths=torch.tensor([2, 0, 1, 1, 1, 3]))
        >>> x
        KeyedJaggedTensor({'user': [[3, 1], [], [4]], 'item': [[1], [5], [9, 2, 6]]})
        >>> x.stride(), x.offset_per_key()
        (3, [0, 3, 8])
        >>> x["item"]
        JaggedTensor([[1], [5], [9, 2, 6]])
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> None:
        strides = stride_per_key_per_rank
        if isinstance(strides, Tensor):
            strides = strides.tolist()
        elif strides is None and stride_per_key is not None:
            strides = [[size] for size in stride_per_key]
        if not torch.compiler.is_compiling():
            lengths, offsets = as_no_rows(values, lengths, offsets)
            check_keyed_rows(keys, values, weights, lengths, offsets)
            check_sizes(keys, values, lengths, offsets, stride, strides, stride_per_key, length_per_key)
            if lengths is not None and offsets is not None:
                lengths = lengths_beside("KeyedJaggedTensor", lengths, offsets)
        self._set_rows(values, weights, lengths, offsets)
        self._keys = tuple(keys)
        self._stride = None if self._keys else stride or 0
        self._strides = None if strides is None else tuple(map(tuple, strides))
        self._length_per_key = None if length_per_key is None else list(length_per_key)
        if (length_per_key is not None or offset_per_key is not None) and not torch.compiler.is_compiling():
            check_per_key(lengths, offsets, self.stride_per_key(), length_per_key, offset_per_key)
        self._inverse_keys, self._inverse = None, None
        if inverse_indices is not None:
            self._inverse_keys, self._inverse = tuple(inverse_indices[0]), inverse_indices[1]

    # ---- From other forms -------------------------------------------------------------------------------------------

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """Make a ``KeyedJaggedTensor`` from lengths, and :meth:`sync` it; see the class for the arguments."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """Make a ``KeyedJaggedTensor`` from offsets, and :meth:`sync` it; see the class for the arguments."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """
        Make a ``KeyedJaggedTensor`` of one ``JaggedTensor`` for each feature.

        Args:
            jt_dict: the features by name, at least one; all weighted, or none. Dtypes that differ are promoted as by
                :func:`torch.cat`.

        Raises:
            ValueError: no feature; weights of some only.

        Features of different batch sizes are kept as such. Nothing waits for the device.

        Example:
            >>> one = JaggedTensor(torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
            >>> two = JaggedTensor(torch.tensor([1, 5]), lengths=torch.tensor([0, 2]))
            >>> KeyedJaggedTensor.from_jt_dict({"user": one, "item": two})
            KeyedJaggedTensor({'user': [[3, 1], [4]], 'item': [[], [1, 5]]})
        """
        if not jt_dict:
            raise ValueError("KeyedJaggedTensor.from_jt_dict: jt_dict must have at least one feature, got none")
        return KeyedJaggedTensor.concat(
            [
                KeyedJaggedTensor([key], x.values(), x.weights_or_none(), x.lengths_or_none(), x.offsets_or_none())
                for key, x in jt_dict.items()
            ]
        )

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """
        Join the features of several ``KeyedJaggedTensor`` in one.

        Args:
            kjt_list: the objects, at least one; no key twice; all weighted, or none. Dtypes that differ are promoted as
                by :func:`torch.cat`.

        Raises:
            ValueError: no object; a key twice; weights of some only.

        Objects of different batch sizes give one whose features have different batch sizes. Inverse indices are
        dropped. Nothing waits for the device.
        """
        owner = "KeyedJaggedTensor.concat"
        if len(kjt_list) == 0:
            raise ValueError(f"{owner}: kjt_list must have at least one element, got none")
        weighted = [x._weights is not None for x in kjt_list]
        if any(weighted) and not all(weighted):
            raise ValueError(
                f"{owner}: kjt_list must be all weighted or all unweighted, got one with weights at "
                f"{weighted.index(True)} and one without at {weighted.index(False)}"
            )
        keys = check_keys(owner, [key for x in kjt_list for key in x._keys])
        strides = [s for x in kjt_list for s in x.stride_per_key()]
        varies = any(x._strides is not None for x in kjt_list) or any(s != strides[0] for s in strides)
        known = [x._known_length_per_key() for x in kjt_list]
        return KeyedJaggedTensor(
            keys,
            torch.cat([x._values for x in kjt_list]),
            torch.cat([x.weights() for x in kjt_list]) if any(weighted) else None,
            lengths=torch.cat([x.lengths() for x in kjt_list]),
            stride=None if keys else kjt_list[0].stride(),
            stride_per_key_per_rank=[s for x in kjt_list for s in x.stride_per_key_per_rank()] if varies else None,
            length_per_key=None if any(x is None for x in known) else [n for x in known if x is not None for n in x],
        )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """
        Make a ``KeyedJaggedTensor`` without features.

        Args:
            is_weighted: whether the object has weights, which are empty too. Default False.
            device: the device of its tensors. Default: torch's default device.
            values_dtype: the dtype of the values. Default: torch's default dtype.
            weights_dtype: the dtype of the weights. Default: torch's default dtype.
            lengths_dtype: int32 (default) or int64.
        """
        rows = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        return KeyedJaggedTensor([], rows._values, rows._weights, lengths=rows._lengths, stride=0)

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Make an object without features, of the dtypes, device and batch size of ``kjt``; weighted if that is."""
        weights = None if kjt._weights is None else kjt._weights.new_empty(0)
        return KeyedJaggedTensor(
            [], kjt._values.new_empty(0), weights, lengths=kjt.lengths().new_empty(0), stride=kjt.stride()
        )

    # ---- Features ---------------------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature's rows, as views; raise ``KeyError`` if there is no such key. May wait for a device."""
        if key not in self._keys:
            raise KeyError(f"KeyedJaggedTensor: no key {key!r}, only {list(self._keys)}")
        index = self._keys.index(key)
        return self.split([index, 1, len(self._keys) - index - 1])[1]._rows()

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return the rows of every feature by its key, as views. May wait for a device."""
        return {part._keys[0]: part._rows() for part in self.split([1] * len(self._keys))}

    def _rows(self) -> JaggedTensor:
        """Return the rows of all features as one ``JaggedTensor``."""
        return JaggedTensor._build(self._tensors(), ())

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """
        Split the features into several objects, each of some consecutive features.

        Args:
            segments: the number of features of each result; they add up to F.

        Returns:
            Objects whose tensors are views. Inverse indices are dropped. It may wait for a CUDA device, but not if one
            segment has all the features.

        Raises:
            ValueError: segments that do not add up to F.
        """
        count = len(self._keys)
        if any(size < 0 for size in segments) or sum(segments) != count:
            raise ValueError(
                f"KeyedJaggedTensor.split: segments must add up to the number of keys, {count}, got {list(segments)}"
            )
        ends = list(accumulate(segments))
        features = [slice(end - size, end) for end, size in zip(ends, segments, strict=True)]
        if count in segments:
            known, items = self._known_length_per_key(), [self._values.shape[0] if size else 0 for size in segments]
        else:
            known = self.length_per_key()
            items = [sum(known[x]) for x in features]
        strides = self.stride_per_key()
        lengths = self.lengths().split([sum(strides[x]) for x in features])
        values = self._values.split(items)
        weights = [None] * len(items) if self._weights is None else self._weights.split(items)
        return [
            self._made(x, values[i], weights[i], lengths[i], None if known is None else known[x])
            for i, x in enumerate(features)
        ]

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """
        Return an object of some of the features, in a given order.

        Args:
            indices: the places of the result's features among the keys, in order; distinct.
            indices_tensor: TorchRec's copy of them on the device, for its argument order; not used.

        Returns:
            An object with its own values. Differentiable in weights. Inverse indices are dropped. With fewer features
            than there are it may wait for a CUDA device; with all of them it does not.

        Raises:
            IndexError: an index outside ``[0, F)``.
            ValueError: an index twice.

        Example:
            >>> x = KeyedJaggedTensor(["a", "b"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 0, 0, 1]))
            >>> x.permute([1, 0])
            KeyedJaggedTensor({'b': [[], [4]], 'a': [[3, 1], []]})
        """
        indices = list(indices)
        count = len(self._keys)
        seen = set()
        for place, i in enumerate(indices):
            if not 0 <= i < count:
                raise IndexError(f"KeyedJaggedTensor.permute: indices must be in [0, {count}), got {i} at {place}")
            if i in seen:
                raise ValueError(f"KeyedJaggedTensor.permute: indices must be distinct, got {i} twice, last at {place}")
            seen.add(i)
        if not indices:
            return KeyedJaggedTensor.empty_like(self)
        rows = self.lengths().split(self.stride_per_key())
        lengths = torch.cat([rows[i] for i in indices])
        known = self._known_length_per_key()
        waits = self._values.device.type != "cpu" or torch.compiler.is_compiling()
        if known is None and waits and len(indices) == count:
            places = self._places(indices)
            values = self._values.index_select(0, places)
            weights = None if self._weights is None else self._weights.index_select(0, places)
        else:
            known = self.length_per_key()
            values = _reordered(self._values, known, indices)
            weights = None if self._weights is None else _reordered(self._weights, known, indices)
            known = [known[i] for i in indices]
        return self._made(indices, values, weights, lengths, known)

    def _places(self, indices: list[int]) -> Tensor:
        """Return the place that each value comes from when all features are reordered, without waiting for a device."""
        # Views of single elements, not an index tensor: copying one to the device would wait for it.
        offsets = self.offsets()
        bounds = [offsets[row] for row in self.lengths_offset_per_key()]
        starts = torch.stack([bounds[i] for i in indices]).long()
        ends = torch.stack([bounds[i + 1] for i in indices]).long()
        items = self._values.shape[0]
        moved = lengths_to_offsets(ends - starts)
        feature = offsets_to_row_ids(moved, items)
        return torch.arange(items, device=offsets.device) + (starts - moved[:-1]).index_select(0, feature)

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Return the object itself: here lengths always are a vector. The name is TorchRec's."""
        return self

    # ---- Devices ----------------------------------------------------------------------------------------------------

    def to(
        self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """
        Copy the tensors to a device, as :meth:`torch.Tensor.to`. The numbers that :meth:`sync` found stay known.

        Args:
            device: the device to which the tensors go.
            non_blocking: whether not to wait for copies from pinned memory. Default False.
            dtype: the new dtype of the weights, if there are any. Default: theirs.
        """
        moved = super().to(device, non_blocking)
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved


def _reordered(x: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """Cut ``x`` into parts of these sizes, and join them in another order."""
    parts = x.split(sizes)
    return torch.cat([parts[i] for i in order])
