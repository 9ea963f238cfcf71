"""The evaluation of columns on a batch: ids, or dense numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._foreign import beside_nan
from ..jagged import JaggedTensor
from ..jagged.checks import as_ids
from ..ops.hash_cross import DEFAULT_HASH_KEY
from ._base import CategoricalColumn
from ._categorical import (
    EmbeddingCategoricalColumn,
    HashedCategoricalColumn,
    IdentityCategoricalColumn,
    VocabularyColumn,
)
from ._composed import CrossedColumn, IndicatorColumn, SequenceCategoricalColumn, WeightedCategoricalColumn
from ._functions import is_own
from ._ids import ColumnIds, has_negative, in_places
from ._numeric import BucketizedColumn, NumericColumn, SequenceNumericColumn
from .inputs import RawBatch
from .raw import Raw, Strings
from .vocabulary import Vocabulary, hashed, oov_ids

#: The buckets of the hashes that are the keys of strings.
_MOST_KEYS = 2**63 - 1


class Evaluation:
    """One batch while columns transform it; results that several columns need are computed once."""

    def __init__(self, batch: RawBatch, lookups: dict[Any, torch.nn.Module], drop_missing: bool) -> None:
        self.batch, self._lookups, self.drops_missing = batch, lookups, drop_missing
        self._ids: dict[CategoricalColumn, ColumnIds] = {}

    # ---- Ids --------------------------------------------------------------------------------------------------------

    def ids(self, column: CategoricalColumn) -> ColumnIds:
        """Return the ids of a column: missing ones masked by ``keep``, negative ones unchanged."""
        found = self._ids.get(column)
        if found is None:
            found = self._ids[column] = self._made(column)
        return found

    def _made(self, column: CategoricalColumn) -> ColumnIds:
        if isinstance(column, SequenceCategoricalColumn):
            return self.ids(column.categorical_column)
        if isinstance(column, WeightedCategoricalColumn):
            return self._weighted(column)
        if isinstance(column, CrossedColumn):
            return self._crossed(column)
        if isinstance(column, BucketizedColumn):
            return self._bucketized(column)
        raw = self.raw_for(column)
        return ColumnIds(
            self.ids_of(column, raw.values),
            raw.batch,
            [(raw.width, raw.offsets)],
            self.present(raw, column),
            prune=prunes(column) and (self.drops_missing or isinstance(column, VocabularyColumn)),
            borrowed=isinstance(column, (IdentityCategoricalColumn, EmbeddingCategoricalColumn)),
            places=raw.places,
        )

    def steps(self, column: CategoricalColumn) -> ColumnIds:
        """
        Return the ids of a sequence, each at its step; ``num_buckets`` where a step's id is missing or negative.

        A column that is no sequence, but shares its table with one, has no steps: such ids are left out, as elsewhere.
        """
        ids, nothing = self.ids(column), column.num_buckets
        # An id of num_buckets is too large, and must stay so: it is no row of zeros.
        values = ids.values + (ids.values == nothing)
        if not isinstance(column, SequenceCategoricalColumn):
            return replace(ids, values=values, borrowed=False)
        if ids.prune and has_negative(values):
            values = torch.where(values < 0, nothing, values)
        return in_places(replace(ids, values=values, prune=False, borrowed=False), nothing, column.name)

    def raw_for(self, column: Any) -> Raw:
        """Return the raw feature of a column that reads one, and check its kind."""
        raw = self.batch.raw(column.key, column.name)
        wanted = "string" if getattr(column, "dtype", "int64") == "string" else "integer"
        raw = raw.of_strings() if wanted == "string" else raw
        if raw.kind == wanted:
            values = raw.values
            if isinstance(column, HashedCategoricalColumn) or isinstance(values, Strings):
                return raw
            if values.dtype == torch.uint64:
                ids = (values if values.is_meta else as_ids(f"column {column.name!r}", values)).to(torch.int64)
                # In a graph nothing is checked. There such an id is too large for every table; wrapped, it would be
                # negative, and left out.
                raw = replace(raw, values=torch.where(ids < 0, 2**63 - 1, ids))
            return raw
        if not raw.is_all_null():
            dtype = "" if isinstance(raw.values, Strings) else f", {raw.values.dtype}"
            way = beside_nan(raw.values) if raw.kind == "float" and wanted == "integer" else ""
            if isinstance(raw.values, Strings):
                others = "categorical_column_with_hash_bucket, or one with a vocabulary, takes strings"
                way = f": {others if isinstance(column, IdentityCategoricalColumn) else 'a dtype of string takes them'}"
            raise ValueError(f"column {column.name!r}: must hold {wanted}s, got {raw.kind}s{dtype}{way}")
        return raw.blank(wanted)

    def ids_of(self, column: Any, values: Tensor | Strings) -> Tensor:
        """Return the ids, int64, that an identity, hashed or vocabulary column gives to values."""
        if isinstance(column, HashedCategoricalColumn):
            return hashed(values, column.hash_bucket_size)
        if isinstance(column, EmbeddingCategoricalColumn):
            return hashed(values, _MOST_KEYS) if isinstance(values, Strings) else values.to(torch.int64)
        if isinstance(column, VocabularyColumn):
            lookup = self._lookups[column]
            assert isinstance(lookup, Vocabulary)
            return oov_ids(lookup(values), values, lookup.size, column.num_oov_buckets, column.default_value)
        assert isinstance(column, IdentityCategoricalColumn) and isinstance(values, Tensor)
        return with_default(column, values.to(torch.int64))

    def present(self, raw: Raw, column: Any) -> Tensor | None:
        """Return a mask of a column's values that are not missing; None: none is missing."""
        if not (self.drops_missing and column.drop_missing) or raw.width is None:
            return raw.valid
        if raw.valid is None and isinstance(raw.values, Tensor) and not _may_be_marked(raw.values):
            return None
        return raw.present()

    def _bucketized(self, column: BucketizedColumn) -> ColumnIds:
        buckets = self.buckets(column)
        count = column.source_column.shape[0]
        if count > 1:
            buckets = buckets + torch.arange(count, device=buckets.device) * column.depth
        return ColumnIds(buckets.reshape(-1), buckets.shape[0], [(count, None)])

    def _weighted(self, column: WeightedCategoricalColumn) -> ColumnIds:
        ids = self.ids(column.categorical_column)
        raw = self.batch.raw(column.weight_feature_key, column.name)
        if isinstance(raw.values, Strings) or raw.kind == "bool":
            if not raw.is_all_null():
                raise ValueError(f"column {column.name!r}: weights must be numbers, got {raw.kind}s")
            raw = raw.blank("integer")
        assert isinstance(raw.values, Tensor)
        weights = raw.values.to(torch.float64 if column.dtype == "float64" else torch.float32)
        if raw.valid is not None:
            weights = torch.where(raw.valid, weights, 0)
        if (raw.offsets is None) == (ids.layouts[0][1] is None) and _same_layout(ids, raw, column):
            return replace(ids, weights=weights)
        # Ids and weights have different forms: drop missing ids, and weights of 0, as TensorFlow does; then compare.
        values, offsets, _ = ids.compact()
        loose = ColumnIds(weights, raw.batch, [(raw.width, raw.offsets)], None if raw.width is None else weights != 0)
        weights, their_offsets, _ = loose.compact()
        if not torch.equal(offsets, their_offsets):
            _refuse_lengths(column, offsets.diff(), their_offsets.diff())
        return ColumnIds(values, ids.batch, [(None, offsets)], None, weights, ids.prune, ids.borrowed)

    def _crossed(self, column: CrossedColumn) -> ColumnIds:
        rows: list[Any] = []
        matrices: list[Any] = []
        for key in column.flat_keys():
            if isinstance(key, str):
                raw = self.batch.raw(key, column.name).of_strings()
                part = ColumnIds(_cross_values(raw, column), raw.batch, [(raw.width, raw.offsets)], raw.valid)
                target = rows if raw.width is None else matrices
            else:
                part, target = self.ids(key), rows
            width, offsets = part.layouts[0]
            if part.keep is None and offsets is None:
                target.append(part.values.reshape(part.batch, width or 0))
            else:
                target.append(part.compact()[:2])
        inputs = rows + matrices
        values, offsets = ops.cross_hashed(inputs, column.hash_bucket_size, column.hash_key or DEFAULT_HASH_KEY)
        if all(isinstance(x, Tensor) for x in inputs):
            width = 1
            for x in inputs:
                width *= x.shape[1]
            return ColumnIds(values, inputs[0].shape[0], [(width, None)])
        return ColumnIds(values, offsets.shape[0] - 1, [(None, offsets)])

    # ---- Dense numbers ----------------------------------------------------------------------------------------------

    def dense(self, column: Any) -> Tensor:
        """Return the dense numbers of a column, ``[B, width]`` float32."""
        if isinstance(column, NumericColumn):
            return self.numbers(column)
        if isinstance(column, BucketizedColumn):
            buckets = self.buckets(column)
            hot = torch.zeros(*buckets.shape, column.depth, dtype=torch.float32, device=buckets.device)
            return hot.scatter_(2, buckets.unsqueeze(2), 1.0).reshape(buckets.shape[0], column.width)
        assert isinstance(column, IndicatorColumn)
        return self._counts(column)

    def numbers(self, column: NumericColumn) -> Tensor:
        """Return the normalized numbers of a numeric column, ``[B, width]`` float32."""
        raw = self._number_raw(column)
        _check_width(raw, column)
        assert isinstance(raw.values, Tensor)
        x = raw.values.reshape(raw.batch, column.width)
        if raw.valid is not None:
            x = _filled(x, raw.valid.reshape(x.shape), column)
        if column.normalizer_fn is not None:
            x = _normalized(x.reshape(raw.batch, *column.shape), column).reshape(raw.batch, column.width)
        return x.to(torch.float32)

    def buckets(self, column: BucketizedColumn) -> Tensor:
        """Return the bucket of each number, ``[B, elements]`` int64."""
        return torch.bucketize(self.numbers(column.source_column), self._lookups[column].boundaries, right=True)  # type: ignore[arg-type]

    def dense_steps(self, column: SequenceNumericColumn | IndicatorColumn) -> JaggedTensor:
        """Return the numbers, or the counts of ids, of each step of a sequence."""
        if isinstance(column, IndicatorColumn):
            values, offsets, _ = self.steps(column.categorical_column).compact()
            each = torch.arange(column.width, device=values.device)
            return JaggedTensor((values.unsqueeze(1) == each).to(torch.float32), offsets=offsets)
        raw = self._number_raw(column)
        assert isinstance(raw.values, Tensor)
        given = raw.values
        places = raw.places
        if places is None and raw.sparse and column.width > 1:
            assert raw.offsets is not None
            places = torch.arange(len(given), device=given.device)
            places = places - raw.offsets[ops.offsets_to_row_ids(raw.offsets)]
        if not given.is_floating_point() and (raw.valid is not None or places is not None):
            given = given.to(torch.float32)  # which can hold the default
        steps = ColumnIds(given, raw.batch, [(raw.width, raw.offsets)], raw.valid, places=places)
        values, offsets, _ = in_places(steps, column.default_value, column.name, column.width).compact()
        lengths = offsets.diff()
        if column.width > 1:
            wrong = lengths % column.width != 0
            if not torch.compiler.is_compiling() and bool(wrong.any()):
                row = int(wrong.nonzero()[0])
                raise ValueError(
                    f"column {column.name!r}: rows must have a multiple of {column.width} numbers, got "
                    f"{int(lengths[row])} in example {row}"
                )
            lengths = lengths // column.width
        values = values.reshape(values.shape[0] // column.width, *column.shape)
        if column.normalizer_fn is not None:
            values = _normalized(values, column)
        # A copy: the numbers may share the batch's memory.
        return JaggedTensor(values.to(torch.float32, copy=True), lengths=lengths)

    def _number_raw(self, column: Any) -> Raw:
        raw = self.batch.raw(column.key, column.name, shaped=isinstance(column, NumericColumn))
        if isinstance(raw.values, Strings):
            if not raw.is_all_null():
                way = "cast them, or make it a categorical column"
                raise ValueError(f"column {column.name!r}: must hold numbers, got strings: {way}")
            raw = raw.blank("integer")
        return raw

    def _counts(self, column: IndicatorColumn) -> Tensor:
        ids, width = self.ids(column.categorical_column), column.width
        counted = (ids.values >= 0) & (ids.values < width)
        if ids.keep is not None:
            counted = counted & ids.keep
        places = torch.where(counted, ids.row_ids() * width + ids.values, ids.batch * width)
        weights = torch.ones_like(ids.values, dtype=torch.float32) if ids.weights is None else ids.weights
        # One more place, for ids that do not count. Sums are in the order of the ids, on every device.
        sums = ops.unsorted_segment_sum(weights.to(torch.float32), places, ids.batch * width + 1)
        return sums[:-1].reshape(ids.batch, width)


def with_default(column: Any, ids: Tensor) -> Tensor:
    """Replace ids by an identity column's default where it applies; return other columns' ids unchanged."""
    if not isinstance(column, IdentityCategoricalColumn) or column.default_value is None:
        return ids
    return torch.where((ids < 0) | (ids >= column.number_buckets), column.default_value, ids)


def prunes(column: CategoricalColumn) -> bool:
    """Say whether a column's ids may be negative; tables have no rows for these."""
    if isinstance(column, IdentityCategoricalColumn):
        return column.default_value is None
    if isinstance(column, VocabularyColumn):
        return column.num_oov_buckets == 0 and column.default_value < 0
    if isinstance(column, (SequenceCategoricalColumn, WeightedCategoricalColumn)):
        return prunes(column.categorical_column)
    return False


def _may_be_marked(values: Tensor) -> bool:
    """Say whether values are integers among which -1 may mark missing ones."""
    return values.dtype.is_signed and not values.is_floating_point() and has_negative(values)


def _same_layout(ids: ColumnIds, raw: Raw, column: WeightedCategoricalColumn) -> bool:
    """Say whether ids and weights have the same layout, so that they belong together place by place."""
    width, offsets = ids.layouts[0]
    if offsets is None:
        return width == raw.width
    assert raw.offsets is not None
    if ids.keep is None and not torch.equal(offsets, raw.offsets):
        _refuse_lengths(column, offsets.diff(), raw.offsets.diff())
    return torch.equal(offsets, raw.offsets)


def _refuse_lengths(column: WeightedCategoricalColumn, lengths: Tensor, others: Tensor) -> None:
    row = int((lengths != others).nonzero()[0])
    raise ValueError(
        f"column {column.name!r}: there must be a weight for each id, got {int(lengths[row])} ids and "
        f"{int(others[row])} weights in example {row}"
    )


def _cross_values(raw: Raw, column: CrossedColumn) -> Tensor:
    """Return the int64 values that a cross hashes: strings' fingerprints, integers unchanged."""
    if isinstance(raw.values, Strings):
        return ops.string_fingerprint64(*raw.values)
    if raw.kind == "float" and not raw.is_all_null():
        raise ValueError(f"column {column.name!r}: {raw.name!r} must hold strings or integers, got floats")
    return raw.values.to(torch.int64)


def _normalized(x: Tensor, column: Any) -> Tensor:
    """Apply a column's normalizer, which must keep the number of elements. A user's own gets a copy to write to."""
    made = column.normalizer_fn(x if is_own(column.normalizer_fn) else x.clone())
    if made.numel() != x.numel():
        raise ValueError(f"column {column.name!r}: normalizer_fn must keep the shape, got {list(made.shape)}")
    return made


def _check_width(raw: Raw, column: NumericColumn) -> None:
    """Raise ``ValueError`` unless every example has ``column.width`` numbers, in the column's shape."""
    given = f"{raw.width}"
    if raw.places is not None:
        given = "a sparse tensor with holes"
    elif raw.offsets is not None:
        lengths = raw.offsets.diff()
        if raw.count() == raw.batch * column.width and bool((lengths == column.width).all()):
            return
        wrong = (lengths != column.width).nonzero()
        given = f"{raw.count()} for {raw.batch} examples"
        if len(wrong):
            given = f"{int(lengths[wrong[0]])} in example {int(wrong[0])}"
    elif raw.shape is not None and len(raw.shape) > 1:
        if raw.shape == column.shape:
            return
        given = f"numbers of shape {list(raw.shape)}"
    elif raw.width == column.width or raw.batch == 0 and not raw.shape:
        return
    raise ValueError(f"column {column.name!r}: must hold {column.width} numbers per example, got {given}")


def _filled(x: Tensor, valid: Tensor, column: NumericColumn) -> Tensor:
    if column.default_value is None:
        if bool(valid.all()):
            return x
        example = int((~valid).nonzero()[0, 0])
        raise ValueError(
            f"column {column.name!r}: a number is missing in example {example}, and the column has no default_value"
        )
    default = torch.tensor(column.default_value, device=x.device).reshape(1, -1)
    if default.is_floating_point() and not x.is_floating_point():
        x = x.to(torch.float32)
    return torch.where(valid, x, default.to(x.dtype))
