"""Layers that the networks share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Fewer examples or outputs than these are not worth the way through a convolution.
_LEAST_EXAMPLES, _LEAST_OUTPUTS = 256, 16


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """
    :func:`torch.nn.functional.linear` of ``x`` ``[B, n]``; large ones on the CPU by oneDNN.

    There torch multiplies matrices of float32 by MKL, which on some processors does not use all instructions that they
    have, but convolves by oneDNN, which does. A layer is a convolution of single points.

    Example:
        >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0.5]))
        tensor([[11.5000]])
    """
    examples, outputs = x.shape[0], weight.shape[0]
    small = examples < _LEAST_EXAMPLES or outputs < _LEAST_OUTPUTS
    if small or x.device.type != "cpu" or x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return nn.functional.linear(x, weight, bias)
    points = x.view(1, 1, examples, -1).permute(0, 3, 1, 2)  # [1, n, 1, B], the channels last in memory
    found = nn.functional.conv2d(points, weight[:, :, None, None], bias)
    return found.permute(0, 2, 3, 1).reshape(examples, outputs)
