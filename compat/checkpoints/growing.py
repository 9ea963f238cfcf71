"""DeepRec's EmbeddingVariables from and to checkpoints: rows with keys, in as many partitions as there are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...nn import EmbeddingVariable
from ...optim.row_optimizer import RowOptimizer
from ...variable.arguments import given_keys, given_numbers
from .format import Piece, copy_bytes
from .sources import Found, Source
from .writer import CheckpointWriter

__all__ = ["GrowingRows", "check_rows", "growing_rows", "insert_rows", "write_rows"]

#: How many rows are inserted at once.
_ROWS = 2**16


class GrowingRows(NamedTuple):
    """The rows of one partition of an EmbeddingVariable in a file."""

    keys: Found | None
    """None: they are 0, 1, ..., of a variable of fixed size."""
    values: Found
    freqs: Found | None
    versions: Found | None
    states: dict[str, tuple[Found, Found | None, float]]
    """
    By the name of a state of ``optim``: its values, their keys, and by what the values are multiplied. Keys of None:
    those of the rows, in their order.
    """

    @staticmethod
    def of_fixed(values: Found, states: Mapping[str, tuple[Found, float]]) -> GrowingRows:
        """Return the rows of a table of fixed size, whose keys are 0, 1, ..., with their states."""
        without_keys: dict[str, tuple[Found, Found | None, float]] = {
            state: (slot, None, factor) for state, (slot, factor) in states.items()
        }
        return GrowingRows(None, values, None, None, without_keys)

    def all(self) -> list[Found]:
        """Return all tensors."""
        slots = [found for its in self.states.values() for found in its[:2]]
        return [x for x in (self.keys, self.values, self.freqs, self.versions, *slots) if x is not None]


def growing_rows(source: Source, base: str, width: int, ends: Mapping[str, tuple[str, float]]) -> list[GrowingRows]:
    """
    Return the partitions of an EmbeddingVariable.

    Args:
        source: the file.
        base: the variable's name.
        width: the width of its rows.
        ends: the ends of the slots' names and the factors of the slots, by the name of the state.

    Raises:
        ValueError: tensors are missing, or their shapes differ.
    """
    parts = sorted(
        int(m[1]) for name in source.tensors if (m := re.fullmatch(rf"{re.escape(base)}/part_(\d+)-keys", name))
    )
    if parts != list(range(len(parts))):
        raise ValueError(f"{source.path}: {base!r} must have parts 0 to {len(parts) - 1}, got {parts}")
    return [_part(source, prefix, width, ends) for prefix in [f"{base}/part_{k}" for k in parts] or [base]]


def _part(source: Source, prefix: str, width: int, ends: Mapping[str, tuple[str, float]]) -> GrowingRows:
    def tensor(name: str, *shape: int) -> Found:
        found = source.tensors.get(name)
        if found is None:
            raise ValueError(f"{source.path} must have {name!r}, beside {prefix + '-keys'!r}")
        if shape and found.shape != shape:
            raise ValueError(f"{source.path}: {name!r} must have the shape {list(shape)}, got {list(found.shape)}")
        return found

    keys = tensor(f"{prefix}-keys")
    if len(keys.shape) != 1 or keys.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{source.path}: {keys.name!r} must be keys [N], got {keys.dtype} {list(keys.shape)}")
    count = keys.shape[0]
    values = tensor(f"{prefix}-values", count, width)
    numbers = {}
    for name in ("freqs", "versions"):  # of no elements, where DeepRec does not count
        found = source.tensors.get(f"{prefix}-{name}")
        empty = found is None or found.shape == (0,)
        numbers[name] = None if empty else tensor(f"{prefix}-{name}", count)
    states: dict[str, tuple[Found, Found | None, float]] = {
        state: (tensor(f"{prefix}/{end}-values", count, width), tensor(f"{prefix}/{end}-keys", count), factor)
        for state, (end, factor) in ends.items()
    }
    return GrowingRows(keys, values, numbers["freqs"], numbers["versions"], states)


def _rows(pieces: list[Piece], shape: tuple[int, ...], begin: int, end: int) -> Tensor:
    """Return a copy of some rows of a tensor."""
    result = torch.empty((end - begin, *shape[1:]), dtype=pieces[0].dtype)
    for piece in pieces:
        if (begin, end) == (0, shape[0]):
            copy_bytes(piece, result)
            continue
        first, last = max(begin, piece.place[0].start), min(end, piece.place[0].stop)
        if first < last:
            row = len(piece.bytes) // max(piece.shape[0], 1)
            at = first - piece.place[0].start
            some = piece.bytes[at * row : (at + last - first) * row]
            place = (slice(first - begin, last - begin), *piece.place[1:])
            copy_bytes(piece._replace(place=place, shape=(last - first, *piece.shape[1:]), bytes=some), result)
    return result


def _whole(found: Found) -> Tensor:
    return _rows(found.pieces(), found.shape, 0, found.shape[0])


def check_rows(table: EmbeddingVariable, parts: list[GrowingRows], path: str, name: str) -> None:
    """
    Raise ``ValueError`` unless a table without rows can take all rows and their states.

    Args:
        table: the table.
        parts: the table's rows in a file.
        path: the path of the file.
        name: the name of the table.
    """
    every = []
    for part in parts:
        count = part.values.shape[0]
        keys = torch.arange(count) if part.keys is None else _whole(part.keys)
        try:
            every.append(given_keys("insert", keys, table.key_dtype, keys.device))
            given_numbers("frequencies", None if part.freqs is None else _whole(part.freqs), keys, 0)
            given_numbers("versions", None if part.versions is None else _whole(part.versions), keys, -1)
        except ValueError as error:
            raise ValueError(f"{path}, for {name!r}: {error}") from error
        for slot, slot_keys, _ in part.states.values():
            its = None if slot_keys is None else _whole(slot_keys)
            if its is not None and not torch.equal(keys, its) and not torch.equal(keys.sort()[0], its.sort()[0]):
                raise ValueError(f"{path}: the keys of {slot.name!r} must be those of its table, {name!r}")
    distinct = ops.unique_with_counts(torch.cat(every))
    if bool((distinct.counts > 1).any()):
        often = int(distinct.counts.argmax())
        raise ValueError(
            f"{path}, for {name!r}: keys must be distinct, over all parts, got {int(distinct.values[often])} "
            f"{int(distinct.counts[often])} times"
        )
    capacity = table.ev_option.capacity
    if capacity is not None and len(distinct.values) > capacity:
        raise ValueError(
            f"{path}, for {name!r}: rows must be no more than the table's capacity, {capacity}, got "
            f"{len(distinct.values)}: make the table with a larger one, or load into one without and insert() the rows "
            "that are to stay"
        )


def _in_order(keys: Tensor, others: Tensor, values: Tensor) -> Tensor:
    """Return a slot's values, which have keys in another order, in the order of the table's keys."""
    if torch.equal(keys, others):
        return values
    return torch.empty_like(values).index_copy_(0, keys.argsort(), values[others.argsort()])


def insert_rows(table: EmbeddingVariable, parts: list[GrowingRows], optimizer: RowOptimizer | None, steps: int) -> None:
    """Insert rows, checked by :func:`check_rows`, into a table that has none, and their states into its optimizer."""
    for part in parts:
        for begin, end, rows in _chunks(part):
            keys = torch.arange(begin, end) if part.keys is None else rows["keys"]
            table.insert(keys, rows["values"], rows.get("freqs"), rows.get("versions"))
    if optimizer is None or not any(part.states for part in parts):
        return
    states = table.table_rows.store.states
    states.start_over(list(parts[0].states), steps)
    for part in parts:
        whole = part.keys is None
        for begin, end, rows in _chunks(part):
            keys = torch.arange(begin, end) if whole else rows["keys"]
            device = table.stored_weight().device
            where = table.keys.find(keys.to(device))
            columns = {}
            for state, (_, slot_keys, factor) in part.states.items():
                values = rows[state] * factor if factor != 1 else rows[state]
                columns[state] = values if slot_keys is None else _in_order(keys, rows[f"{state}-keys"], values)
            states.put(where, columns)


def _chunks(part: GrowingRows) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """Yield rows of a partition, some at a time: where they begin and end, and their tensors by name."""
    named: dict[str, Found | None] = {**part._asdict()}
    named.pop("states")
    for state, (values, keys, _) in part.states.items():
        named |= {state: values, f"{state}-keys": keys}
    found = {name: (x.pieces(), x.shape) for name, x in named.items() if x is not None}
    count = part.values.shape[0]
    # Rows of a slot may have another order than the table's, or partitions' rows may alternate: then all come at once.
    alternate = any(piece.place[0].step not in (None, 1) for pieces, _ in found.values() for piece in pieces)
    step = count if alternate or _reorders(part) else _ROWS
    for begin in range(0, count, max(step, 1)):
        end = min(count, begin + step)
        yield begin, end, {name: _rows(pieces, shape, begin, end) for name, (pieces, shape) in found.items()}


def _reorders(part: GrowingRows) -> bool:
    if part.keys is None:
        return False
    own = [piece.bytes for piece in part.keys.pieces()]
    for _, keys, _ in part.states.values():
        others = [] if keys is None else [piece.bytes for piece in keys.pieces()]
        if others and (len(own) != len(others) or not all(map(torch.equal, own, others))):
            return True
    return False


@torch.no_grad()
def write_rows(
    writer: CheckpointWriter, name: str, table: EmbeddingVariable, ends: Mapping[str, tuple[str, float]]
) -> None:
    """Write the rows of a table, and the states of its optimizer; ``ends`` is as of :func:`growing_rows`."""
    with table.settled():
        parts = list(table.table_rows.parts())
    columns: dict[str, Any] = {
        "keys": [part.keys.to(table.key_dtype) for part in parts],
        "values": [part.values for part in parts],
        "versions": [part.versions for part in parts],
        "freqs": [part.frequencies for part in parts],
    }
    for column, tensors in columns.items():
        writer.add(f"{name}-{column}", torch.cat(tensors))
    for state, (end, factor) in ends.items():
        for column in ("versions", "freqs", "keys"):
            writer.add(f"{name}/{end}-{column}", torch.cat(columns[column]))
        writer.add(f"{name}/{end}-values", torch.cat([part.states[state] for part in parts]), factor=1 / factor)
