"""compat.tensorflow.math against TensorFlow, beyond the parity check: means that wrap, odd calls, complex products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torchsparse_rec.compat.tensorflow as ours

pytestmark = [pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore")]

SORTED = ("sum", "mean", "max", "min", "prod")
UNSORTED = (*SORTED, "sqrt_n")


def outcome(function: Any, arguments: tuple) -> Any:
    """Return the result as an array, or "error" if the call raises."""
    try:
        result = function(*arguments)
    except Exception:
        return "error"
    return result.resolve_conj().numpy() if isinstance(result, torch.Tensor) else result.numpy()


def assert_same(tensorflow, name: str, *arguments: Any) -> None:
    """Compare the function ``name`` on both sides; ``arguments`` are arrays and numbers."""
    theirs = outcome(getattr(tensorflow.math, name), arguments)
    given = tuple(torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in arguments)
    mine = outcome(getattr(ours.math, name), given)
    if isinstance(theirs, str) or isinstance(mine, str):
        assert isinstance(theirs, str) and isinstance(mine, str), (arguments, mine, theirs)
        return
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, (mine, theirs)
    np.testing.assert_allclose(mine, theirs, rtol=2e-3 if theirs.dtype == np.float16 else 1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
@pytest.mark.parametrize("rows", [127, 128, 200, 255, 257, 300])
def test_means_of_integers_that_wrap(dtype: str, rows: int, tensorflow) -> None:
    numbers = np.arange(rows).astype(dtype)
    assert_same(tensorflow, "segment_mean", numbers, np.zeros(rows, np.int32))
    assert_same(tensorflow, "unsorted_segment_mean", numbers, np.zeros(rows, np.int32), 2)


@pytest.mark.parametrize("reduction", SORTED)
def test_odd_sorted_calls(reduction: str, tensorflow) -> None:
    empty, ids = np.zeros((0, 3), np.float32), np.array([0, 0, 2])
    for arguments in (
        (empty, np.zeros(0, np.int32)),
        (np.zeros((3, 0), np.float32), ids),
        (np.zeros((3, 0), np.float32), ids[::-1].copy()),
        (empty, np.zeros(1, np.int32)),
        (5.0, ids[:1]),
        ([5.0], 0),
        ([5.0], [-1]),
        ([5.0, 1.0], [-1, 0]),
        ([5.0, 1.0], [1, 0]),
        ([5.0, 1.0], np.array([0, 1], np.uint32)),
        ([], []),
        ([1.0, 2.0], []),
        ([1.0, 2.0], [0, 0.5]),
        ([1.0, 2.0], [[0, 1]]),
        ([1, 2, -9], [0, 0, 0]),
        ([3, 2**40], [0, 0]),
        ([[[1.0], [2.0]]], [3]),
    ):
        assert_same(tensorflow, f"segment_{reduction}", *arguments)


@pytest.mark.parametrize("reduction", UNSORTED)
def test_odd_unsorted_calls(reduction: str, tensorflow) -> None:
    three = np.array([1, 2, 7], np.float32)
    for arguments in (
        (three, [0, 9, 1], 3),
        (np.zeros((3, 0), np.float32), [0, 9, 1], 3),
        (np.zeros((0, 3), np.float32), np.zeros(0, np.int32), 3),
        (np.zeros((3, 0), np.float32), [0, 9], 3),
        (three, [0, 1], 3),
        (three, np.array([3, 0, 3], np.uint32), 5),
        (5.0, 1, 3),
        ([5.0], [-2], 3),
        ([], [], 3),
        (three, [0, 1, 2], 2.0),
        (three, [0, 1, 2], -1),
        (three, [0, 1, 2], np.array([3])),
        (three, [0, 1, 2], np.array(3)),
        (three, [-1, -1, -1], 0),
        (np.array([[1.0, 2], [3, 4]]), [[0, 1], [-1, 1]], 2),
        (np.array([[1.0, 2], [3, 4]]), [[0], [1]], 2),
        (np.array([[1.0, 2], [3, 4]]), 1, 2),
        (np.array([-5, 3], np.int64), [1, 1], 3),
    ):
        assert_same(tensorflow, f"unsorted_segment_{reduction}", *arguments)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", ["segment_prod", "unsorted_segment_prod"])
def test_complex_products_and_their_gradients(name: str, dtype: str, tensorflow) -> None:
    """Multiply complex numbers in segments of 0 to 9 rows, with a zero in one segment."""
    generator = np.random.default_rng(0)
    ids = np.repeat(np.arange(10), np.arange(10)).astype(np.int32)
    numbers = (generator.normal(size=(ids.size, 2)) + 1j * generator.normal(size=(ids.size, 2))).astype(dtype)
    numbers[4] = 0
    rows: tuple[int, ...] = ()
    if name.startswith("unsorted"):
        order = generator.permutation(ids.size)
        ids, numbers, rows = ids[order], numbers[order], (12,)
        ids[3] = -1
    values = tensorflow.constant(numbers)
    with tensorflow.GradientTape() as tape:
        tape.watch(values)
        theirs = getattr(tensorflow.math, name)(values, ids, *rows)
    # TensorFlow's gradients of reduce_prod and of x * y have the conjugate, and this one lacks it.
    wanted = tape.gradient(theirs, values, output_gradients=tensorflow.ones_like(theirs)).numpy().conj()
    mine = torch.from_numpy(numbers).requires_grad_()
    result = getattr(ours.math, name)(mine, torch.from_numpy(ids), *rows)
    result.backward(torch.ones_like(result))
    tolerance = 1e-5 if dtype == "complex64" else 1e-13
    np.testing.assert_allclose(result.detach().numpy(), theirs.numpy(), rtol=tolerance, atol=tolerance)
    assert mine.grad is not None
    np.testing.assert_allclose(mine.grad.resolve_conj().numpy(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["segment_sum", "segment_mean", "segment_prod", "unsorted_segment_sum"])
def test_a_complex_scalar_has_no_rows(name: str, tensorflow) -> None:
    """Refuse a complex scalar as a real one, although its real and imaginary parts are stored as one more dimension."""
    size = () if name.startswith("segment") else (2,)
    assert_same(tensorflow, name, np.array(1 + 2j, np.complex64), np.array([0, 1]), *size)
    with pytest.raises(ValueError, match="segment_reduce: (data must have rank >= 1|the shape of data)"):
        getattr(ours.math, name)(torch.tensor(1 + 2j), torch.tensor([0, 1]), *size)
