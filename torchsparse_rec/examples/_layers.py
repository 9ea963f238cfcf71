"""Layers that the examples' networks share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Without AVX-512 both libraries use the same instructions, and a convolution's backward is the slower one (Zen 3).
_IS_WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"
# With fewer examples or outputs than these a convolution is not worth its overhead.
_LEAST_EXAMPLES, _LEAST_OUTPUTS = 256, 16


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """
    Compute :func:`torch.nn.functional.linear` of ``x`` ``[B, n]``, on CPUs with AVX-512 by oneDNN where it is large.

    On the CPU torch multiplies matrices of float32 by MKL, which leaves AVX-512 unused on some processors, and
    convolves by oneDNN, which uses it. A layer is a convolution of single points.

    Example:
        >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0.5]))
        tensor([[11.5000]])
    """
    examples, outputs = x.shape[0], weight.shape[0]
    large = examples >= _LEAST_EXAMPLES and outputs >= _LEAST_OUTPUTS
    is_float = x.device.type == "cpu" and x.dtype == torch.float32
    if not (_IS_WIDE and large and is_float and torch.backends.mkldnn.is_available()):
        return nn.functional.linear(x, weight, bias)
    points = x.view(1, 1, examples, -1).permute(0, 3, 1, 2)  # [1, n, 1, B], the channels last in memory
    found = nn.functional.conv2d(points, weight[:, :, None, None], bias)
    return found.permute(0, 2, 3, 1).reshape(examples, outputs)
