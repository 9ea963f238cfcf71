"""Ids of columns, and their assembly into a ``KeyedJaggedTensor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..jagged import KeyedJaggedTensor
from ..ops.jagged import lengths_to_offsets

#: The layout of one column's rows: a number of ids per example, or the offsets at which rows begin.
RowLayout = tuple[int | None, Tensor | None]


@dataclass
class ColumnIds:
    """Ids of one column, or of several joined in order, all with the same number of examples."""

    values: Tensor
    batch: int
    layouts: list[RowLayout]
    #: False where an id is missing. None: no id is missing.
    keep: Tensor | None = None
    weights: Tensor | None = None
    #: Whether negative ids are left out of lookups. Crosses keep them.
    prune: bool = False
    #: Whether the values may share the batch's memory.
    borrowed: bool = False
    #: The step of each id, if steps are skipped. None: ids follow one another.
    places: Tensor | None = None

    def lengths(self) -> Tensor:
        """Return the lengths of all rows, including ids that are not kept."""
        parts = [
            torch.full((self.batch,), width or 0, dtype=torch.int64, device=self.values.device)
            if offsets is None
            else offsets.diff()
            for width, offsets in self.layouts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def compact(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the values that are kept, the offsets of their rows, and their weights."""
        offsets = lengths_to_offsets(self.lengths())
        if self.keep is None:
            return self.values, offsets, self.weights
        return _kept(self.values, offsets, self.weights, self.keep)

    def row_ids(self) -> Tensor:
        """Return the row of each id, kept or not, int64."""
        width, offsets = self.layouts[0]
        count = self.values.shape[0]
        if offsets is None:
            rows = torch.arange(self.batch, device=self.values.device)
            return rows if width == 1 else rows.repeat_interleave(width or 0, output_size=count)
        return torch.repeat_interleave(offsets.diff(), output_size=count)


def in_places(ids: ColumnIds, filler: float | int, name: str, step: int = 1) -> ColumnIds:
    """
    Return sequences with each value at its place, and ``filler`` at places without a value.

    A row ends with its last value that is not missing; where a step has several values, with the end of that step.

    Raises:
        ValueError: for two values at one place; the error names the column.
    """
    if ids.keep is None and ids.places is None:
        return ids
    rows, places, values, lengths = ids.row_ids(), ids.places, ids.values, ids.lengths()
    if places is None:
        places = torch.arange(len(rows), device=rows.device) - lengths_to_offsets(lengths)[rows]
    if ids.keep is not None:
        rows, places, values = rows[ids.keep], places[ids.keep], values[ids.keep]
    ends = places.new_zeros(ids.batch).scatter_reduce_(0, rows, places + 1, "amax")
    if step > 1:
        whole = (ends + step - 1) // step * step
        ends = whole if ids.places is not None else torch.minimum(whole, lengths)
    offsets = lengths_to_offsets(ends)
    targets = offsets[rows] + places
    if ids.places is not None:
        _check_places(targets, rows, places, name)
    return ColumnIds(
        values.new_full((int(offsets[-1]),), filler).index_copy_(0, targets, values), ids.batch, [(None, offsets)]
    )


def _check_places(targets: Tensor, rows: Tensor, places: Tensor, name: str) -> None:
    counts = torch.bincount(targets)
    twice = (counts > 1).nonzero()
    if len(twice):
        first = int((targets == twice[0]).nonzero()[0])
        raise ValueError(
            f"column {name!r}: a step of a sequence must have at most one value, got {int(counts[twice[0]])} in step "
            f"{int(places[first])} of example {int(rows[first])}"
        )


