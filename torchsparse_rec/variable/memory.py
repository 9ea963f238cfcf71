"""Allocation of memory for tables that grow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["new_zeros"]

_LINE = 64


def new_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """
    Return zeros; on the host, memory pages that the system allocates only when they are first written.

    A table that has just doubled is half empty. numpy asks for huge pages, of which random reads need few. The first
    row begins with a cache line, as in torch's own memory.
    """
    where = torch.get_default_device() if device is None else torch.device(device)
    if where.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    memory = np.zeros(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(tuple(shape))
