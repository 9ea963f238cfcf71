"""Cells that are neither right nor refused, with reasons. A cell that has become right or refused fails its test."""

from __future__ import annotations

from collections.abc import Iterable

# Clients, modes, and the reason that docs/clients.md gives.
_ROWS: list[tuple[Iterable[str], Iterable[str], str]] = []
KNOWN = {(name, mode): why for names, modes, why in _ROWS for name in names for mode in modes}
