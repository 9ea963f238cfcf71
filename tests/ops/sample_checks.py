"""What holds of every call of every operator: a function for each statement, which test_operators.py calls in turn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from calls import assert_same_bits, call, operator, state, written
from emulation import fixture
from emulation.build import racing, sanitized
from samples.operators import GRADIENT_SAMPLES
from samples.read_backs import read_back
from samples.sample import LAST_SEGMENT, Sample, families, map_tensors, tensors_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchsparse_rec.compat._parity.reference import REFERENCES

# Half types are accumulated in float32: they may differ in the last bit that is kept.
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
}
ON_HOST = {name: k for family in families() for name, k in family.on_host.items()}
PRECISION = {name: dtype for family in families() for name, dtype in family.precision.items()}
BATCH = 3
# Kernels that report bad accesses or races are slow, and layouts, vmap and capture take them nowhere new.
WATCHED = sanitized() or racing() or "sanitized" in os.environ.get("TORCHSPARSE_REC_LIBRARY", "")

Results = tuple[Tensor, ...]


def checks(sample: Sample, device: str, kernels: str, results: Results) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield all that is to be checked of a call with these results, and the name of each check."""
    yield "reference", partial(equals_reference, sample, device, results)
    yield "odd addresses", partial(equals_other_layout, sample, device, results, at_odd_address)
    yield "expanded inputs", partial(expanded_equals_copied, sample, device)
    if kernels == "cpu":
        yield "fake tensors on CUDA", partial(fake_kernel_on_cuda, sample, results)
    if WATCHED:
        return
    yield "layout, with gaps", partial(equals_other_layout, sample, device, results, every_second)
    yield "layout, transposed", partial(equals_other_layout, sample, device, results, transposed)
    if kernels == "emulated":
        yield "capture", partial(only_what_reads_back_refuses_capture, sample)
    if kernels == "cpu":
        for place, name in batched_arguments(sample):
            yield f"vmap over {name}", partial(equals_a_loop, sample, results, place)


def assert_all_same_bits(actual: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for x, y in zip(actual, wanted, strict=True):
        assert_same_bits(x, y)


# ---- Meaning and layouts --------------------------------------------------------------------------------------------


def equals_reference(sample: Sample, device: str, results: Results) -> None:
    # A reference writes its arguments, too, so it is given copies.
    result = REFERENCES[sample.operator](*sample.to("cpu").arguments)
    references = result if isinstance(result, tuple) else (result,)
    assert len(results) == len(references)
    for k, (actual, wanted) in enumerate(zip(results, references, strict=True)):
        assert actual.device.type == ("cpu" if ON_HOST.get(sample.operator) == k else device)
        assert actual.is_contiguous()
        tolerance = TOLERANCES.get(PRECISION.get(sample.operator, wanted.dtype), {"rtol": 0, "atol": 0})
        torch.testing.assert_close(actual.cpu(), wanted, equal_nan=True, **tolerance)


def equals_other_layout(sample: Sample, device: str, results: Results, layout: Callable[[Tensor], Tensor]) -> None:
    """Pass inputs that lie otherwise in memory: at addresses unsuited to vector instructions, or not contiguous."""
    assert_all_same_bits(call(read_only(sample.to(device), layout)), results)


def expanded_equals_copied(sample: Sample, device: str) -> None:
    """Pass one number at stride 0, as ``sum().backward()`` does to a backward."""

    def expanded(x: Tensor) -> Tensor:
        return x.flatten()[0].expand(x.shape) if x.is_floating_point() and x.numel() else x

    wanted = call(read_only(sample.to(device), lambda x: expanded(x).clone(memory_format=torch.contiguous_format)))
    assert_all_same_bits(call(read_only(sample.to(device), expanded)), wanted)


def read_only(sample: Sample, change: Callable[[Tensor], Tensor]) -> Sample:
    """Return the sample with changed inputs and untouched outputs; tables' states may change only their address."""
    places = [*written(sample.operator), *(state(sample.operator) if change is not at_odd_address else ())]
    kept = [x for i in places for x in tensors_of(sample.arguments[i])]
    return sample.map_tensors(lambda x: x if any(x is y for y in kept) else change(x))


def at_odd_address(x: Tensor) -> Tensor:
    """Return a contiguous copy at an odd address."""
    buffer = x.new_empty(x.numel() + 1)
    buffer[1:] = x.reshape(-1)
    return buffer[1:].view(x.shape)


def every_second(x: Tensor) -> Tensor:
    """Return a view of the same values, two elements apart in memory, with garbage between them."""
    if x.dim() == 0:
        return x
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 99)
    wide[..., ::2] = x
    return wide[..., ::2]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() >= 2 else every_second(x)


# ---- Fake tensors and graphs ----------------------------------------------------------------------------------------


