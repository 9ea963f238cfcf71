"""What holds for every operator, over tests/samples.py: meaning, layouts, registrations, derivatives, compilation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiled_sparse_tensor import COMPILED_SPARSE_TENSORS
from cpu_only import CPU_ONLY
from sample import Sample, map_tensors, tensors_of
from samples import GRADIENT_SAMPLES, SAMPLES
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import REFERENCES

# What asks the machine instead of computing: tests/test_instruction_sets.py, and the test of check_errors below. What
# has no CUDA kernel: the samples run on all devices; tests/test_record*.py have its references, opcheck and layouts.
NOT_SAMPLED = {"cpu_level", "check_errors"} | set(CPU_ONLY)
# What reads the arguments that it writes.
UPDATES = {
    "row_update",
    "row_optimizer_update_",
    "row_optimizer_advance_",
    "row_optimizer_make_current_",
    "embedding_collection_update_",
    "table_find_or_insert_",
    "tables_find_or_insert_",
    "table_erase_",
    "table_rehash",
    "table_initialize_",
    "table_assign_",
    "count_min_sketch_",
}
# Positions of arguments that are read, and must be contiguous: the state of tables.
STATE = {
    "table_find": (0, 1),
    "table_find_or_insert_": (3,),
    "tables_find_or_insert_": (3,),
    "table_rehash": (0,),
    "table_lookup": (0, 1, 2),
}
# Half types are accumulated in float32: they may differ in the last bit that is kept.
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
}
ALL = [sample for samples in SAMPLES.values() for sample in samples]
REPRESENTATIVE = [sample for sample in ALL if sample.representative]
SMOOTH = [sample for samples in GRADIENT_SAMPLES.values() for sample in samples]

each_sample = pytest.mark.parametrize("sample", ALL, ids=str)
each_representative = pytest.mark.parametrize("sample", REPRESENTATIVE, ids=str)


def operator(name: str) -> Callable:
    return getattr(torch.ops.torchsparse_rec, name).default


def written(name: str) -> list[int]:
    """Positions of the arguments that the operator writes."""
    arguments = operator(name)._schema.arguments
    return [i for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]


def call(sample: Sample) -> tuple[Tensor, ...]:
    """The results, and what the operator writes: of an update, copies of those arguments."""
    places = written(sample.operator)
    arguments = list(sample.arguments)
    for i in places if sample.operator in UPDATES else ():
        arguments[i] = map_tensors(torch.clone, arguments[i])
    result = operator(sample.operator)(*arguments)
    results = result if isinstance(result, tuple) else (result,)
    return tuple(x for part in (*results, *(arguments[i] for i in places)) for x in tensors_of(part))


def expected(sample: Sample) -> tuple[Tensor, ...]:
    result = REFERENCES[sample.operator](*sample.arguments)
    return result if isinstance(result, tuple) else (result,)


def assert_same_bits(actual: Tensor, wanted: Tensor) -> None:
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (actual, wanted)]
    assert torch.equal(*bits), (actual, wanted)


def read_only(sample: Sample, change: Callable[[Tensor], Tensor]) -> Sample:
    """The sample with changed inputs and untouched outputs; of the state of tables only the address may differ."""
    kept = [x for i in written(sample.operator) for x in tensors_of(sample.arguments[i])]
    places = STATE.get(sample.operator, ()) if change is not _shifted else ()
    state = [x for i in places for x in tensors_of(sample.arguments[i])]
    return sample.map_tensors(lambda x: x if any(x is y for y in [*kept, *state]) else change(x))


# ---- Meaning and layouts --------------------------------------------------------------------------------------------


def test_every_schema_has_samples_and_a_reference() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchsparse_rec::")}
    schemas = {name.removeprefix("torchsparse_rec::") for name in names}
    assert schemas - NOT_SAMPLED == set(SAMPLES) == set(REFERENCES)
    assert all(any(sample.representative for sample in samples) for samples in SAMPLES.values())


@each_sample
def test_equals_reference(sample: Sample, device: str) -> None:
    results = call(sample.to(device))
    references = expected(sample)
    assert len(results) == len(references)
    for actual, wanted in zip(results, references, strict=True):
        assert actual.device.type == device
        assert actual.is_contiguous()
        tolerance = TOLERANCES.get(wanted.dtype, {"rtol": 0, "atol": 0})
        torch.testing.assert_close(actual.cpu(), wanted, equal_nan=True, **tolerance)


def test_check_errors_has_nothing_to_report(device: str) -> None:
    assert torch.ops.torchsparse_rec.check_errors.default(torch.empty(0, device=device)) is None


def _every_second(x: Tensor) -> Tensor:
    """The same values, two elements apart in memory, with garbage between them."""
    if x.dim() == 0:
        return x
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 99)
    wide[..., ::2] = x
    return wide[..., ::2]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() >= 2 else _every_second(x)


def _shifted(x: Tensor) -> Tensor:
    """Contiguous, at an address that no vector instruction likes."""
    buffer = x.new_empty(x.numel() + 1)
    buffer[1:] = x.reshape(-1)
    return buffer[1:].view(x.shape)


@pytest.mark.parametrize("layout", [_every_second, _transposed, _shifted])
@each_sample
def test_layout_of_inputs_does_not_matter(sample: Sample, layout: Callable[[Tensor], Tensor], device: str) -> None:
    wanted = call(sample.to(device))
    for actual, same in zip(call(read_only(sample.to(device), layout)), wanted, strict=True):
        assert_same_bits(actual, same)


@each_representative
def test_expanded_inputs(sample: Sample, device: str) -> None:
    """What ``sum().backward()`` hands to a backward: one number, at stride 0."""

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


@each_representative
def test_opcheck(sample: Sample, device: str) -> None:
    places = _differentiable(sample)
    arguments = sample.to(device).arguments
    for i in places:
        for x in tensors_of(arguments[i]):
            x.requires_grad_()
    torch.library.opcheck(operator(sample.operator), arguments)


@pytest.mark.parametrize("sample", REPRESENTATIVE, ids=str)
def test_fake_kernel_on_cuda(sample: Sample) -> None:
    """Shapes, dtypes and devices without a GPU; sizes that depend on values are left open."""
    results = call(sample.to("cpu"))
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = call(sample.map_tensors(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda")))
    assert len(fakes) == len(results)
    for fake, real in zip(fakes, results, strict=True):
        assert fake.device.type == "cuda" and fake.dtype == real.dtype and fake.dim() == real.dim()
        sizes = [(f, r) for f, r in zip(fake.shape, real.shape, strict=True) if isinstance(f, int)]
        assert all(f == r for f, r in sizes), (fake.shape, real.shape)


# ---- Derivatives ----------------------------------------------------------------------------------------------------

# The arguments that are differentiable, by position in the schema.
DIFFERENTIABLE = {
    "sparse_segment_reduce": (0,),
    "sparse_segment_reduce_grad": (0,),
    "sparse_segment_reduce_grad_v2": (0,),
    "segment_reduce": (0,),
    "segment_reduce_backward": (0, 1),
    "unsorted_segment_reduce": (0,),
    "unsorted_segment_reduce_backward": (0, 1),
    "sparse_fill_empty_rows": (1, 3),
    "sparse_fill_empty_rows_grad": (1,),
    "sparse_to_dense": (2, 3),
    "embedding": (0,),
    "embedding_bag": (0, 3),
    "embedding_dense_backward": (0, 3),
    "embedding_sparse_backward": (0, 3),
    "embedding_weights_backward": (0, 1, 4, 5),
    "pruned_bags": (2,),
    "embedding_bag_shards": (0, 3),
    "embedding_bag_shards_weights_backward": (0, 1, 4, 5),
    "clip_rows_backward": (0, 1),
    "embedding_collection": (0, 3),
    "embedding_collection_dense_backward": (0, 3),
    "embedding_collection_sparse_backward": (0, 3),
    "embedding_collection_weights_backward": (0, 1, 7, 8),
}


def _differentiable(sample: Sample) -> list[int]:
    return [i for i in DIFFERENTIABLE.get(sample.operator, ()) if sample.arguments[i] is not None]


def _as_function(sample: Sample) -> tuple[Callable, list[Tensor]]:
    """The floating results as a function of the differentiable arguments alone."""
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
    assert set(GRADIENT_SAMPLES) == set(DIFFERENTIABLE)


@pytest.mark.parametrize("sample", SMOOTH, ids=str)
def test_gradients(sample: Sample, device: str) -> None:
    function, inputs = _as_function(sample.to(device))
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("sample", SMOOTH, ids=str)
def test_gradients_of_gradients(sample: Sample, device: str) -> None:
    function, inputs = _as_function(sample.to(device))
    assert torch.autograd.gradgradcheck(function, inputs)


# ---- Compilation ----------------------------------------------------------------------------------------------------


def _segments(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes that never coincide, so that no two are taken for one symbol."""
    generator = torch.Generator().manual_seed(size)
    data = torch.randn(5 * size + 1, 2 * size + 1, generator=generator)
    indices = torch.randint(0, 5 * size + 1, (11 * size + 3,), generator=generator)
    return data, indices, torch.randint(0, 3 * size, (11 * size + 3,), generator=generator).sort().values


