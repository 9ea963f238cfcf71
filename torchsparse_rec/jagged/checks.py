"""Checks of arguments. Tensors' contents are checked on the CPU only: on CUDA it would wait for the device."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._torch import is_watched

_INTEGERS = (torch.int32, torch.int64)
# What holds the ids of tensors whose dtype no table looks up.
_HOLDING = {
    **dict.fromkeys((torch.int8, torch.int16, torch.uint8, torch.uint16), torch.int32),
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


def type_name(x: Any) -> str:
    """Name the type of ``x`` for errors; for a ``torch.fx.Proxy``, a tensor's place in tracing, also the remedy."""
    if isinstance(x, torch.fx.Proxy):
        return (
            "a torch.fx.Proxy: use torch.export, or a torch.fx.Tracer whose is_leaf_module is true for modules of "
            "torchsparse_rec.nn"
        )
    return type(x).__name__


def not_a_tensor(x: Any) -> str:
    """Name the type of what is given in place of a tensor of ids, for errors, and what makes or takes such ids."""
    if isinstance(x, torch.fx.Proxy):
        return type_name(x)
    is_jagged = callable(getattr(x, "values", None))
    if is_jagged and hasattr(x, "keys"):
        way = "a collection such as nn.EmbeddingBagCollection takes the ids of several features"
    elif is_jagged and hasattr(x, "offsets"):
        way = "give its values(), and its offsets() to a bag with include_last_offset=True, or name it in a collection"
    elif _holds_strings(x):
        way = WAY_OF_STRINGS
    elif isinstance(x, (list, tuple)):
        sizes = {len(row) if isinstance(row, (list, tuple)) else -1 for row in x}
        rows = "torch.nested.nested_tensor(..., layout=torch.jagged)" if len(sizes) > 1 else "torch.tensor(...)"
        way = f"{rows} makes a tensor of it"
    elif hasattr(x, "__array__"):
        array = "..." if isinstance(x, np.ndarray) else "numpy.asarray(...)"
        way = f"torch.from_numpy({array}) makes a tensor of it"
    else:
        return type_name(x)
    return f"{type(x).__name__}: {way}"


WAY_OF_STRINGS = "ops.to_hash_bucket_fast(strings, num_buckets) makes ids of strings"


