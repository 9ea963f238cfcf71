"""The segment reductions without indices against TensorFlow, their source: random problems and their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchsparse_rec import ops

pytestmark = [pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore")]

random_problems = settings(
    max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
REDUCTIONS = ("sum", "mean", "max", "min", "prod")
UNSORTED = (*REDUCTIONS, "sqrt_n")


@st.composite
def problems(draw: st.DrawFn, unsorted: bool = False) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw data with ties and zeros, segment ids, and the number of segments."""
    segments = draw(st.integers(1, 12))
    rows = draw(st.lists(st.integers(1, 6), min_size=0, max_size=2) if unsorted else st.just([]))
    rows = [draw(st.integers(1, 40)), *rows]
    shape = [*rows, *draw(st.lists(st.integers(1, 9), max_size=2))]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    data = (random.integers(-6, 7, shape) / 4).astype(dtype)
    ids = random.integers(-2 if unsorted else 0, segments, rows)
    ids = ids if unsorted else np.sort(ids, axis=0)
    return data, ids.astype(draw(st.sampled_from(["int32", "int64"]))), segments


def check(tensorflow, ours, theirs, data: np.ndarray) -> None:
    """Compare values and gradients; sums of at most 1440 quarters are exact, means and products are not."""
    x, y = torch.from_numpy(data).requires_grad_(), tensorflow.constant(data)
    with tensorflow.GradientTape() as tape:
        tape.watch(y)
        wanted = theirs(y)
    result = ours(x)
    tolerance = 1e-5 if data.dtype == np.float32 else 1e-13
    assert tuple(result.shape) == tuple(wanted.shape) and str(result.dtype) == f"torch.{wanted.dtype.name}"
    np.testing.assert_allclose(result.detach().numpy(), wanted.numpy(), rtol=tolerance, atol=tolerance)
    upstream = np.random.default_rng(0).standard_normal(result.shape).astype(data.dtype)
    result.backward(torch.from_numpy(upstream))
    gradient = tape.gradient(wanted, y, output_gradients=tensorflow.constant(upstream))
    scale = np.abs(gradient.numpy()).max(initial=1.0)
    np.testing.assert_allclose(x.grad.numpy(), gradient.numpy(), rtol=10 * tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@random_problems
@given(problem=problems())
def test_sorted(problem: tuple[np.ndarray, np.ndarray, int], reduction: str, tensorflow) -> None:
    data, ids, _ = problem
    check(
        tensorflow,
        lambda x: getattr(ops, f"segment_{reduction}")(x, torch.from_numpy(ids)),
        lambda y: getattr(tensorflow.math, f"segment_{reduction}")(y, ids),
        data,
    )


@pytest.mark.parametrize("reduction", UNSORTED)
@random_problems
@given(problem=problems(unsorted=True))
def test_unsorted(problem: tuple[np.ndarray, np.ndarray, int], reduction: str, tensorflow) -> None:
    data, ids, segments = problem
    check(
        tensorflow,
        lambda x: getattr(ops, f"unsorted_segment_{reduction}")(x, torch.from_numpy(ids), segments),
        lambda y: getattr(tensorflow.math, f"unsorted_segment_{reduction}")(y, ids, segments),
        data,
    )


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integers(dtype: str, tensorflow) -> None:
    random, info = np.random.default_rng(1), np.iinfo(dtype)
    data = random.integers(info.min, info.max, (60, 3), dtype=dtype, endpoint=True)
    ids = np.sort(random.integers(0, 9, 60))
    for reduction in REDUCTIONS:
        wanted = getattr(tensorflow.math, f"segment_{reduction}")(data, ids).numpy()
        result = getattr(ops, f"segment_{reduction}")(torch.from_numpy(data), torch.from_numpy(ids))
        assert np.array_equal(result.numpy(), wanted) and str(wanted.dtype) == dtype
        if reduction != "mean":
            wanted = getattr(tensorflow.math, f"unsorted_segment_{reduction}")(data, ids - 1, 12).numpy()
            result = getattr(ops, f"unsorted_segment_{reduction}")(
                torch.from_numpy(data), torch.from_numpy(ids - 1), 12
            )
            assert np.array_equal(result.numpy(), wanted)