def _bags(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data, indices, ids = _segments(size)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(ids, minlength=3 * size).cumsum(0)])
    return data, indices, offsets, torch.rand(indices.shape, generator=torch.Generator().manual_seed(1)) + 0.5


def _rows(size: int, *segments: int) -> tuple:
    """Rows and their sorted segment ids, and the number of segments where one is given."""
    ids = _segments(size)[2]
    data = torch.randn(ids.shape[0], 2 * size + 1, generator=torch.Generator().manual_seed(size))
    return data, ids, *(3 * size + x for x in segments)


def _forward(size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    return *_segments(size), 3 * size + 4


def _backward(size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    data, indices, ids = _segments(size)
    return data[: 3 * size], indices, ids, 5 * size + 1


COMPILED: dict[str, tuple[Callable, Callable[[int], tuple]]] = {
    "sparse_segment_sum": (ops.sparse_segment_sum, _forward),
    "sparse_segment_mean": (ops.sparse_segment_mean, _forward),
    "sparse_segment_sqrt_n": (ops.sparse_segment_sqrt_n, _segments),
    "sparse_segment_sum_offsets": (
        lambda data, indices, offsets: ops.sparse_segment_sum(data, indices, offsets=offsets),
        lambda size: _bags(size)[:3],
    ),
    "sparse_segment_mean_grad": (ops.sparse_segment_mean_grad, _backward),
    "sparse_segment_sum_grad_v2": (
        ops.sparse_segment_sum_grad_v2,
        _backward,
    ),
    "segment_prod": (ops.segment_prod, lambda size: _rows(size, 7)),
    "segment_max_offsets": (
        lambda data, offsets: ops.segment_max(data, offsets=offsets),
        lambda size: (_rows(size)[0], _bags(size)[2]),
    ),
    "segment_mean": (ops.segment_mean, _rows),
    "unsorted_segment_min": (
        lambda data, ids: ops.unsorted_segment_min(data, ids, 2 * data.shape[1]),
        lambda size: (_rows(size)[0], _segments(size)[1] - 2 * size - 4),
    ),
    "unique": (ops.unique, lambda size: (_segments(size)[1],)),
    "unique_with_counts": (ops.unique_with_counts, lambda size: (_segments(size)[1],)),
    "unique_rows": (lambda x: ops.unique_with_counts(x, dim=1), lambda size: ((_segments(size)[0] > 1).long(),)),
    "to_hash_bucket_fast": (lambda x: ops.to_hash_bucket_fast(x, 1000), lambda size: (_segments(size)[1],)),
    "string_to_hash_bucket_fast": (
        lambda text, offsets: torch.ops.torchsparse_rec.string_to_hash_bucket_fast.default(text, offsets, 1000),
        lambda size: (torch.arange(7 * size, dtype=torch.uint8), torch.arange(0, 7 * size, 3)),
    ),
    "to_hash_bucket_strong": (lambda x: ops.to_hash_bucket_strong(x, 9, (1, 2)), lambda size: (_segments(size)[1],)),
    "fingerprint64": (ops.fingerprint64, lambda size: (_segments(size)[1],)),
    "cross_hashed": (
        lambda x, values, offsets: ops.cross_hashed([x, (values, offsets)], 1000),
        lambda size: (torch.arange(3 * size), *_bags(size)[1:3]),
    ),
    "cross_hashed_matrices": (
        lambda x, y: ops.cross_hashed([x, y], 1000),
        lambda size: (torch.arange(3 * size), torch.arange(6 * size).reshape(3 * size, 2)),
    ),
    **COMPILED_SPARSE_TENSORS,
    "embedding": (lambda weight, ids: ops.embedding(weight, ids, padding_idx=1), lambda size: _segments(size)[:2]),
    "embedding_bag_mean": (
        lambda weight, ids, offsets, w: ops.embedding_bag(weight, ids, offsets, per_sample_weights=w, mode="mean"),
        _bags,
    ),
    "embedding_bag_max": (
        lambda weight, ids, offsets: ops.embedding_bag(weight, ids, offsets, mode="max", scale_grad_by_freq=True),
        lambda size: _bags(size)[:3],
    ),
    "embedding_lookup": (
        lambda one, two, ids: ops.embedding_lookup([one, two], ids, partition_strategy="div", max_norm=1.0),
        lambda size: (_segments(size)[0], *_segments(size)[:2]),
    ),
    "embedding_lookup_sparse": (
        lambda weight, ids, rows, n: ops.embedding_lookup_sparse(weight, ids, rows, num_rows=n, combiner="sqrtn"),
        _forward,
    ),
    "safe_embedding_lookup_sparse": (
        lambda one, ids, offsets, w: ops.safe_embedding_lookup_sparse(
            [one, 2 * one], ids - 1, offsets=offsets, weights=w, default_id=1, max_norm=1.0
        ),
        _bags,
    ),
}


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
    """One graph, the gradients included, for every size; eager's bits."""
    _check_compiled(*COMPILED[name], "aot_eager", device)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from inside inductor
def test_compiles_with_inductor(device: str) -> None:
    def model(weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        pooled = ops.embedding_bag(weight, indices, offsets, per_sample_weights=weights, mode="sqrtn")
        return pooled + ops.sparse_segment_mean(weight, indices, offsets=offsets)

    _check_compiled(model, _bags, "inductor", device)
