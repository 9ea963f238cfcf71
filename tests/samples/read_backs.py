"""
What operators copy from a CUDA device to the host and wait for, as the families' files say it. No other operator waits.

docs/operators.md shows the list, tests/ops/test_operators.py and tests/cuda/test_synchronisation.py hold it true.
"""

from __future__ import annotations

import torch
from calls import call
from samples.sample import Sample, families
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

READ_BACKS = {name: what for family in families() for name, what in family.read_backs.items()}


def read_back(sample: Sample) -> str | None:
    """Return what this call reads back, or None: where it depends on the arguments, the fake kernel knows."""
    known = READ_BACKS.get(sample.operator)
    if known is None or (known.unless and not _has_open_sizes(sample)):
        return None
    return known.what


def _has_open_sizes(sample: Sample) -> bool:
    """Say whether the sizes of the results depend on the values of the arguments."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = call(sample.map_tensors(lambda x: torch.empty(x.shape, dtype=x.dtype)))
    return any(isinstance(size, torch.SymInt) for fake in fakes for size in fake.shape)
