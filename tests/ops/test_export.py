"""torch.export with dynamic sizes: one program gives eager's bits at all; test_operators.py exports each operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import assert_same_bits
from devices import HARDWARE
from ops.sample_checks import export
from samples.compiled import COMPILED
from torch import Tensor


# Without ``nested``, which torch.export cannot trace, and ``offsets_to_row_ids``, whose size must follow its offsets.
class Function(torch.nn.Module):
    """A module that calls a public function."""

    def __init__(self, function: Any, sizes: list) -> None:
        super().__init__()
        self.function, self.sizes = function, sizes

    def forward(self, *tensors: Tensor) -> Any:
        """Call the function with the tensors and the fixed sizes."""
        return self.function(*tensors, *self.sizes)


@pytest.mark.parametrize("name", sorted(set(COMPILED) - {"nested", "offsets_to_row_ids"}))
@pytest.mark.parametrize("device", HARDWARE, indirect=True)
def test_one_exported_program_serves_all_sizes(name: str, device: str) -> None:
    """Make every dimension of every tensor dynamic."""
    function, arguments = COMPILED[name]

    def at(size: int) -> tuple[list[Tensor], list]:
        given = arguments(size)
        tensors = [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in given]
        return [x for x in tensors if isinstance(x, Tensor)], [x for x in given if not isinstance(x, Tensor)]

    # A size that is no tensor is fixed: large enough for all.
    tensors, fixed = at(4)
    module = Function(function, [10**4] * len(fixed))
    dynamic = tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in tensors)
    program = export(module, tensors, (dynamic,))
    for size in (4, 7, 13):
        given, _ = at(size)
        results, wanted = program.module()(*given), module(*given)
        pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (results, wanted)), strict=True)
        for actual, same in pairs:
            assert_same_bits(actual, same)
