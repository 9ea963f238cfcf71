"""Rules for every operator, over tests/samples: meaning, layouts, registrations, derivatives, compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from calls import assert_same_bits, call, operator, written
from cpu_only import CPU_ONLY, PLANNED
from devices import RARELY_EMULATED
from ops import sample_checks
from ops.sample_checks import NOT_EXPORTED, differentiable
from samples.compiled import COMPILED, bags
from samples.on_host import HOST_SAMPLES
from samples.operators import GRADIENT_SAMPLES, REPRESENTATIVE, SAMPLES, TWENTIES
from samples.sample import Sample, tensors_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import EXTREMES, REFERENCES, SUM

# Operators without samples: two that ask the machine (tested in test_instruction_sets.py and below), those without a
# CUDA kernel, since samples run on all devices (test_record*.py and test_candidates.py have their references, opcheck
# and layouts), and those of plans, which stand for others and are for eager calls alone (test_collection_plan.py).
NOT_SAMPLED = {"cpu_level", "row_optimizer_rule", "check_errors"} | set(CPU_ONLY) | PLANNED
SMOOTH = [sample for samples in GRADIENT_SAMPLES.values() for sample in samples]

# ---- Meaning --------------------------------------------------------------------------------------------------------


def test_every_schema_has_samples_and_a_reference() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchsparse_rec::")}
    schemas = {name.removeprefix("torchsparse_rec::") for name in names}
    assert schemas - NOT_SAMPLED == set(SAMPLES) == set(REFERENCES)
    assert set(HOST_SAMPLES) == set(CPU_ONLY)
    assert all(any(sample.representative for sample in samples) for samples in SAMPLES.values())


@pytest.mark.always("what every operator means")
@pytest.mark.parametrize(
    "sample", [pytest.param(sample, marks=pytest.mark.representative, id=str(sample)) for sample in REPRESENTATIVE]
)
def test_equals_reference(
    sample: Sample, device: str, request: pytest.FixtureRequest, subtests: pytest.Subtests
) -> None:
    """Call the operator, and check the results and what else is said of every call."""
    results = call(sample.to(device))
    for name, check in sample_checks.checks(sample, device, request.node.callspec.params["device"], results):
        with subtests.test(name):
            check()


@pytest.mark.parametrize("run", TWENTIES.values(), ids=TWENTIES)
def test_equals_reference_too(run: list[Sample], device: str) -> None:
    for sample in run:
        print(sample)  # pytest shows the last one if the test fails
        results = call(sample.to(device))
        sample_checks.equals_reference(sample, device, results)
        sample_checks.equals_other_layout(sample, device, results, sample_checks.at_odd_address)


def test_check_errors_has_nothing_to_report(device: str) -> None:
    assert torch.ops.torchsparse_rec.check_errors.default(torch.empty(0, device=device)) is None


# ---- Registrations --------------------------------------------------------------------------------------------------


@pytest.mark.representative
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck_and_export(name: str, device: str, request: pytest.FixtureRequest, subtests: pytest.Subtests) -> None:
    """Check an operator's representative samples: registrations against what calls do, then exported programs."""
    emulated = request.node.callspec.params["device"] == "emulated"
    for sample in (x for x in SAMPLES[name] if x.representative):
        with subtests.test(f"{sample}, opcheck"):
            sample_checks.opcheck(sample.to(device))
        if name not in NOT_EXPORTED and not emulated:
            with subtests.test(f"{sample}, export"):
                sample_checks.exported_gives_the_same_bits(sample, device)


def test_fake_kernel_of_a_scalar() -> None:
    with FakeTensorMode():
        (fake,) = call(Sample("unsorted_segment_reduce_backward", "", (torch.ones(3), None, torch.tensor(1), SUM)))
    assert fake.shape == ()


# ---- Derivatives ----------------------------------------------------------------------------------------------------


def _only_once(sample: Sample) -> bool:
    """Say whether a lookup's gradients have no derivative: those of weighted bags, of extremes and of collections."""
    if sample.operator not in ("embedding_bag", "embedding_bag_shards"):
        return sample.operator == "embedding_collection"
    return sample.arguments[3] is not None or sample.arguments[4] in EXTREMES


def _floats(sample: Sample) -> list[Tensor]:
    return [x for argument in sample.arguments for x in tensors_of(argument) if x.is_floating_point()]


def _as_function(sample: Sample) -> tuple[Callable, list[Tensor]]:
    """Return the floating results as a function of the differentiable arguments alone, and these arguments."""
    places = differentiable(sample)

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
