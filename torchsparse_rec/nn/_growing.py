"""Lookups of several tables, some of which grow: their keys are first replaced by rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..variable.arguments import check_range
from ..variable.training_rows import rows_together
from .embedding_variable import EmbeddingVariable
from .plan import Ids, Plan

__all__ = ["rows_of_keys"]


class _Use(NamedTuple):
    """A lookup of a table that grows: its numbers of lookup and feature, and where its keys begin and end."""

    lookup: int
    key: int
    begin: int
    end: int


def rows_of_keys(
    plan: Plan,
    weights: list[Parameter],
    growing: Mapping[int, EmbeddingVariable],
    ids: Ids,
    lengths: Sequence[int],
    occurrences: Tensor | None = None,
) -> tuple[Plan, list[Parameter], Ids]:
    """
    Replace the keys of tables that grow by rows.

    A table in training gets new rows for new keys. A table in ``eval()`` does not: the values of the looked up keys
    become a table of their own for this lookup, which has no gradient.

    Args:
        plan: the lookups.
        weights: the tables.
        growing: the tables that grow, by number.
        ids: the keys, and the ids of the other tables.
        lengths: the number of ids of each feature.
        occurrences: how often each id is looked up, as which training counts it, where ids come without offsets and
            no feature is looked up twice. Default: once.

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
    uses: dict[int, list[_Use]] = {table: [] for table in growing}
    for lookup, (table, key) in enumerate(zip(plan.tables, plan.keys, strict=True)):
        if table in growing:
            uses[table].append(_Use(lookup, key, ends[key] - lengths[key], ends[key]))
    # A feature that several lookups use is copied for each lookup of a table that grows.
    alone = {key for key, count in Counter(plan.keys).items() if count == 1}
    together = [
        (its, growing[table])
        for table, its in uses.items()
        if its and all(use.key in alone for use in its) and growing[table].takes_all()
    ]
    made = _rows_together(ids.indices, together)
    done = {id(variable) for _, variable in together}
    weights = list(weights)
    keys = list(plan.keys)
    copies: list[tuple[_Use, Tensor]] = []
    for table, its in uses.items():
        variable = growing[table]
        if id(variable) in done:
            continue
        pieces = [ids.indices[use.begin : use.end] for use in its]
        wanted = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        weights[table], rows = _rows_of_one(variable, weights[table], wanted)
        for use, of_use in zip(its, rows.split([use.end - use.begin for use in its]), strict=True):
            if use.key in alone:
                made[use.begin : use.end] = of_use
            else:
                keys[use.lookup] = len(lengths) + len(copies)
                copies.append((use, of_use))
    if not copies:
        return plan, weights, ids._replace(indices=made)
    return plan._replace(keys=tuple(keys)), weights, _with_copies(ids, made, copies)


def _rows_of_one(variable: EmbeddingVariable, weight: Parameter, keys: Tensor) -> tuple[Parameter, Tensor]:
    """Return the rows of a table's keys, and the table that has them."""
    if torch.compiler.is_exporting():  # which the table refuses in train()
        return variable._look_up_in_program(keys), torch.arange(keys.shape[0], device=keys.device)  # type: ignore[return-value]
    check_range("lookup: input", keys, variable.key_dtype)
    if variable.key_dtype == torch.int32:
        keys = keys.int()
    variable._check_places()
    if variable.trains():
        with variable.writing():
            return weight, variable.rows_of(keys)
    return variable._read_here(keys), torch.arange(keys.shape[0], device=keys.device)  # type: ignore[return-value]


@torch.no_grad()
def _rows_together(ids: Tensor, tables: list[tuple[list[_Use], EmbeddingVariable]]) -> Tensor:
    """Return the ids, with rows for the keys that these tables look up, by one operator for all tables."""
    if not tables:
        return ids.to(torch.int64, copy=True)
    if all(len(its) == 1 for its, _ in tables):
        tables = sorted(tables, key=lambda pair: pair[0][0].begin)
        return _rows_of_parts(ids, [(its[0].begin, its[0].end) for its, _ in tables], [each for _, each in tables])
    # The operator takes the keys of a table one after the other.
    uses = [use for its, _ in tables for use in its]
    sizes = [use.end - use.begin for use in uses]
    ends = list(accumulate(sum(use.end - use.begin for use in its) for its, _ in tables))
    parts = list(zip([0, *ends], ends, strict=False))
    keys = torch.cat([ids[use.begin : use.end] for use in uses])
    made = ids.to(torch.int64, copy=True)
    for use, rows in zip(uses, _rows_of_parts(keys, parts, [each for _, each in tables]).split(sizes), strict=True):
        made[use.begin : use.end] = rows
    return made


def _rows_of_parts(ids: Tensor, parts: list[tuple[int, int]], variables: list[EmbeddingVariable]) -> Tensor:
    """Return the ids, with rows for the keys in each variable's part; parts are in ascending order."""
    with ExitStack() as stack:
        for variable in sorted(variables, key=lambda variable: variable.lock_number()):
            stack.enter_context(variable.writing())
        begun = [variable._begin_lookup(end - begin) for variable, (begin, end) in zip(variables, parts, strict=True)]
        return rows_together(begun, ids, parts)


def _with_copies(ids: Ids, made: Tensor, copies: list[tuple[_Use, Tensor]]) -> Ids:
    """Append to the ids a feature for each use, with its rows as ids."""
    bags, firsts = list(ids.bags), [0, *accumulate(ids.bags)]
    values, offsets, weights = [made], [ids.offsets], [ids.per_sample_weights]
    total = made.shape[0]
    for use, rows in copies:
        values.append(rows)
        bags.append(ids.bags[use.key])
        if ids.offsets is not None:
            its = ids.offsets[firsts[use.key] + 1 : firsts[use.key + 1] + 1]
            offsets.append(its - ids.offsets[firsts[use.key]] + total)
        if ids.per_sample_weights is not None:
            weights.append(ids.per_sample_weights[use.begin : use.end])
        total += rows.shape[0]
    return ids._replace(
        indices=torch.cat(values),
        offsets=None if ids.offsets is None else torch.cat(offsets),  # type: ignore[arg-type]
        per_sample_weights=None if ids.per_sample_weights is None else torch.cat(weights),  # type: ignore[arg-type]
        bags=bags,
    )
