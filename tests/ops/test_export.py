"""torch.export: every operator, with dynamic sizes; the exported program gives eager's bits, at other sizes too."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from calls import assert_same_bits, call, operator, written
from devices import HARDWARE
from samples.compiled import COMPILED
from samples.operators import REPRESENTATIVE
from samples.sample import Sample, tensors_of
from torch import Tensor

# One resizes its output to a size that depends on values, the others' results are COO tensors with so many rows: for
# neither size torch.export has a name. Exported lookups take the sparse_backward of their family.
NOT_EXPORTED = {"sparse_segment_reduce_grad_v2_out", "embedding_coo_backward", "embedding_collection_coo_backward"}
EXPORTED = [sample for sample in REPRESENTATIVE if sample.operator not in NOT_EXPORTED]


class Call(torch.nn.Module):
    """A module that calls an operator with those of its arguments that are no tensors."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample

    def forward(self, *tensors: Tensor) -> Any:
        """Return the operator's results, and what it wrote."""
        given = iter(tensors)
        arguments = [_filled(x, given) for x in self.sample.arguments]
        result = operator(self.sample.operator)(*arguments)
        changed = tuple(x for i in written(self.sample.operator) for x in tensors_of(arguments[i]))
        if not changed:
            return result
        return (*(result if isinstance(result, tuple) else tensors_of(result)), *changed)


def _filled(argument: Any, given: Any) -> Any:
    if isinstance(argument, Tensor):
        return next(given)
    return [_filled(x, given) for x in argument] if isinstance(argument, list) else argument


def _tensors(arguments: Any) -> list[Tensor]:
    flat = []
    for x in arguments:
        flat += [x] if isinstance(x, Tensor) else _tensors(x) if isinstance(x, list) else []
    return flat


def _export(module: torch.nn.Module, tensors: list[Tensor], dynamic: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of export's own
        return torch.export.export(module, tuple(tensors), dynamic_shapes=dynamic)


@pytest.mark.parametrize("sample", EXPORTED, ids=str)
@pytest.mark.parametrize("device", HARDWARE, indirect=True)
def test_exported_operator_gives_the_same_bits(sample: Sample, device: str) -> None:
    wanted = call(sample.to(device))
    program = _export(Call(sample), _tensors(sample.to(device).arguments), None)
    assert any(sample.operator in str(node.target) for node in program.graph.nodes)
    results = program.module()(*_tensors(sample.to(device).arguments))
    parts = results if isinstance(results, tuple) else (results,)
    for actual, same in zip((x for part in parts for x in tensors_of(part)), wanted, strict=True):
        assert_same_bits(actual, same)


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
    program = _export(module, tensors, (dynamic,))
    for size in (4, 7, 13):
        given, _ = at(size)
        results, wanted = program.module()(*given), module(*given)
        pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (results, wanted)), strict=True)
        for actual, same in pairs:
            assert_same_bits(actual, same)
