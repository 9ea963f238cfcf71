"""What is in a table, as text: ``describe()`` of tables and collections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..tables.part import plain
from ..tables.table import split_part, table_of
from ..variable.records import RowPart

__all__ = ["as_bytes", "described", "with_size"]

# The rows whose norms are computed at once, and the places of rows that a text names.
_AT_ONCE, _NAMED = 1 << 16, 5


def as_bytes(count: int) -> str:
    """Return a number of bytes as text, in the largest unit it fills."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} bytes"


def with_size(text: str, mode: Any, weight: Tensor) -> str:
    """Return what ``repr`` shows of a table: a text, its gradient mode unless that is None, and its bytes."""
    return f"{text}{'' if mode is None else f', grad_mode={mode!r}'}, {as_bytes(weight.nbytes)}"


@torch.no_grad()
def described(table: Any, title: str = "") -> str:
    """
    Describe a table in lines of text: its size, mode and optimizer, its rows' norms, and which are not finite.

    Args:
        table: the module that owns it. One that grows has ``table_rows`` too.
        title: the name of the table; empty: its class, and the name of one that grows.
    """
    weight, grows = table.stored_weight(), hasattr(table, "table_rows")
    title = title or f"{type(table).__name__}{f' {table.name!r}' if grows else ''}"
    part, optimizer = split_part(weight), table_of(weight).optimizer
    whose = "" if part is None else " of this rank"
    rows, dtype = f"{weight.shape[0]:,} rows x {weight.shape[1]:,}", str(weight.dtype).removeprefix("torch.")
    lines = [
        f"{title}: {rows}{whose}, {dtype}, {as_bytes(weight.nbytes)}; grad_mode={table._grad_mode!r}, optimizer: "
        f"{'none of ours' if optimizer is None else type(optimizer).__name__}"
    ]
    if not grows:
        table_of(weight).flush()
        all_norms = torch.cat([_norms(some) for some in plain(weight.detach()).split(_AT_ONCE)])
        return "\n".join([*lines, _of_norms("row", torch.arange(len(weight)), all_norms)])
    stats = table.stats()
    tiers = [name.removeprefix("rows_") for name in stats if name.startswith("rows_")]
    places = ", ".join(f"{stats[f'rows_{t}']:,} in {t} ({as_bytes(stats[f'bytes_{t}'])})" for t in tiers)
    lines.append(f"  keys: {stats['keys']:,}; with the optimizer's states {places}; evicted: {stats['evicted']:,}")
    with table.settled():
        keys, norms, frequencies, versions = _of_parts(table.table_rows.parts())
    if keys.numel():
        lines += [
            _of_norms("key", keys, norms),
            f"  lookups of a key in training: {_spread(frequencies, ',')}",
            f"  step of a key's last lookup: {_spread(versions, ',')}; now {stats['global_step']:,}",
        ]
    return "\n".join(lines)


def _of_parts(parts: Iterable[RowPart]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the keys, norms, frequencies and versions of rows, which may be on disk, and too many for memory."""
    found = [(part.keys, _norms(part.values), part.frequencies, part.versions) for part in parts]
    keys, norms, frequencies, versions = (torch.cat(x).cpu() for x in zip(*found, strict=True))
    return keys, norms, frequencies, versions


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu()


def _of_norms(of: str, names: Tensor, norms: Tensor) -> str:
    finite = norms.isfinite()
    text = f"  norms of rows: {_spread(norms[finite], '.3g')}; zeros: {int((norms == 0).sum()):,}"
    bad = names[~finite]
    if not len(bad):
        return text
    more = ", ..." if len(bad) > _NAMED else ""
    return f"{text}; NaN or infinite: {len(bad):,}, of {of} {', '.join(map(str, bad[:_NAMED].tolist()))}{more}"


def _spread(x: Tensor, form: str) -> str:
    if not len(x):
        return "none"
    least, middle, most = (f"{value.item():{form}}" for value in (x.min(), x.median(), x.max()))
    return f"{least} to {most}, median {middle}"
