"""Memory of tables that grow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["new_zeros"]


def new_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """
    ``torch.zeros``, but on the host the system's zeros: memory is touched when it is first written.

    A table that has just doubled is half empty, and numpy asks for huge pages, of which random reads want few.
    """
    where = torch.get_default_device() if device is None else torch.device(device)
    if where.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(tuple(shape))
