"""Lookups of several tables where some grow: their keys are first replaced by rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import is_run_again
from ..variable.arguments import check_places, check_range
from ..variable.training_rows import rows_together
from .embedding_variable import EmbeddingVariable, begin_lookups
from .plan import Ids, LookupPlan

__all__ = ["rows_of_keys"]


class _Uses(NamedTuple):
    """The lookups of a table that grows."""

    table: int
    lookups: list[int]
    keys: list[int]
    alone: list[bool]
    """Whether no other lookup uses the feature."""


def rows_of_keys(
    plan: LookupPlan,
    weights: list[Parameter],
    growing: Mapping[int, EmbeddingVariable],
    ids: Ids,
    lengths: Sequence[int],
    occurrences: Tensor | None = None,
) -> tuple[LookupPlan, list[Parameter], Ids]:
    """
    Replace the keys of tables that grow by rows.

    A table in training gets new rows for new keys. A table in ``eval()`` does not: the values of the looked up keys
    become a separate table for this lookup, without a gradient.

    Args:
        plan: the lookups.
        weights: the tables.
        growing: the tables that grow, by number.
        ids: the keys, and the ids of the other tables.
        lengths: the number of ids of each feature.
        occurrences: the number of times that each id is looked up, as training counts it. It needs ids without offsets,
            and no feature may be looked up twice. Default: once.

    Returns:
        The plan, the tables and the ids, with rows for keys. ``ids.indices`` is a new tensor.
    """
    if occurrences is not None and any(variable.trains() for variable in growing.values()):
        behind = occurrences.cumsum(0)
        at = torch.tensor([0, *accumulate(lengths)], device=behind.device)
        each = torch.cat([behind.new_zeros(1), behind])[at].diff().tolist()
        repeated = ids._replace(indices=ids.indices.repeat_interleave(occurrences))
        plan, weights, found = rows_of_keys(plan, weights, growing, repeated, each)
        return plan, weights, ids._replace(indices=found.indices[behind - occurrences])
    ends = list(accumulate(lengths))
    begins = [0, *ends]
    uses = _uses_of(plan, tuple(growing))
    usual = _those_that_take_all([growing[its.table] for its in uses])
    together = [its for its, is_usual in zip(uses, usual, strict=True) if is_usual and all(its.alone)]
    made = _rows_together(ids.indices, [growing[its.table] for its in together], [its.keys for its in together], ends)
    if len(together) == len(uses):
        return plan, weights, ids._replace(indices=made)
    done = {its.table for its in together}
    weights, keys = list(weights), list(plan.keys)
    copies: list[tuple[int, Tensor]] = []
    for table, lookups, its_keys, alone in [its for its in uses if its.table not in done]:
        pieces = [ids.indices[begins[key] : ends[key]] for key in its_keys]
        wanted = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        weights[table], rows = _rows_of_one(growing[table], weights[table], wanted)
        pieces = list(rows.split([lengths[key] for key in its_keys]))
        for lookup, key, is_alone, piece in zip(lookups, its_keys, alone, pieces, strict=True):
            if is_alone:
                made[begins[key] : ends[key]] = piece
            else:
                keys[lookup] = len(lengths) + len(copies)
                copies.append((key, piece))
    if not copies:
        return plan, weights, ids._replace(indices=made)
    return plan._replace(keys=tuple(keys)), weights, _with_copies(ids, made, copies, begins)


@lru_cache(maxsize=64)
def _uses_of(plan: LookupPlan, tables: tuple[int, ...]) -> list[_Uses]:
    """Return the lookups of some tables of a plan, in the order of their first features; not of tables without any."""
    # A feature that several lookups use is copied for each lookup of a table that grows.
    counts = Counter(plan.keys)
    found: dict[int, _Uses] = {}
    for lookup, (table, key) in enumerate(zip(plan.tables, plan.keys, strict=True)):
        if table in tables:
            its = found.setdefault(table, _Uses(table, [], [], []))
            its.lookups.append(lookup)
            its.keys.append(key)
            its.alone.append(counts[key] == 1)
    return sorted(found.values(), key=lambda its: its.keys[0])


def _rows_of_one(variable: EmbeddingVariable, weight: Parameter, keys: Tensor) -> tuple[Parameter, Tensor]:
    """Return the rows of a table's keys, and the table that has them."""
    if torch.compiler.is_exporting():  # which the table refuses in train()
        return variable._look_up_in_program(keys), torch.arange(keys.shape[0], device=keys.device)  # type: ignore[return-value]
    check_range("lookup: input", keys, variable.key_dtype)
    if variable.key_dtype == torch.int32:
        keys = keys.int()
    check_places(variable.name, variable.stored_weight(), variable.keys)
    if variable.trains():
        with variable.writing():
            return weight, variable.rows_of(keys)
    return variable._read_here(keys), torch.arange(keys.shape[0], device=keys.device)  # type: ignore[return-value]


