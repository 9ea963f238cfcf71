"""What references share: the numbers of reductions, and the dtype that they compute in."""

from __future__ import annotations

import torch
from torch import Tensor

# Of segments and of bags.
SUM, MEAN, SQRTN, MAX, MIN, PROD = range(6)


def accumulator(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
