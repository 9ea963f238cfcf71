"""The ids of a lookup, before they are sent: some features of them in another order, and what must hold of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..nn.plan import Ids, counts_of

__all__ = ["bad_id", "check_ids", "check_keys", "reordered", "taken", "without"]


def check_ids(ids: Ids, places: Sequence[int], features: Sequence[str]) -> None:
    """
    Raise ``ValueError`` for offsets or weights with which no lookup can be made.

    Args:
        ids: the ids of all features.
        places: the places among them of the features that are looked up.
        features: the names of these.
    """
    if ids.offsets is not None:
        total = sum(ids.bags)
        if ids.offsets.numel() != total + 1:
            raise ValueError(f"offsets must have {total + 1} elements, one more than bags, got {ids.offsets.numel()}")
        decreases = ids.offsets[1:] < ids.offsets[:-1]
        if bool(decreases.any()):
            bag = int(decreases.nonzero()[0])
            names = dict(zip(places, features, strict=True))
            raise ValueError(
                f"{_place(ids, names, bag)}: offsets must not decrease, got {ids.offsets[bag + 1].item()} after "
                f"{ids.offsets[bag].item()}"
            )
        first, last = int(ids.offsets[0]), int(ids.offsets[-1])
        if first != 0 or last != ids.indices.numel():
            raise ValueError(
                f"offsets must go from 0 to {ids.indices.numel()}, the number of ids, got {first} to {last}"
            )
    weights = ids.per_sample_weights
    if weights is not None:
        if weights.numel() != ids.indices.numel():
            raise ValueError(f"weights must be one for each of {ids.indices.numel()} ids, got {weights.numel()}")
        if bool(weights.isnan().any()):
            raise ValueError(f"weights[{int(weights.isnan().nonzero()[0])}] must be a number, got nan")


def check_keys(ids: Ids, features: Mapping[int, str]) -> None:
    """
    Raise ``ValueError`` for a key that a table of int32 keys cannot have.

    Args:
        ids: the ids of all features.
        features: the features that are looked up in such tables, by their places among all, and their names.
    """
    if not features or ids.indices.dtype == torch.int32:
        return
    its = ids.indices.split(counts_of(ids))
    for place, name in features.items():
        wrong = (its[place] != its[place].int()).nonzero()
        if wrong.numel():
            at = int(wrong[0])
            raise ValueError(f"feature {name!r}: key {at} must be of the key_dtype, int32, got {int(its[place][at])}")


def _place(ids: Ids, features: Mapping[int, str], bag: int) -> str:
    for key, (end, bags) in enumerate(zip(accumulate(ids.bags), ids.bags, strict=True)):
        if bag < end:
            return f"feature {features.get(key, '')!r}: bag {bag - end + bags}"
    return f"bag {bag}"


def bad_id(feature: str, ids: Tensor, rows: int) -> IndexError | None:
    """Return the error for a feature's first id outside ``[0, rows)``, or None."""
    bad = ((ids < 0) | (ids >= rows)).nonzero()
    if bad.numel() == 0:
        return None
    at = int(bad[0])
    return IndexError(f"feature {feature!r}: id {at} must be in [0, {rows}), got {int(ids[at])}")


def reordered(x: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Cut a vector into parts of these sizes, and join them in another order."""
    if list(order) == list(range(len(sizes))):
        return x
    parts = x.split(list(sizes))
    return torch.cat([parts[k] for k in order])


def taken(ids: Ids, keys: Sequence[int]) -> Ids:
    """Return the ids of some features, in this order; one may be there several times."""
    if list(keys) == list(range(len(ids.bags))):
        return ids
    counts, offsets = counts_of(ids), ids.offsets
    if offsets is not None:
        lengths = reordered(offsets.diff(), ids.bags, keys)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    weights = ids.per_sample_weights
    return Ids(
        reordered(ids.indices, counts, keys),
        offsets,
        None if weights is None else reordered(weights, counts, keys),
        [ids.bags[key] for key in keys],
        ids.side_by_side,
    )


def without(ids: Ids, padding: Sequence[int]) -> Ids:
    """Return bags without the ids that do not count: ``padding`` has one of each feature, or -1."""
    if ids.offsets is None or all(each < 0 for each in padding):
        return ids
    counts = counts_of(ids)
    of_each = torch.tensor(padding, device=ids.indices.device).repeat_interleave(
        torch.tensor(counts, device=ids.indices.device), output_size=sum(counts)
    )
    kept = ids.indices != of_each
    before = torch.cat([ids.offsets.new_zeros(1), kept.cumsum(0)])
    weights = ids.per_sample_weights
    return ids._replace(
        indices=ids.indices[kept],
        offsets=before[ids.offsets],
        per_sample_weights=None if weights is None else weights[kept],
    )
