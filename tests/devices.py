"""The values of the fixtures ``device`` and ``kernels``, for tests that need fewer of them."""

from __future__ import annotations

import pytest
import torch

# The CUDA kernels run without a GPU, in the CPU kernels' place: see tests/emulation.
KERNELS = ["cpu", "emulated"]
_CUDA = [pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else []
DEVICES = [*KERNELS, *_CUDA]
HARDWARE = ["cpu", *_CUDA]
RARELY_EMULATED = [*HARDWARE, pytest.param("emulated", marks=pytest.mark.slow)]
# For a test of properties of the CPU's kernels alone, in a file whose other tests run on both kinds of kernels.
cpu_only = pytest.mark.parametrize("kernels", ["cpu"], indirect=True)
