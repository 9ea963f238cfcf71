"""Rules for every operator, over tests/samples: meaning, layouts, registrations, derivatives, compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from calls import assert_same_bits, call, operator, state, written
from cpu_only import CPU_ONLY
from devices import RARELY_EMULATED
from samples.compiled import COMPILED, bags
from samples.operators import GRADIENT_SAMPLES, REPRESENTATIVE, SAMPLES, TWENTIES
from samples.sample import Sample, families, tensors_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import MAX, REFERENCES, SUM

# Operators without samples: two that ask the machine (tested in test_instruction_sets.py and below), and those without
# a CUDA kernel, since samples run on all devices (test_record*.py have their references, opcheck and layouts).
NOT_SAMPLED = {"cpu_level", "check_errors"} | set(CPU_ONLY)
# Half types are accumulated in float32: they may differ in the last bit that is kept.
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
}
ON_HOST = {name: k for family in families() for name, k in family.on_host.items()}
SMOOTH = [sample for samples in GRADIENT_SAMPLES.values() for sample in samples]


each_representative = pytest.mark.parametrize(
    "sample", [pytest.param(sample, marks=pytest.mark.representative, id=str(sample)) for sample in REPRESENTATIVE]
)


def expected(sample: Sample) -> tuple[Tensor, ...]:
    # A reference writes its arguments, too, so it is given copies.
    result = REFERENCES[sample.operator](*sample.to("cpu").arguments)
    return result if isinstance(result, tuple) else (result,)


def read_only(sample: Sample, change: Callable[[Tensor], Tensor]) -> Sample:
    """Return the sample with changed inputs and untouched outputs; tables' states may change only their address."""
    places = [*written(sample.operator), *(state(sample.operator) if change is not _shifted else ())]
    kept = [x for i in places for x in tensors_of(sample.arguments[i])]
    return sample.map_tensors(lambda x: x if any(x is y for y in kept) else change(x))


# ---- Meaning and layouts --------------------------------------------------------------------------------------------


def test_every_schema_has_samples_and_a_reference() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchsparse_rec::")}
    schemas = {name.removeprefix("torchsparse_rec::") for name in names}
    assert schemas - NOT_SAMPLED == set(SAMPLES) == set(REFERENCES)
    assert all(any(sample.representative for sample in samples) for samples in SAMPLES.values())


@each_representative
def test_equals_reference(sample: Sample, device: str) -> None:
    _check_against_reference(sample, device)


@pytest.mark.parametrize("run", TWENTIES.values(), ids=TWENTIES)
def test_equals_reference_too(run: list[Sample], device: str) -> None:
    for sample in run:
        print(sample)  # pytest shows the last one if the test fails
        _check_against_reference(sample, device)


def _check_against_reference(sample: Sample, device: str) -> None:
    """Compare with the reference's numbers; inputs at addresses unsuited to vector instructions give the same bits."""
    results = call(sample.to(device))
    references = expected(sample)
    assert len(results) == len(references)
    for k, (actual, wanted) in enumerate(zip(results, references, strict=True)):
        assert actual.device.type == ("cpu" if ON_HOST.get(sample.operator) == k else device)
        assert actual.is_contiguous()
        tolerance = TOLERANCES.get(wanted.dtype, {"rtol": 0, "atol": 0})
        torch.testing.assert_close(actual.cpu(), wanted, equal_nan=True, **tolerance)
    for actual, same in zip(call(read_only(sample.to(device), _shifted)), results, strict=True):
        assert_same_bits(actual, same)


def test_check_errors_has_nothing_to_report(device: str) -> None:
    assert torch.ops.torchsparse_rec.check_errors.default(torch.empty(0, device=device)) is None


def _shifted(x: Tensor) -> Tensor:
    """Return a contiguous copy at an odd address."""
    buffer = x.new_empty(x.numel() + 1)
    buffer[1:] = x.reshape(-1)
    return buffer[1:].view(x.shape)


def _every_second(x: Tensor) -> Tensor:
    """Return a view of the same values, two elements apart in memory, with garbage between them."""
    if x.dim() == 0:
        return x
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 99)
    wide[..., ::2] = x
    return wide[..., ::2]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() >= 2 else _every_second(x)


