"""Linear layers on CPUs some of whose instructions torch leaves unused."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["linear"]

# Without AVX-512 both libraries use the same instructions, and a convolution's backward is the slower one (Zen 3).
_IS_WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """
    Compute :func:`torch.functional.linear` of ``x`` ``[B, n]``, on CPUs with AVX-512 by oneDNN where it is large.

    On the CPU torch multiplies matrices of float32 by MKL, which leaves AVX-512 unused on some processors, and
    convolves by oneDNN, which uses it. A layer is a convolution of single points.

    Example:
        >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0.5]))
        tensor([[11.5000]])
    """
    is_large = len(x) >= 256 and len(weight) >= 16  # with less a convolution is not worth its overhead
    if not (_IS_WIDE and is_large and x.device.type == "cpu" and x.dtype == torch.float32):
        return functional.linear(x, weight, bias)
    points = x.view(1, 1, len(x), -1).permute(0, 3, 1, 2)  # [1, n, 1, B], the channels last in memory
    return functional.conv2d(points, weight[:, :, None, None], bias).permute(0, 2, 3, 1).reshape(len(x), -1)
