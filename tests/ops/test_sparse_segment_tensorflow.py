"""The segment family against TensorFlow, its source: random problems, forward and both gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchsparse_rec import ops

pytestmark = [pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore")]

# The reductions' names in TensorFlow's raw operators.
REDUCTIONS = {"sum": "Sum", "mean": "Mean", "sqrt_n": "SqrtN"}
random_problems = settings(
    max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True)
class Problem:
    """One call, as NumPy arrays for TensorFlow and for torch; ``grad`` has a row per segment."""

    data: np.ndarray
    indices: np.ndarray
    segment_ids: np.ndarray
    num_segments: int | None
    grad: np.ndarray


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rows, items = draw(st.integers(1, 30)), draw(st.integers(1, 60))
    segments = draw(st.integers(1, 20))
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=2)))
    dtype = draw(st.sampled_from(["float16", "float32", "float64"]))
    index, segment = (draw(st.sampled_from(["int32", "int64"])) for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = np.sort(random.integers(0, segments, items)).astype(segment)
    num_segments = draw(st.none() | st.integers(segments, segments + 5))
    out_rows = int(ids[-1]) + 1 if num_segments is None else num_segments
    return Problem(
        random.standard_normal((rows, *shape)).astype(dtype),
        random.integers(0, rows, items).astype(index),
        ids,
        num_segments,
        random.standard_normal((out_rows, *shape)).astype(dtype),
    )


def assert_close(actual: torch.Tensor, wanted) -> None:
    """Compare to rounding: a few units of the last place, for sums of at most 60 terms of size 1."""
    wanted = wanted.numpy()
    assert actual.shape == wanted.shape and str(actual.dtype) == f"torch.{wanted.dtype}"
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-13}[str(wanted.dtype)]
    np.testing.assert_allclose(actual.numpy(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@random_problems
@given(problem=problems())
def test_forward(tensorflow, reduction: str, problem: Problem) -> None:
    arrays = problem.data, problem.indices, problem.segment_ids
    wanted = getattr(tensorflow.sparse, f"segment_{reduction}")(*arrays, num_segments=problem.num_segments)
    function = getattr(ops, f"sparse_segment_{reduction}")
    assert_close(function(*map(torch.from_numpy, arrays), problem.num_segments), wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@random_problems
@given(problem=problems())
def test_dense_gradient(tensorflow, reduction: str, problem: Problem) -> None:
    arrays, size = (problem.grad, problem.indices, problem.segment_ids), problem.data.shape[0]
    raw = getattr(tensorflow.raw_ops, f"SparseSegment{REDUCTIONS[reduction]}Grad")
    grad, indices, segment_ids = map(tensorflow.constant, arrays)
    wanted = raw(grad=grad, indices=indices, segment_ids=segment_ids, output_dim0=size)
    function = getattr(ops, f"sparse_segment_{reduction}_grad")
    assert_close(function(*map(torch.from_numpy, arrays), size), wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@random_problems
@given(problem=problems())
def test_sparse_gradient(tensorflow, reduction: str, problem: Problem) -> None:
    arrays, size = (problem.grad, problem.indices, problem.segment_ids), problem.data.shape[0]
    raw = getattr(tensorflow.raw_ops, f"SparseSegment{REDUCTIONS[reduction]}GradV2")
    # Constants, since raw operators take int64 arrays as int32.
    grad, indices, segment_ids = map(tensorflow.constant, arrays)
    wanted = raw(grad=grad, indices=indices, segment_ids=segment_ids, dense_output_dim0=size)
    values, rows = getattr(ops, f"sparse_segment_{reduction}_grad_v2")(*map(torch.from_numpy, arrays), size)
    assert_close(values, wanted[0])
    assert rows.numpy().dtype == wanted[1].numpy().dtype and rows.tolist() == wanted[1].numpy().tolist()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@random_problems
@given(problem=problems())
def test_autograd(tensorflow, reduction: str, problem: Problem) -> None:
    """Compare backward() through the forward on both sides."""
    tape_data = tensorflow.constant(problem.data)
    with tensorflow.GradientTape() as tape:
        tape.watch(tape_data)
        result = getattr(tensorflow.sparse, f"segment_{reduction}")(
            tape_data, problem.indices, problem.segment_ids, num_segments=problem.num_segments
        )
    wanted = tape.gradient(result, tape_data, output_gradients=tensorflow.constant(problem.grad))
    data = torch.from_numpy(problem.data).requires_grad_()
    arrays = torch.from_numpy(problem.indices), torch.from_numpy(problem.segment_ids)
    getattr(ops, f"sparse_segment_{reduction}")(data, *arrays, problem.num_segments).backward(
        torch.from_numpy(problem.grad)
    )
    assert_close(data.grad, wanted)


def test_bfloat16(tensorflow) -> None:
    """Compare in float32, since NumPy has no bfloat16: the rounding must be TensorFlow's."""
    random = np.random.default_rng(0)
    data, indices = random.standard_normal((50, 7)).astype("float32"), random.integers(0, 50, 400)
    ids = np.sort(random.integers(0, 30, 400))
    for reduction in REDUCTIONS:
        function = getattr(tensorflow.sparse, f"segment_{reduction}")
        half = tensorflow.cast(tensorflow.constant(data), tensorflow.bfloat16)
        wanted = tensorflow.cast(function(half, indices, ids), tensorflow.float32).numpy()
        given_ = torch.from_numpy(data).bfloat16()
        actual = getattr(ops, f"sparse_segment_{reduction}")(given_, torch.from_numpy(indices), torch.from_numpy(ids))
        np.testing.assert_allclose(actual.float().numpy(), wanted, rtol=2**-7, atol=1e-6)