# Operators copy inputs of both layouts before a kernel sees them: one sample of a kind is enough to test that.
@pytest.mark.parametrize("layout", [_every_second, _transposed])
@each_representative
def test_layout_of_inputs_does_not_matter(sample: Sample, layout: Callable[[Tensor], Tensor], device: str) -> None:
    wanted = call(sample.to(device))
    for actual, same in zip(call(read_only(sample.to(device), layout)), wanted, strict=True):
        assert_same_bits(actual, same)


@each_representative
def test_expanded_inputs(sample: Sample, device: str) -> None:
    """Pass one number at stride 0, as ``sum().backward()`` does to a backward."""

    def expanded(x: Tensor) -> Tensor:
        return x.flatten()[0].expand(x.shape) if x.is_floating_point() and x.numel() else x

    wanted = call(read_only(sample.to(device), lambda x: expanded(x).clone(memory_format=torch.contiguous_format)))
    for actual, same in zip(call(read_only(sample.to(device), expanded)), wanted, strict=True):
        assert_same_bits(actual, same)


# ---- Registrations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted([*SAMPLES, *CPU_ONLY]))
def test_operator_has_a_cpu_kernel_and_a_fake_kernel(name: str) -> None:
    qualified = f"torchsparse_rec::{name}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU")
    assert torch._library.simple_registry.singleton.find(qualified).fake_impl.kernel is not None


# Registrations are the CPU's in emulation, too.
@pytest.mark.parametrize("device", RARELY_EMULATED, indirect=True)
@each_representative
def test_opcheck(sample: Sample, device: str) -> None:
    _opcheck(sample.to(device))


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck_in_emulation(name: str, emulated: Callable[[], int]) -> None:
    _opcheck(next(sample for sample in SAMPLES[name] if sample.representative).to("cpu"))


def _opcheck(sample: Sample) -> None:
    for i in _differentiable(sample):
        for x in tensors_of(sample.arguments[i]):
            x.requires_grad_()
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if sample.operator.endswith("coo_backward"):
        checks.pop()  # torch traces no COO tensor of unknown size: compilers are shown their family's sparse_backward
    torch.library.opcheck(operator(sample.operator), sample.arguments, test_utils=checks)