def _holds_strings(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return x.dtype.kind in "SUOT"
    while isinstance(x, (list, tuple)) and x:
        x = x[0]
    return isinstance(x, (str, bytes))


def as_ids(owner: str, ids: Tensor) -> Tensor:
    """
    Return ids of other integers as int32 or int64, which tables look up; tensors of any other dtype unchanged.

    Args:
        owner: the beginning of errors: what the ids are.
        ids: the ids, in any shape. The device is waited for only if they are uint64.

    Raises:
        ValueError: an id of uint64 that int64 does not have. In a graph, uint64 stays what it is.
    """
    dtype = _HOLDING.get(ids.dtype)
    if dtype is None or (ids.dtype == torch.uint64 and torch.compiler.is_compiling()):
        return ids
    made = ids.to(dtype)
    if ids.dtype == torch.uint64:
        flat = made.values() if made.is_nested else made
        large = (flat < 0).nonzero()
        if len(large):
            place = large[0].tolist()
            raise ValueError(
                f"{owner}: ids must be below 2**63, got {int(flat[tuple(place)]) + 2**64} at "
                f"{place[0] if len(place) == 1 else place}: view(torch.int64) gives ids of the same bits"
            )
    return made


def checked_integers(owner: str, ids: Tensor) -> Tensor:
    """Return ids as :func:`as_ids` does; raise ``ValueError`` if they are no integers."""
    ids = as_ids(owner, ids)
    if ids.dtype not in _INTEGERS:
        raise ValueError(f"{owner} must be int32 or int64, got {ids.dtype}")
    return ids


def check_tensor(owner: str, argument: str, x: Any) -> None:
    """Raise ``TypeError`` unless ``x`` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{owner}: {argument} must be a tensor, got {not_a_tensor(x)}")


def place_of(x: Any, row: int) -> tuple[int, int]:
    """Return the number of the key, and that of the example, to which a row of a ``KeyedJaggedTensor`` belongs."""
    firsts = x.lengths_offset_per_key()
    key = max(k for k, first in enumerate(firsts[:-1]) if first <= row)
    return key, row - firsts[key]


def check_contents(owner: str, x: Any) -> None:
    """
    Raise ``ValueError`` unless the lengths or offsets that jagged rows were made with can be those of rows.

    Operators check the same, but know offsets alone: after their errors, this one says what was given. It waits for a
    device.
    """

    def place(row: int) -> str:
        if not hasattr(x, "stride_per_key"):
            return f"example {row}"
        key, example = place_of(x, row)
        return f"feature {x.keys()[key]!r}, example {example}"

    count, lengths, offsets = x.values().shape[0], x._lengths, x._offsets
    bad = (x.lengths() < 0).nonzero()[:1].flatten().tolist()
    if offsets is not None:
        last = offsets.shape[0] - 1
        if int(offsets[0]) != 0:
            raise ValueError(f"{owner}: offsets[0] must be 0, got {int(offsets[0])}")
        for row in bad:
            raise ValueError(
                f"{owner}: offsets must not decrease, got {int(offsets[row])} followed by {int(offsets[row + 1])} at "
                f"position {row + 1}, the end of {place(row)}"
            )
        if int(offsets[last]) != count:
            raise ValueError(
                f"{owner}: offsets[{last}], the last, must be the number of values, {count}, got {int(offsets[last])}"
            )
        return
    for row in bad:
        raise ValueError(f"{owner}: lengths[{row}] must not be negative, got {int(lengths[row])} for {place(row)}")
    if int(lengths.sum()) != count:
        sums = ""
        if hasattr(x, "stride_per_key"):
            of_key = [int(part.sum()) for part in lengths.split(x.stride_per_key())]
            sums = f": {repr(dict(zip(x.keys(), of_key, strict=True))):.300}"
        raise ValueError(
            f"{owner}: lengths must add up to the number of values, {count}, got {int(lengths.sum())}{sums}"
        )


def as_no_rows(values: Any, lengths: Any, offsets: Any) -> tuple[Any, Any]:
    """
    Return lengths and offsets; where there are no values, tensors without elements, of any dtype, become no rows.

    TorchRec writes no rows so: ``torch.tensor([])``, which holds floats, for lengths, and offsets without their 0.
    """
    if isinstance(values, Tensor) and values.dim() and values.shape[0] == 0:
        if _has_no_elements(offsets) and (lengths is None or _has_no_elements(lengths)):
            lengths, offsets = offsets if lengths is None else lengths, None
        if _has_no_elements(lengths) and lengths.dtype not in _INTEGERS:
            lengths = lengths.to(torch.int32)
    return lengths, offsets


def _has_no_elements(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 1 and x.shape[0] == 0


def check_rows(owner: str, values: Any, weights: Any, lengths: Any, offsets: Any) -> None:
    """Raise unless the tensors have the shapes and dtypes of rows; their contents are not checked."""
    check_tensor(owner, "values", values)
    if values.dim() == 0:
        raise ValueError(f"{owner}: values must have rank >= 1, got a scalar")
    if weights is not None:
        check_tensor(owner, "weights", weights)
        if weights.dim() == 0 or weights.shape[0] != values.shape[0]:
            raise ValueError(
                f"{owner}: weights must have one element for each of the {values.shape[0]} values, got shape "
                f"{list(weights.shape)}"
            )
    if lengths is None and offsets is None:
        raise ValueError(f"{owner}: lengths or offsets must be given, got neither")
    for argument, x in (("lengths", lengths), ("offsets", offsets)):
        if x is None:
            continue
        check_tensor(owner, argument, x)
        if x.dim() != 1 or x.dtype not in _INTEGERS:
            raise ValueError(
                f"{owner}: {argument} must be a vector of int32 or int64, got {x.dtype} of shape {list(x.shape)}"
            )
    if offsets is not None and offsets.shape[0] == 0:
        raise ValueError(f"{owner}: offsets must have at least one element (no rows: one 0), got none")
    if lengths is not None and offsets is not None and offsets.shape[0] != lengths.shape[0] + 1:
        raise ValueError(
            f"{owner}: offsets must have one element more than lengths, {lengths.shape[0] + 1}, got {offsets.shape[0]}"
        )
    for argument, x in (("weights", weights), ("lengths", lengths), ("offsets", offsets)):
        if x is not None and x.device != values.device:
            raise ValueError(f"{owner}: {argument} must be on the device of values, {values.device}, got {x.device}")


def check_keys(owner: str, keys: Any) -> tuple[str, ...]:
    """Return the keys as a tuple; raise unless they are distinct strings."""
    if isinstance(keys, str):
        raise TypeError(f"{owner}: keys must be a list of strings, got the string {keys!r}")
    keys = tuple(keys)
    first: dict[str, int] = {}
    for i, key in enumerate(keys):
        if not isinstance(key, str):
            raise TypeError(f"{owner}: keys must be strings, got {key!r} at {i}")
        if key in first:
            raise ValueError(f"{owner}: keys must be distinct, got {key!r} at {first[key]} and at {i}")
        first[key] = i
    return keys


def check_keyed_rows(keys: Any, values: Any, weights: Any, lengths: Any, offsets: Any) -> None:
    """Raise unless the keys are distinct and the tensors have the shapes and dtypes of rows of ids."""
    owner = "KeyedJaggedTensor"
    check_keys(owner, keys)
    check_rows(owner, values, weights, lengths, offsets)
    for argument, x in (("values", values), ("weights", weights)):
        if x is not None and x.dim() != 1:
            raise ValueError(f"{owner}: {argument} must have rank 1, got shape {list(x.shape)}")


def check_sizes(
    keys: Any,
    values: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    stride: Any,
    strides: Any,
    stride_per_key: Any,
    length_per_key: Any,
) -> None:
    """Raise unless the numbers of rows and values fit the keys. ``strides`` are the batch sizes by key and rank."""
    owner, count = "KeyedJaggedTensor", len(keys)
    if lengths is not None:
        argument, rows = "lengths", lengths.shape[0]
    else:
        assert offsets is not None
        argument, rows = "offsets", offsets.shape[0] - 1
    if strides is not None:
        _check_strides(owner, count, stride, strides, stride_per_key, argument, rows)
    elif count == 0 and rows != 0:
        raise ValueError(f"{owner}: {argument} must have no rows when there are no keys, got {rows}")
    elif stride is not None and (stride < 0 or count * stride != rows):
        raise ValueError(
            f"{owner}: {argument} must have stride rows for each key, {count} * {stride}, got {rows} for keys "
            f"{list(keys)}"
        )
    elif count and rows % count:
        raise ValueError(
            f"{owner}: {argument} must have the same number of rows for each of the {count} keys {list(keys)}, got "
            f"{rows} rows; batches of different sizes need stride_per_key"
        )
    if length_per_key is not None and (
        len(length_per_key) != count or min(length_per_key, default=0) < 0 or sum(length_per_key) != values.shape[0]
    ):
        raise ValueError(
            f"{owner}: length_per_key must have {count} lengths that add up to the number of values, "
            f"{values.shape[0]}, got {list(length_per_key)}"
        )


def lengths_beside(owner: str, lengths: Tensor, offsets: Tensor) -> Tensor | None:
    """
    Return the lengths to keep beside offsets: none where a comparison would wait for a device.

    Raises:
        ValueError: the lengths do not fit the offsets.
    """
    if is_watched():
        return lengths
    if lengths.device.type != "cpu":
        return None
    differ = offsets.diff() != lengths
    if differ.any() or offsets[0] != 0:
        row = int(differ.long().argmax()) if len(differ) else 0
        raise ValueError(
            f"{owner}: lengths and offsets must say the same, got offsets {offsets[row : row + 2].tolist()} around row "
            f"{row} and lengths {lengths[row : row + 1].tolist()}: give one of them"
        )
    return lengths


def check_per_key(
    lengths: Tensor | None, offsets: Tensor | None, strides: list[int], length_per_key: Any, offset_per_key: Any
) -> None:
    """Raise unless ``length_per_key`` and ``offset_per_key`` fit the rows, where the check waits for no device."""
    rows = lengths if offsets is None else offsets
    assert rows is not None
    if rows.device.type != "cpu" or is_watched():
        return
    # A view at even distances, of batches that are alike, takes a third of the time of an index.
    size = strides[0] if strides and strides[0] and strides.count(strides[0]) == len(strides) else 0
    if offsets is not None:
        bounds = offsets[::size] if size else offsets[[0, *accumulate(strides)]]
        found = [end - begin for begin, end in pairwise(bounds.tolist())]
    else:
        found = rows.view(-1, size).sum(1).tolist() if size else [int(x.sum()) for x in rows.split(strides)]
    if length_per_key is not None and list(length_per_key) != found:
        raise ValueError(_PER_KEY.format("length_per_key", found, list(length_per_key)))
    if offset_per_key is not None and list(offset_per_key) != (wanted := [0, *accumulate(found)]):
        raise ValueError(_PER_KEY.format("offset_per_key", wanted, list(offset_per_key)))


_PER_KEY = "KeyedJaggedTensor: {} must be that of the keys' rows, {}, got {}"


def _check_strides(
    owner: str, count: int, stride: Any, strides: Any, stride_per_key: Any, argument: str, rows: int
) -> None:
    """Raise unless the batch sizes by key and rank add up to the number of rows."""
    if stride is not None:
        raise ValueError(
            f"{owner}: stride must not be given with stride_per_key or stride_per_key_per_rank, got {stride}"
        )
    if len(strides) != count:
        raise ValueError(f"{owner}: batch sizes must be given for each of the {count} keys, got {len(strides)}")
    for i, of_key in enumerate(strides):
        if isinstance(of_key, int) or any(size < 0 for size in of_key):
            raise ValueError(
                f"{owner}: stride_per_key_per_rank must have lists of sizes that are not negative, got {of_key} at {i}"
            )
    totals = [sum(of_key) for of_key in strides]
    if stride_per_key is not None and list(stride_per_key) != totals:
        raise ValueError(
            f"{owner}: stride_per_key must be the sums of stride_per_key_per_rank, {totals}, got {list(stride_per_key)}"
        )
    if sum(totals) != rows:
        raise ValueError(f"{owner}: batch sizes must add up to the rows of {argument}, {rows}, got {totals}")
