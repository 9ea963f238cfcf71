"""Modules whose tables have rows of fewer bytes, for inference: what :func:`quantize` makes of the others."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .._reduction import POOLING
from ..checkpoint.loaded import problem_of_keys
from ..ops.embedding import lookup_bags, padding_number
from ..ops.quantized import ROW_FORMATS, dim_of, packed_rows, refuse_gradient
from ..typing import GradMode
from ..variable.arguments import check_range
from ..variable.keys import KeyRows
from ._lookup import bad_id, checked_ids, nested_like
from ._max_norm import clipped_rows
from .auto import as_bytes
from .collection import Collection
from .embedding_bag import EmbeddingBag, check_shapes
from .embedding_collection import EmbeddingBagCollection, EmbeddingCollection
from .embedding_variable import EmbeddingVariable
from .plan import Ids

__all__ = [
    "QuantizedEmbedding",
    "QuantizedEmbeddingBag",
    "QuantizedEmbeddingBagCollection",
    "QuantizedEmbeddingCollection",
    "QuantizedEmbeddingVariable",
    "QuantizedTable",
]

_ops = torch.ops.torchsparse_rec
_NO_TRAINING = (
    "{}: quantised tables are for inference and have no gradient: call eval() on the model, or look up under "
    "torch.no_grad(); to train, use the model from before nn.quantize()"
)


def _refuse_training(module: torch.nn.Module, per_sample_weights: Tensor | None = None) -> None:
    """Raise ``RuntimeError`` where somebody may expect a gradient, which would be missing in silence."""
    if module.training and torch.is_grad_enabled():
        raise RuntimeError(_NO_TRAINING.format(type(module).__name__))
    refuse_gradient(type(module).__name__, per_sample_weights)


def _as_weights(per_sample_weights: Tensor | None) -> Tensor | None:
    """Return weights of any floats, as a table had them before it was quantised, as float32."""
    is_given = per_sample_weights is not None and per_sample_weights.is_floating_point()
    return per_sample_weights.float() if is_given else per_sample_weights  # type: ignore[union-attr]


# ---- Tables ---------------------------------------------------------------------------------------------------------


class QuantizedTable(torch.nn.Module):
    """
    A table with rows of fewer bytes; by itself, one of a collection.

    It has a buffer, ``table``, and no ``weight``: :meth:`dequantized` makes one. ``.to()`` moves it and never casts it,
    as its dtype is its format; ``state_dict()`` has it, and ``load_state_dict()`` takes another of the same format.

    Args:
        table: the argument of :func:`ops.quantize_rows`.
        rows: the format of the rows.
    """

    table: Tensor
    rows: str

    def __init__(self, table: Tensor, rows: str) -> None:
        super().__init__()
        self._hold(table, rows)

    def _hold(self, table: Tensor, rows: str) -> None:
        self.rows = rows
        self.register_buffer("table", table)

    @property
    def _bits(self) -> int:
        return ROW_FORMATS[self.rows].bits

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids of any shape, decoded."""
        return _ops.quantized_embedding.default(self.table, ids, self._bits)  # type: ignore[no-any-return]

    def dequantized(self) -> Tensor:
        """Return the whole table in float32, ``[num_embeddings, embedding_dim]``."""
        return QuantizedTable.look_up(self, torch.arange(len(self.table), device=self.table.device))

    def nbytes(self) -> int:
        """Return the bytes of the table."""
        return self.table.numel() * self.table.element_size()

    def _apply(self, fn: Any, recurse: bool = True):
        """Move the table as bytes, which are never cast."""

        def moved(x: Tensor) -> Tensor:
            if x is not self.table:
                return fn(x)  # type: ignore[no-any-return]
            stored = x.contiguous().view(torch.uint8)
            there: Tensor = fn(stored)
            return (there if there.dtype == torch.uint8 else stored.to(there.device)).view(x.dtype)

        return super()._apply(moved, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["rows"] = self.rows

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = state_dict.get(f"{prefix}table")
        rows = local_metadata.get("rows", self.rows)
        dtype = getattr(given, "dtype", type(given))
        if given is not None and (rows != self.rows or dtype != self.table.dtype):
            error_msgs.append(
                f"{prefix}table must have rows={self.rows!r}, of {self.table.dtype}, got {rows!r}, of {dtype}"
            )
            return
        rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """Return the sizes, the format and the bytes."""
        return f"{len(self.table)}, {dim_of(self.table, self._bits)}, rows={self.rows!r}, {as_bytes(self.nbytes())}"


class QuantizedEmbedding(QuantizedTable):
    """An :class:`Embedding` with rows of fewer bytes, which gives float32: see :func:`quantize`."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up ``input``, as :class:`Embedding` does."""
        _refuse_training(self)
        input = checked_ids("QuantizedEmbedding", input)
        if input.is_nested:
            return nested_like(input, self(input.values()))
        try:
            return self.look_up(input)
        except IndexError:
            if torch.compiler.is_compiling():
                raise
            raise (bad_id("QuantizedEmbedding", input, len(self.table)) or sys.exc_info()[1]) from None  # type: ignore[misc]


class QuantizedEmbeddingBag(QuantizedTable):
    """An :class:`EmbeddingBag` with rows of fewer bytes, which gives float32: see :func:`quantize`."""

    mode: str
    padding_idx: int | None
    include_last_offset: bool
    _bags = EmbeddingBag._bags

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool the bags of ``input``, as :class:`EmbeddingBag` does."""
        _refuse_training(self, per_sample_weights)
        input = checked_ids("QuantizedEmbeddingBag", input)
        check_shapes(input, offsets, per_sample_weights)
        ids, starts, weights, include_last = self._bags(input, offsets, per_sample_weights)  # type: ignore[misc]
        options = (self._bits, POOLING[self.mode], padding_number(self.padding_idx), include_last)
        try:
            return _ops.quantized_embedding_bag.default(self.table, ids, starts, _as_weights(weights), *options)  # type: ignore[no-any-return]
        except IndexError:
            if torch.compiler.is_compiling():
                raise
            values = input.values() if input.is_nested else input
            raise (bad_id("QuantizedEmbeddingBag", values, len(self.table)) or sys.exc_info()[1]) from None  # type: ignore[misc]

    def extra_repr(self) -> str:
        """Return the sizes, the format, the bytes and the mode."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


class QuantizedEmbeddingVariable(QuantizedTable):
    """
    An :class:`EmbeddingVariable` with rows of fewer bytes, which gives float32: see :func:`quantize`.

    The rows of all tiers are in memory; an unknown id has the value that it has in the variable in ``eval()``.

    Args:
        variable: the table before.
        rows: the format.
        max_norm: the largest norm with which a collection reads a row.
    """

    _as_keys = EmbeddingVariable._as_keys
    _max_norm: float | None = None

    def __init__(self, variable: EmbeddingVariable, rows: str, max_norm: float | None = None) -> None:
        exported = variable.export()
        self._max_norm = max_norm
        # A table has at least one row: unknown ids read it too, and do not use it.
        count, weight = max(len(exported.keys), 1), self._clipped(exported.values)
        super().__init__(packed_rows(weight if len(weight) else weight.new_zeros(1, weight.shape[1]), rows), rows)
        self.name, self.embedding_dim = variable.name, variable.embedding_dim
        self.key_dtype: torch.dtype = variable.key_dtype
        self.keys = KeyRows(self.name, count, device=weight.device)
        rows_of = self.keys.insert(exported.keys)[0]  # the k-th of them gets row k
        while bool((rows_of < 0).any()):  # on CUDA, where an insertion does not wait to see failures
            self.keys.spread()
            rows_of = self.keys.insert(exported.keys)[0]
        if not torch.equal(rows_of, torch.arange(len(rows_of), device=rows_of.device)):
            self.table = self.table.index_copy(0, rows_of, self.table[: len(rows_of)])
        self.initial = copy.deepcopy(variable.initial)
        self._default = None if variable.admission is None else float(variable._training.default)
        self._initial_dtype = weight.dtype
        self.train(variable.training)

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of ``input``, as :class:`EmbeddingVariable` does in ``eval()``."""
        _refuse_training(self)
        input = checked_ids("QuantizedEmbeddingVariable", input)
        if input.is_nested:
            return nested_like(input, self(input.values()))
        return self.look_up(self._as_keys(input)).reshape(*input.shape, self.embedding_dim)  # type: ignore[misc]

    @torch.no_grad()
    def lookup(self, input: Tensor) -> Tensor:
        """Look up in either mode, as :meth:`EmbeddingVariable.lookup` does."""
        return self(input)  # type: ignore[no-any-return]

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of keys ``[N]``, decoded."""
        rows = self.keys.find(ids)
        found, is_unknown = super().look_up(rows.clamp_min(0)), rows < 0
        if self._default is not None:
            initial = torch.full_like(found, self._default)
        else:
            like = found.new_empty(0, self.embedding_dim, dtype=self._initial_dtype)
            initial = self.initial.rows_of(ids, like, is_unknown).float()
        return torch.where(is_unknown.unsqueeze(1), self._clipped(initial), found)

    def _clipped(self, rows: Tensor) -> Tensor:
        return rows if self._max_norm is None else clipped_rows(rows, self._max_norm)

    def _apply(self, fn: Any, recurse: bool = True):
        """Move the table, and the values of unknown ids, which are not cast either."""
        before = self.initial.values
        super()._apply(fn, recurse)
        after = self.initial.values
        if before is not None and after is not None and after.dtype != before.dtype:
            self.initial.values = before.to(after.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load a table of any number of rows."""
        given, before = state_dict.get(f"{prefix}table"), self.table
        if isinstance(given, Tensor):
            problem = problem_of_keys(state_dict, f"{prefix}keys.", 0, len(given))
            if problem is not None:  # rows and keys load together or not at all
                raise RuntimeError(f"QuantizedEmbeddingVariable.load_state_dict: of {self.name!r}: {problem}")
        fits = isinstance(given, Tensor) and given.shape[1:] == before.shape[1:] and given.dtype == before.dtype
        if fits and len(given) != len(before):
            self.table = before.new_empty(given.shape)
        errors = args[-1]
        known = len(errors)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if len(errors) > known:
            self.table = before

    def extra_repr(self) -> str:
        """Return the number of keys, the width, the name, the format and the bytes."""
        return f"{super().extra_repr()}, name={self.name!r}"


# ---- Collections ----------------------------------------------------------------------------------------------------


class _QuantizedCollection(Collection):
    """The part that both quantised collections share."""

    def _look_up(self, places: list[int], ids: Ids, lengths: Sequence[int] | None = None) -> Tensor:
        _refuse_training(self, ids.per_sample_weights)
        plan, weights = self._plan(places), _as_weights(ids.per_sample_weights)
        ids = ids._replace(per_sample_weights=weights)
        tables: list[Any] = self._tables
        results = []
        for lookup, (table, key, mode) in enumerate(zip(plan.tables, plan.keys, plan.modes, strict=True)):
            try:
                results.append(_looked_up(tables[table], ids, key, mode, plan.padding[table], lengths))
            except IndexError as error:
                if torch.compiler.is_compiling():
                    raise
                where = f"{type(self).__name__}: feature {self._lookup_features[lookup]!r}"
                raise IndexError(f"{where}: {error}") from None
        return torch.cat(results, 1) if ids.side_by_side else torch.cat([x.reshape(-1) for x in results])

    def stored_weights(self) -> list[Parameter]:
        return []

    @property
    def device(self) -> torch.device:
        """The device where the tables are."""
        tables: list[Any] = self._tables
        return tables[0].table.device  # type: ignore[no-any-return]

    @property
    def grad_mode(self) -> GradMode | None:
        """None: there are no gradients, and no mode can be set."""
        return None

    @grad_mode.setter
    def grad_mode(self, value: GradMode | None) -> None:
        raise RuntimeError(_NO_TRAINING.format(type(self).__name__))

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ``RuntimeError``: no optimizer can train the tables."""
        raise RuntimeError(_NO_TRAINING.format(type(self).__name__))

    def explain(self) -> str:
        """Say of every table how it is stored."""
        return "\n".join(f"{name}: no gradient: {table.extra_repr()}" for name, table in self._named_tables())

    def _named_tables(self) -> list[tuple[str, Any]]:
        return [(config.name, table) for config, table in zip(self._configs, self._tables, strict=True)]

    describe = explain

    def extra_repr(self) -> str:
        """Return nothing: each table has its own text."""
        return ""


def _looked_up(table: QuantizedTable, ids: Ids, key: int, mode: int, padding: int, lengths: Any) -> Tensor:
    """Return one lookup of a collection: the rows of a feature's ids, pooled where they come in bags."""
    firsts = [0, *accumulate(ids.bags)]
    first, bags = firsts[key], ids.bags[key]
    if not isinstance(table, QuantizedEmbeddingVariable) and ids.offsets is not None:
        rest = (table._bits, mode, padding, True, first, bags)
        rows = (table.table, ids.indices, ids.offsets, ids.per_sample_weights)
        return _ops.quantized_embedding_bag.default(*rows, *rest)  # type: ignore[no-any-return]
    # Where rows come in bags, the keys' rows are found first: an unknown key has none.
    begin = first if ids.offsets is None else sum(lengths[:key])
    chosen = ids.indices[begin : begin + (bags if ids.offsets is None else lengths[key])]
    if isinstance(table, QuantizedEmbeddingVariable):
        check_range("lookup: input", chosen, table.key_dtype)
        chosen = chosen.to(table.key_dtype)
    values = table.look_up(chosen)
    if ids.offsets is None:
        return values
    offsets = ids.offsets[first : first + bags + 1] - begin
    weights = None if ids.per_sample_weights is None else ids.per_sample_weights[begin : begin + chosen.shape[0]]
    entries = torch.arange(chosen.shape[0], device=chosen.device)
    return lookup_bags(values, entries, offsets, weights, mode, padding, False, False)


class QuantizedEmbeddingBagCollection(_QuantizedCollection, EmbeddingBagCollection):
    """
    An :class:`EmbeddingBagCollection` with rows of fewer bytes, which gives float32: see :func:`quantize`.

    Each table is a buffer, ``embedding_bags.<name>.table``.
    """


class QuantizedEmbeddingCollection(_QuantizedCollection, EmbeddingCollection):
    """
    An :class:`EmbeddingCollection` with rows of fewer bytes, which gives float32: see :func:`quantize`.

    Each table is a buffer, ``embeddings.<name>.table``.
    """
