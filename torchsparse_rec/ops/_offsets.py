"""Offsets that do not fit the items beside them."""

from __future__ import annotations

import torch
from torch import Tensor


def check_not_empty(function: str, offsets: Tensor | None, items: Tensor, name: str = "indices") -> None:
    """Raise ``ValueError`` for offsets without an element beside items: not even their end is given."""
    if torch.compiler.is_compiling():  # sizes may be no numbers yet
        return
    if offsets is not None and offsets.numel() == 0 and items.dim() and items.shape[0]:
        raise ValueError(f"{function}: offsets is empty, but there are {items.shape[0]:,} {name}")