@each_representative
def test_fake_kernel_on_cuda(sample: Sample) -> None:
    """Compare shapes, dtypes and devices without a GPU; sizes that depend on values are left open."""
    results = call(sample.to("cpu"))
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = call(sample.map_tensors(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda")))
    assert len(fakes) == len(results)
    for k, (fake, real) in enumerate(zip(fakes, results, strict=True)):
        assert fake.device.type == ("cpu" if ON_HOST.get(sample.operator) == k else "cuda")
        assert fake.dtype == real.dtype and fake.dim() == real.dim()
        sizes = [(f, r) for f, r in zip(fake.shape, real.shape, strict=True) if isinstance(f, int)]
        assert all(f == r for f, r in sizes), (fake.shape, real.shape)


def test_fake_kernel_of_a_scalar() -> None:
    with FakeTensorMode():
        (fake,) = call(Sample("unsorted_segment_reduce_backward", "", (torch.ones(3), None, torch.tensor(1), SUM)))
    assert fake.shape == ()


# ---- Derivatives ----------------------------------------------------------------------------------------------------


def _only_once(sample: Sample) -> bool:
    """Say whether a lookup's gradients have no derivative: those of weighted bags, of maxima and of collections."""
    if sample.operator not in ("embedding_bag", "embedding_bag_shards"):
        return sample.operator == "embedding_collection"
    return sample.arguments[3] is not None or sample.arguments[4] == MAX


def _floats(sample: Sample) -> list[Tensor]:
    return [x for argument in sample.arguments for x in tensors_of(argument) if x.is_floating_point()]


def _differentiable(sample: Sample) -> list[int]:
    """Return the positions of the arguments that are differentiable: all floats, if the operator has smooth samples."""
    if sample.operator not in GRADIENT_SAMPLES:
        return []
    if sample.operator in ("embedding_dense_backward", "embedding_sparse_backward"):
        weights, argmax = sample.arguments[3:5]
        if weights is not None or argmax is not None:
            return []
    return [i for i, x in enumerate(sample.arguments) if any(y.is_floating_point() for y in tensors_of(x))]


def _as_function(sample: Sample) -> tuple[Callable, list[Tensor]]:
    """Return the floating results as a function of the differentiable arguments alone, and these arguments."""
    places = _differentiable(sample)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        rest = iter(values)

        def given(i: int, x: object) -> object:
            if i not in places:
                return x
            return [next(rest) for _ in x] if isinstance(x, list) else next(rest)

        arguments = [given(i, x) for i, x in enumerate(sample.arguments)]
        results = operator(sample.operator)(*arguments)
        parts = results if isinstance(results, tuple) else (results,)
        return tuple(x for part in parts for x in tensors_of(part) if x.is_floating_point())

    return function, [x.clone().requires_grad_() for i in places for x in tensors_of(sample.arguments[i])]


def test_every_differentiable_operator_has_smooth_samples() -> None:
    """Find no derivative, or one that is refused, for all other operators."""
    for sample in REPRESENTATIVE:
        if sample.operator in GRADIENT_SAMPLES:
            continue
        given = sample.to("cpu")
        for x in _floats(given):
            x.requires_grad_(not written(sample.operator))
        results = [x.to_dense().sum() for x in call(given) if x.requires_grad]
        if results:
            with pytest.raises(RuntimeError, match="no second derivatives"):
                sum(results).backward()


@pytest.mark.parametrize("sample", SMOOTH, ids=str)
def test_gradients(sample: Sample, device: str) -> None:
    function, inputs = _as_function(sample.to(device))
    assert torch.autograd.gradcheck(function, inputs)


# Second gradients consist of kernels that other tests emulate.
@pytest.mark.parametrize("device", RARELY_EMULATED, indirect=True)
@pytest.mark.parametrize("sample", [sample for sample in SMOOTH if not _only_once(sample)], ids=str)
def test_gradients_of_gradients(sample: Sample, device: str) -> None:
    function, inputs = _as_function(sample.to(device))
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("sample", list(filter(_only_once, SMOOTH)), ids=str)
def test_second_derivatives_are_refused(sample: Sample) -> None:
    """Raise, with the way out, for the gradient of each input and with sparse gradients too: never zeros or None."""
    for sparse in (False, True):
        function, inputs = _as_function(replace(sample, arguments=(*sample.arguments[:-1], sparse)))
        loss = sum(x.square().sum() for x in function(*inputs))
        for gradient in torch.autograd.grad(loss, inputs, create_graph=True):
            with pytest.raises(RuntimeError, match=r"^embedding_\w+_backward: .* no second .* ops.segment_sum"):
                torch.autograd.grad(gradient.to_dense().sum(), inputs, retain_graph=True)


# ---- Compilation ----------------------------------------------------------------------------------------------------


def _results_and_gradients(function: Callable, arguments: tuple, device: str) -> list[Tensor]:
    moved = [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in arguments]
    inputs = [x.requires_grad_() for x in moved if isinstance(x, Tensor) and x.is_floating_point()]
    results = function(*moved)
    results = list(results) if isinstance(results, tuple) else [results]
    for result in results:
        if result.requires_grad:
            result.backward(torch.ones_like(result))
    return [x.detach() for x in results] + [x.grad for x in inputs]


def _check_compiled(function: Callable, arguments: Callable[[int], tuple], backend: str, device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for size in (4, 7, 13):
            wanted = _results_and_gradients(function, arguments(size), device)
            actual = _results_and_gradients(compiled, arguments(size), device)
            for x, y in zip(actual, wanted, strict=True):
                assert_same_bits(x, y)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_once_for_all_sizes(name: str, device: str) -> None:
    """Compile one graph for every size, the gradients included; it gives the bits of eager mode."""
    _check_compiled(*COMPILED[name], "aot_eager", device)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from inside inductor
def test_compiles_with_inductor(device: str) -> None:
    def model(weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        pooled = ops.embedding_bag(weight, indices, offsets, per_sample_weights=weights, mode="sqrtn")
        return pooled + ops.sparse_segment_mean(weight, indices, offsets=offsets)

    _check_compiled(model, bags, "inductor", device)