def fake_kernel_on_cuda(sample: Sample, results: Results) -> None:
    """Compare shapes, dtypes and devices without a GPU; sizes that depend on values are left open."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = call(sample.map_tensors(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda")))
    assert len(fakes) == len(results)
    for k, (fake, real) in enumerate(zip(fakes, results, strict=True)):
        assert fake.device.type == ("cpu" if ON_HOST.get(sample.operator) == k else "cuda")
        assert fake.dtype == real.dtype and fake.dim() == real.dim()
        sizes = [(f, r) for f, r in zip(fake.shape, real.shape, strict=True) if isinstance(f, int)]
        assert all(f == r for f, r in sizes), (fake.shape, real.shape)


def only_what_reads_back_refuses_capture(sample: Sample) -> None:
    """Hold docs/operators.md true, which says who reads back what; a CUDA graph can capture everything else."""
    arguments, what = sample.to("cpu").arguments, read_back(sample)
    empty = all(x.numel() == 0 for x in arguments if isinstance(x, Tensor))
    set_capturing = fixture.library().tsr_emulated_set_capturing
    set_capturing(1)  # the emulation says that the current stream is being captured
    try:
        if what is None or (empty and what == LAST_SEGMENT.what):  # of no segment ids there is no last one
            fixture.operator(sample.operator)(*arguments)
        else:
            with pytest.raises(ValueError, match=f": {what}.*must not happen while a CUDA graph is captured"):
                fixture.operator(sample.operator)(*arguments)
        fixture.check_errors()
    finally:
        set_capturing(0)


# ---- vmap -----------------------------------------------------------------------------------------------------------


def batched_arguments(sample: Sample) -> Iterator[tuple[int, str]]:
    """Yield the position and the name of each argument that may be batched."""
    # torch batches no COO tensors: transforms are shown the sparse_backward of their family.
    if not sample.operator.endswith("coo_backward"):
        for i, argument in enumerate(operator(sample.operator)._schema.arguments[: len(sample.arguments)]):
            if isinstance(sample.arguments[i], Tensor):
                yield i, argument.name


def _sized(sample: Sample, results: Results) -> Sample:
    """Return the sample with outputs of their final shape: the batch's common memory cannot be resized."""
    outputs = [x for i in written(sample.operator) for x in tensors_of(sample.arguments[i])]
    final = {id(x): result.shape for x, result in zip(reversed(outputs), reversed(results), strict=False)}
    return sample.map_tensors(lambda x: x if final.get(id(x), x.shape) == x.shape else x.new_zeros(final[id(x)]))


def _batch(x: Tensor) -> list[Tensor]:
    """Return a batch of different floats; integers stay alike, since they may be ids, whose order and range matter."""
    return [x.clone() * factor if x.is_floating_point() else x.clone() for factor in (1, 2, -1)]


def equals_a_loop(sample: Sample, results: Results, place: int) -> None:
    """Batch one argument along its last dimension, and with it the arguments that are written."""
    places = {place, *written(sample.operator)}
    given = _sized(sample, results)
    # The kernels write to contiguous memory alone, and state is such: there the batch is the first dimension.
    dim = 0 if written(sample.operator) or state(sample.operator) else -1

    def run(*arguments: object) -> Results:
        return call(replace(sample, arguments=arguments))

    def batched(choose: Callable[[list[Tensor]], Tensor]) -> list:
        arguments = enumerate(given.to("cpu").arguments)
        return [map_tensors(lambda x: choose(_batch(x)), x) if i in places else x for i, x in arguments]

    wanted = [run(*batched(itemgetter(n))) for n in range(BATCH)]
    in_dims = tuple(map_tensors(lambda _: dim, x) if i in places else None for i, x in enumerate(given.arguments))
    actual = torch.vmap(run, in_dims)(*batched(lambda batch: torch.stack(batch, dim)))
    assert_all_same_bits(actual, map(torch.stack, zip(*wanted, strict=True)))


# ---- opcheck and export ---------------------------------------------------------------------------------------------

# One resizes its output to a size that depends on values, the others' results are COO tensors with so many rows: for
# neither size torch.export has a name. Exported lookups take the sparse_backward of their family.
NOT_EXPORTED = {"sparse_segment_reduce_grad_v2_out", "embedding_coo_backward", "embedding_collection_coo_backward"}


class Call(torch.nn.Module):
    """A module that calls an operator with those of its arguments that are no tensors."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample

    def forward(self, *tensors: Tensor) -> Any:
        """Return the operator's results, and what it wrote."""
        given = iter(tensors)
        arguments = [map_tensors(lambda _: next(given), x) for x in self.sample.arguments]
        result = operator(self.sample.operator)(*arguments)
        changed = tuple(x for i in written(self.sample.operator) for x in tensors_of(arguments[i]))
        if not changed:
            return result
        return (*(result if isinstance(result, tuple) else tensors_of(result)), *changed)


def export(module: torch.nn.Module, tensors: list[Tensor], dynamic: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of export's own
        return torch.export.export(module, tuple(tensors), dynamic_shapes=dynamic)


def differentiable(sample: Sample) -> list[int]:
    """Return the positions of the arguments that are differentiable: all floats, if the operator has smooth samples."""
    if sample.operator not in GRADIENT_SAMPLES:
        return []
    if sample.operator in ("embedding_dense_backward", "embedding_sparse_backward"):
        weights, argmax = sample.arguments[3:5]
        if weights is not None or argmax is not None:
            return []
    return [i for i, x in enumerate(sample.arguments) if any(y.is_floating_point() for y in tensors_of(x))]


def opcheck(sample: Sample) -> None:
    for i in differentiable(sample):
        for x in tensors_of(sample.arguments[i]):
            x.requires_grad_()
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if sample.operator.endswith("coo_backward"):
        tests.pop()  # torch traces no COO tensor of unknown size: compilers are shown their family's sparse_backward
    torch.library.opcheck(operator(sample.operator), sample.arguments, test_utils=tests)


def exported_gives_the_same_bits(sample: Sample, device: str) -> None:
    tensors = [[x for argument in sample.to(device).arguments for x in tensors_of(argument)] for _ in range(2)]
    program = export(Call(sample), tensors[0], None)
    assert any(sample.operator in str(node.target) for node in program.graph.nodes)
    results = program.module()(*tensors[1])
    parts = results if isinstance(results, tuple) else (results,)
    assert_all_same_bits([x for part in parts for x in tensors_of(part)], call(sample.to(device)))