@torch.no_grad()
def _rows_together(ids: Tensor, variables: list[EmbeddingVariable], keys: list[list[int]], ends: list[int]) -> Tensor:
    """
    Return the ids, with rows for the keys that tables look up in training, by one operator for all tables.

    Args:
        ids: the keys, feature by feature.
        variables: the tables.
        keys: the numbers of each table's features. The tables are in the order of their first ones.
        ends: the end of each feature's ids.
    """
    if not variables:
        return ids.to(torch.int64, copy=True)
    begins = [0, *ends]
    if all([len(its) == 1 for its in keys]):
        return _rows_of_parts(ids, [(begins[its[0]], ends[its[0]]) for its in keys], variables)
    # The operator takes the keys of a table in one piece.
    places = [slice(begins[key], ends[key]) for its in keys for key in its]
    sizes = [place.stop - place.start for place in places]
    its_ends = list(accumulate([sum([ends[key] - begins[key] for key in its]) for its in keys]))
    parts = list(zip([0, *its_ends], its_ends, strict=False))
    rows = _rows_of_parts(torch.cat([ids[place] for place in places]), parts, variables)
    made = ids.to(torch.int64, copy=True)
    for place, piece in zip(places, rows.split(sizes), strict=True):
        made[place] = piece
    return made


def _those_that_take_all(variables: Sequence[EmbeddingVariable]) -> list[bool]:
    """Say which tables' lookups insert and count every int64 key, without a filter or other tiers."""
    if torch.compiler.is_exporting() or is_run_again():
        return [False] * len(variables)
    learns = torch.is_grad_enabled()
    return [
        variable.training
        and (learns or variable._model is None)
        and variable.key_dtype == torch.int64
        and variable._rows.admission is None
        and variable._rows.cold is None
        for variable in variables
    ]


def _rows_of_parts(ids: Tensor, parts: list[tuple[int, int]], variables: list[EmbeddingVariable]) -> Tensor:
    """Return the ids, with rows for the keys in each variable's part; parts are in ascending order."""
    with variables[0].all_writing(variables):
        begun = begin_lookups(variables, [end - begin for begin, end in parts])
        return rows_together(begun, ids, parts)


def _with_copies(ids: Ids, made: Tensor, copies: list[tuple[int, Tensor]], begins: list[int]) -> Ids:
    """Append to the ids copies of features, given by their numbers, with rows as ids; ``begins`` is of all features."""
    bags, firsts = list(ids.bags), [0, *accumulate(ids.bags)]
    values, offsets, weights = [made], [ids.offsets], [ids.per_sample_weights]
    total = made.shape[0]
    for key, rows in copies:
        values.append(rows)
        bags.append(ids.bags[key])
        if ids.offsets is not None:
            its = ids.offsets[firsts[key] + 1 : firsts[key + 1] + 1]
            offsets.append(its - ids.offsets[firsts[key]] + total)
        if ids.per_sample_weights is not None:
            weights.append(ids.per_sample_weights[begins[key] : begins[key + 1]])
        total += rows.shape[0]
    return ids._replace(
        indices=torch.cat(values),
        offsets=None if ids.offsets is None else torch.cat(offsets),  # type: ignore[arg-type]
        per_sample_weights=None if ids.per_sample_weights is None else torch.cat(weights),  # type: ignore[arg-type]
        bags=bags,
    )
