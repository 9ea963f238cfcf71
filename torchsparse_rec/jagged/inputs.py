"""
Conversion of the ids of several features, in all the forms that users hold, to a ``KeyedJaggedTensor``.

The library's modules take their inputs through it. :func:`as_keyed_jagged_tensor` lists the forms; other libraries'
objects are recognised by their methods, so that none of these libraries is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .._foreign import beside_nan, columns_by_name, is_array, is_arrow, own_array, rows_of_arrow, tensor_of_numpy
from .._torch import is_watched
from ..ops.jagged import lengths_to_offsets, nested_to_jagged, sparse_to_jagged
from ..ops.sparse_tensor import sparse_reorder
from .checks import WAY_OF_STRINGS, as_ids, check_contents, check_rows, checked_integers, not_a_tensor, type_name
from .jagged_tensor import JaggedTensor
from .keyed_jagged_tensor import KeyedJaggedTensor

_RowsT = TypeVar("_RowsT", JaggedTensor, KeyedJaggedTensor)
_FORMS = (
    "a JaggedTensor, a tensor of rank 1 (one id per example) or 2 (ids of each example), torch.nested jagged, a sparse "
    "COO or CSR tensor, (values, offsets), (values, offsets, weights), (indices, values, dense_shape), a SparseTensor "
    "or a RaggedTensor, or an array of numpy, pyarrow or another library"
)


def as_keyed_jagged_tensor(features: Any, keys: Sequence[str] | None = None, owner: str = "input") -> KeyedJaggedTensor:
    """
    Convert the ids of several features to a ``KeyedJaggedTensor``.

    Args:
        features: a :class:`KeyedJaggedTensor`; TorchRec's; a frame, or a batch of Arrow's; or a mapping from names to
            features, each of them one of

            * a :class:`JaggedTensor`, or TorchRec's;
            * a tensor ``[B]``: one id per example;
            * a tensor ``[B, L]``: L ids per example, all kept: no id means padding;
            * a ``torch.nested`` tensor with the layout ``torch.jagged``, of rank 2;
            * a sparse COO tensor ``[B, L]``, whose entries are ids: entries in row-major order, none added up; or CSR;
            * a pair ``(values [N], offsets [B + 1])``, or with weights ``(values, offsets, weights [N])``. Offsets end
              with N, as ``torch.nn.EmbeddingBag`` has them with ``include_last_offset=True``;
            * TensorFlow's ``(indices [N, 2], values [N], dense_shape)``, sorted by row, or such a SparseTensor of
              :mod:`torchsparse_rec.compat.tensorflow`; its RaggedTensor of rank 2; or TensorFlow's own ones;
            * a numpy or pyarrow array, or what has ``__arrow_c_array__``, ``__arrow_c_stream__`` or ``__array__``: one
              id per example, or with fixed-size lists or two dimensions L. Lists of Arrow are rows. A null is no id.

            If some features have weights and others none, the others get weights of 1. Dtypes of ids that differ are
            promoted as by :func:`torch.cat`. Batch sizes may differ.
        keys: the features wanted, in order; others are dropped. Default: all, in their order.
        owner: the beginning of errors: the module and its argument.

    Returns:
        A :class:`KeyedJaggedTensor`; the given one itself, if its keys are those wanted, and its ids int32 or int64.
        Other integers become these.

    Raises:
        TypeError: a feature in none of these forms, or of other values than integers in an array.
        ValueError: a feature that is missing; shapes that no form has; an array that its library does not hand over;
            an id of uint64 from 2^63 on.

    On CUDA it waits for the device only to drop features of a KeyedJaggedTensor, to read a ``dense_shape`` that is on
    the device, and for ids of uint64.
    """
    if isinstance(features, KeyedJaggedTensor):
        return _of_ids(_chosen(features, keys, owner), owner)
    if not isinstance(features, Mapping):
        if _has(features, "keys", "values", "lengths", "weights_or_none", "stride_per_key_per_rank"):
            return _of_ids(_chosen(_of_torchrec(features), keys, owner), owner)
        columns = columns_by_name(features, owner)
        if columns is None:
            is_one = isinstance(features, JaggedTensor)
            way = "KeyedJaggedTensor.from_jt_dict({name: it})" if is_one else "{name: ids}"
            raise TypeError(
                f"{owner}: features must be a KeyedJaggedTensor or a mapping from names to features, got "
                f"{type_name(features)}: give {way}, by the names of the features"
            )
        features = columns
    wanted = list(features) if keys is None else list(keys)
    check_present(wanted, features, owner)
    rows = {key: _of_ids(_as_jagged(features[key], f"{owner}[{key!r}]"), f"{owner}[{key!r}]") for key in wanted}
    weighted = next((x.weights() for x in rows.values() if x.weights_or_none() is not None), None)
    if weighted is not None:
        rows = {key: _with_weights(x, weighted.dtype) for key, x in rows.items()}
    try:
        return KeyedJaggedTensor.from_jt_dict(rows)
    except ValueError:
        for key, x in rows.items():
            if x.values().device.type == "cpu" and not is_watched():
                check_contents(f"{owner}[{key!r}]", x)
        raise


def _has(x: Any, *methods: str) -> bool:
    return all(hasattr(x, method) for method in methods)


def check_present(wanted: Sequence[str], present: Any, owner: str) -> None:
    """Raise ``ValueError`` unless every feature is among those present."""
    for i, key in enumerate(wanted):
        if key not in present:
            names = f"{list(present)!r:.300}"
            raise ValueError(f"{owner}: features must have every key, got none named {key!r} (key {i}) among {names}")


def _chosen(x: KeyedJaggedTensor, keys: Sequence[str] | None, owner: str) -> KeyedJaggedTensor:
    if keys is None or list(keys) == x.keys():
        return x
    places = x.index_per_key()
    check_present(keys, places, owner)
    return x.permute([places[key] for key in keys])


def _of_ids(x: _RowsT, owner: str) -> _RowsT:
    """Return rows whose ids are int32 or int64: the given ones if they are."""
    given = x.values()
    if given.dtype == torch.uint64 and isinstance(x, KeyedJaggedTensor) and not torch.compiler.is_compiling():
        for key, rows in x.to_dict().items():  # for an error that names the feature
            as_ids(f"{owner}[{key!r}]", rows.values())
    ids = checked_integers(f"{owner}: values" if isinstance(x, KeyedJaggedTensor) else owner, given)
    return x if ids is given else x._map(lambda part: ids if part is given else part)


def _of_torchrec(x: Any) -> KeyedJaggedTensor:
    inverse = x.inverse_indices_or_none() if _has(x, "inverse_indices_or_none") else None
    known = x.length_per_key_or_none() if _has(x, "length_per_key_or_none") else None
    return KeyedJaggedTensor(
        list(x.keys()),
        x.values(),
        x.weights_or_none(),
        # TorchRec's empty objects have offsets without any element; their lengths are always whole.
        lengths=x.lengths().reshape(-1),
        stride_per_key_per_rank=x.stride_per_key_per_rank() if x.variable_stride_per_key() else None,
        length_per_key=known,
        inverse_indices=inverse,
    )


def _with_weights(x: JaggedTensor, dtype: torch.dtype) -> JaggedTensor:
    if x.weights_or_none() is not None:
        return x
    ones = torch.ones(x.values().shape[0], dtype=dtype, device=x.device())
    return JaggedTensor(x.values(), ones, x.lengths_or_none(), x.offsets_or_none())


def _rows(
    owner: str, values: Tensor, weights: Tensor | None, lengths: Tensor | None = None, offsets: Tensor | None = None
) -> JaggedTensor:
    """Make a ``JaggedTensor`` of ids; errors begin with the feature, and values of rank above 1 are refused."""
    if not torch.compiler.is_compiling():
        check_rows(owner, values, weights, lengths, offsets)
        if values.dim() != 1:
            raise ValueError(f"{owner}: ids must have rank 1, got values of shape {list(values.shape)}")
    return JaggedTensor(values, weights, lengths, offsets)


def _as_jagged(x: Any, owner: str) -> JaggedTensor:
    """Convert one feature, in any of the forms, to a ``JaggedTensor``."""
    if isinstance(x, JaggedTensor):
        return _rows(owner, x.values(), x.weights_or_none(), x.lengths_or_none(), x.offsets_or_none())
    if isinstance(x, Tensor):
        return _of_tensor(x, owner)
    if _has(x, "values", "lengths", "weights_or_none") and not _has(x, "keys"):
        return _rows(owner, x.values(), x.weights_or_none(), lengths=x.lengths().reshape(-1))
    if _has(x, "indices", "values", "dense_shape") and is_array(x.values):
        return _of_sparse(_tensor(x.indices, owner), _tensor(x.values, owner), _tensor(x.dense_shape, owner), owner)
    if _has(x, "values", "row_splits") and is_array(x.values):
        return _of_offsets(_tensor(x.values, owner), _tensor(x.row_splits, owner), owner=owner)
    if isinstance(x, tuple) and len(x) in (2, 3) and all(map(is_array, x[:2])):
        parts = [_tensor(part, owner) if is_array(part) else part for part in x]
        if len(x) == 3 and parts[0].dim() == 2:
            return _of_sparse(parts[0], parts[1], parts[2], owner)
        return _of_offsets(*parts, owner=owner)
    if is_array(x):
        return _of_array(own_array(x, owner, owner), owner)
    found = f"a tuple of {len(x)}" if isinstance(x, tuple) else not_a_tensor(x)
    raise TypeError(f"{owner}: must be {_FORMS}; got {found}")


def _tensor(x: Any, owner: str) -> Any:
    """Return a part of a feature, such as its values or offsets, as a tensor; a shape may be a tuple."""
    if isinstance(x, Tensor) or not is_array(x):
        return x
    own = own_array(x, owner, owner)
    if is_arrow(own):
        own = own.to_numpy(zero_copy_only=False)
    if own.dtype.kind not in "iuf":
        raise TypeError(f"{owner}: must be {_FORMS}, of numbers; got {type_name(x)} of {own.dtype}")
    return tensor_of_numpy(own)


def _of_array(x: Any, owner: str) -> JaggedTensor:
    """Convert a numpy or pyarrow array of integers; nulls, and what a mask covers, are no ids."""
    if is_arrow(x):
        values, count, width, offsets, valid = rows_of_arrow(x, owner)
        if valid is not None and not bool(valid.any()):  # then the type says nothing
            values = torch.zeros(len(valid), dtype=torch.int64)
    else:
        masked = np.ma.getmaskarray(x) if isinstance(x, np.ma.MaskedArray) else None
        data = np.asarray(x.data if masked is not None else x)
        if data.ndim not in (1, 2):
            raise ValueError(f"{owner}: an array of ids must have shape [B] or [B, L], got {list(data.shape)}")
        values = tensor_of_numpy(data).reshape(-1) if data.dtype.kind in "iu" else data  # type: ignore[assignment]
        valid = None if masked is None else torch.from_numpy(~masked).reshape(-1)
        count, width, offsets = data.shape[0], data.size // max(len(data), 1), None
    kind = values.dtype if isinstance(values, (Tensor, np.ndarray)) else "strings"
    if not isinstance(values, Tensor) or values.dtype == torch.bool or values.is_floating_point():
        is_text = kind == "strings" or getattr(kind, "kind", " ") in "SUO"
        way = f": {WAY_OF_STRINGS}" if is_text else beside_nan(values)
        raise TypeError(f"{owner}: must hold integers, the ids, got {kind}{way}")
    if offsets is None:
        assert width is not None
        offsets = torch.arange(count + 1) * width
    if valid is not None:
        values, offsets = values[valid], lengths_to_offsets(valid.to(torch.int64))[offsets]
    return _rows(owner, values, None, offsets=offsets)


def _of_tensor(x: Tensor, owner: str) -> JaggedTensor:
    if x.is_nested:
        values, offsets = nested_to_jagged(x)
        return _rows(owner, values, None, offsets=offsets)
    if x.dim() not in (1, 2) or (x.dim() == 1 and x.layout != torch.strided):
        raise ValueError(f"{owner}: a tensor of ids must have shape [B] or [B, L], got {list(x.shape)}")
    if x.layout == torch.sparse_csr:
        return _rows(owner, x.values(), None, offsets=x.crow_indices())
    if x.layout == torch.sparse_coo:
        # Not coalesce(), which would add ids up.
        indices, values = x._indices().T, x._values()
        if not x.is_coalesced():
            indices, values = sparse_reorder(indices.contiguous(), values)
        return _of_sparse(indices, values, x.shape, owner)
    if x.layout != torch.strided:
        raise ValueError(f"{owner}: a sparse tensor of ids must be COO or CSR, got {x.layout}")
    width = 1 if x.dim() == 1 else x.shape[1]
    lengths = torch.full((x.shape[0],), width, dtype=torch.int64, device=x.device)
    return JaggedTensor(x.reshape(-1), lengths=lengths)


def _of_sparse(indices: Tensor, values: Tensor, dense_shape: Any, owner: str) -> JaggedTensor:
    shape = dense_shape.tolist() if isinstance(dense_shape, Tensor) else list(dense_shape)
    if indices.dim() != 2 or indices.shape[1] != 2 or len(shape) != 2 or values.dim() != 1:
        raise ValueError(
            f"{owner}: (indices, values, dense_shape) must be [N, 2], [N] and of two sizes, got shapes "
            f"{list(indices.shape)} and {list(values.shape)} and dense_shape {shape}"
        )
    values, offsets = sparse_to_jagged(indices, values, shape[0])
    return JaggedTensor(values, offsets=offsets)


def _of_offsets(values: Tensor, offsets: Tensor, weights: Any = None, *, owner: str) -> JaggedTensor:
    made = _rows(owner, values, weights, offsets=offsets)
    # EmbeddingBag's offsets without the last would lose the last bag. On CUDA looking would wait for the device.
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != values.shape[0]:
            raise ValueError(
                f"{owner}: offsets must go from 0 to the number of values, {values.shape[0]}, got {first} and {last}"
            )
        if offsets.shape[0] > 1 and int(offsets.diff().min()) < 0:
            check_contents(owner, made)
    return made