def _kept(
    values: Tensor, offsets: Tensor, weights: Tensor | None, keep: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    offsets = _before(keep).index_select(0, offsets)
    if is_cheap_to_ask(values):
        # Not an index by a mask: this is several times as fast.
        its_weights = None if weights is None else torch.masked_select(weights, keep)
        return torch.masked_select(values, keep), offsets, its_weights
    places = keep.nonzero().squeeze(1)  # the only wait for the device
    return values[places], offsets, None if weights is None else weights[places]


def _before(keep: Tensor) -> Tensor:
    """Return how many values are kept before each place, and in total, int64 ``[N + 1]``."""
    found = torch.zeros(keep.shape[0] + 1, dtype=torch.int64, device=keep.device)
    torch.cumsum(keep, 0, out=found[1:])
    return found


def is_cheap_to_ask(x: Tensor) -> bool:
    """Say whether an answer from a tensor's elements costs less than to do without: not on CUDA, nor in a graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def has_negative(values: Tensor) -> bool:
    """Say whether a number is below 0; True where it is not :func:`is_cheap_to_ask`."""
    return not is_cheap_to_ask(values) or (values.numel() > 0 and bool(values.min() < 0))


class Assembler:
    """Makes the ``KeyedJaggedTensor`` of some features, and caches the offsets of rows of fixed lengths."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self._known: tuple[tuple, Tensor] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"keys": self.keys, "_known": None}

    def __call__(self, pieces: Sequence[ColumnIds], dropped: Sequence[Tensor | None]) -> KeyedJaggedTensor:
        """
        Return the ids of all features.

        Args:
            pieces: ids of the features, in the order of the keys.
            dropped: a mask for each piece of the further ids to drop (whose weights are not above 0), or None.
        """
        batch, device = pieces[0].batch, pieces[0].values.device
        masks = [_mask(piece, without) for piece, without in zip(pieces, dropped, strict=True)]
        layouts = [layout for x in pieces for layout in x.layouts]
        widths = tuple([width for width, offsets in layouts if offsets is None])
        if len(widths) < len(layouts):
            offsets = lengths_to_offsets(torch.cat([x.lengths() for x in pieces]))
        else:
            offsets = self._regular(batch, widths, device)  # type: ignore[arg-type]
        if any(mask is not None for mask in masks):
            values, offsets, weights = _compacted(pieces, masks, offsets)
            return KeyedJaggedTensor(self.keys, values, weights, offsets=offsets, stride=batch)
        alone = len(pieces) == 1 and not pieces[0].borrowed
        values = pieces[0].values if alone else torch.cat([x.values for x in pieces])
        weights = None
        if pieces[0].weights is not None:
            weights = torch.cat([x.weights for x in pieces if x.weights is not None])
        known = [batch * (width or 0) for width in widths] if len(widths) == len(layouts) else None
        return KeyedJaggedTensor(self.keys, values, weights, offsets=offsets, stride=batch, length_per_key=known)

    def _regular(self, batch: int, widths: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the offsets of rows of fixed lengths; the last ones are cached, since training batches are alike."""
        if torch.compiler.is_compiling():
            return _regular_offsets(batch, widths, device)
        wanted = (batch, widths, device)
        # Read once: other threads may replace the cached offsets meanwhile.
        known = self._known
        if known is None or known[0] != wanted:
            known = self._known = wanted, _regular_offsets(batch, widths, device)
        return known[1]


def _regular_offsets(batch: int, widths: tuple[int, ...], device: torch.device) -> Tensor:
    parts, start = [], 0
    for width in widths:
        row = torch.arange(batch, device=device) if width else torch.zeros(batch, dtype=torch.int64, device=device)
        parts.append(row * width + start if width > 1 else row + start)
        start += batch * width
    parts.append(torch.full((1,), start, dtype=torch.int64, device=device))
    return torch.cat(parts)


def _mask(piece: ColumnIds, without: Tensor | None) -> Tensor | None:
    """Return a mask of the ids of a piece that are kept; None if all are."""
    mask = piece.keep
    if piece.prune and has_negative(piece.values):
        mask = piece.values >= 0 if mask is None else mask & (piece.values >= 0)
    if without is not None:
        mask = ~without if mask is None else mask & ~without
    return mask


def _compacted(
    pieces: Sequence[ColumnIds], masks: Sequence[Tensor | None], offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the kept values of all pieces, the offsets of their rows, and their weights."""
    if not is_cheap_to_ask(offsets):
        given = [x.weights for x in pieces if x.weights is not None]
        all_masks = [
            torch.ones_like(x.values, dtype=torch.bool) if mask is None else mask
            for x, mask in zip(pieces, masks, strict=True)
        ]
        joined = torch.cat([x.values for x in pieces]), offsets, torch.cat(given) if given else None
        return _kept(*joined, torch.cat(all_masks))
    # On the CPU a check of each column is cheap, and few columns have missing values.
    values: list[Tensor] = []
    bounds: list[Tensor] = []
    weights: list[Tensor] = []
    row = begin = total = 0
    for piece, mask in zip(pieces, masks, strict=True):
        count, rows = piece.values.shape[0], piece.batch * len(piece.layouts)
        ends = [count]
        if mask is not None and count > 0:
            ends = (offsets[row : row + rows + 1 : piece.batch][1:] - begin).tolist()
        start = 0
        for end in ends:
            own, keep = offsets[row : row + rows // len(ends)], None if mask is None else mask[start:end]
            if keep is not None and _is_all(keep):
                keep = None
            kept = piece.values[start:end]
            kept_weights = None if piece.weights is None else piece.weights[start:end]
            shift = total - begin - start
            if keep is not None:
                kept, own, kept_weights = _kept(kept, own - (begin + start), kept_weights, keep)
                shift = total
            values.append(kept)
            bounds.append(own + shift)
            if kept_weights is not None:
                weights.append(kept_weights)
            row, start, total = row + rows // len(ends), end, total + kept.shape[0]
        begin += count
    bounds.append(torch.full((1,), total, dtype=torch.int64, device=offsets.device))
    return torch.cat(values), torch.cat(bounds), torch.cat(weights) if weights else None


def _is_all(mask: Tensor) -> bool:
    """Say whether a mask is true everywhere. The minimum of its bytes is many times as fast as ``all()``."""
    return mask.numel() == 0 or bool(mask.view(torch.uint8).min())
