"""Rows by their indices: merged, dense, and their norm; and the same under TensorFlow's names."""

import math

import pytest
import torch
from devices import cpu_only

from torchsparse_rec import ops
from torchsparse_rec.compat import tensorflow as tf

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [(), (3,), (2, 2), (0,)])
def test_rows_of_an_index_add_up_in_order_of_appearance(dtype: torch.dtype, inner: tuple[int, ...]) -> None:
    indices = torch.tensor([5, -2, 5, 0, -2, 5])
    values = torch.arange(6 * math.prod(inner)).reshape(6, *inner).to(dtype)
    merged, distinct = ops.deduplicate_rows(values, indices)
    assert distinct.tolist() == [5, -2, 0] and merged.dtype == dtype
    expected = [values[indices == index].double().sum(0) for index in (5, -2, 0)]
    assert torch.equal(merged.double(), torch.stack(expected))
    dense = ops.indexed_slices_to_dense(values, indices, 7)
    assert dense.shape == (7, *inner) and torch.equal(dense[5], merged[0]) and torch.equal(dense[0], merged[2])
    assert int(dense.count_nonzero()) == int(merged[[0, 2]].count_nonzero())


def test_no_rows() -> None:
    values, indices = torch.empty(0, 3), torch.empty(0, dtype=torch.int32)
    merged = ops.deduplicate_rows(values, indices)
    assert merged.values.shape == (0, 3) and merged.indices.dtype == torch.int32
    assert ops.indexed_slices_to_dense(values, indices, 2).tolist() == [[0.0] * 3] * 2
    assert ops.indexed_slices_norm(values, indices).item() == 0.0


def test_norm_is_that_of_the_dense_tensor() -> None:
    values, indices = torch.randn(200, 5, generator=torch.Generator().manual_seed(1)), torch.arange(200) % 7
    norm = ops.indexed_slices_norm(values, indices)
    assert torch.allclose(norm, ops.indexed_slices_to_dense(values, indices, 7).norm())
    assert not torch.allclose(norm, values.norm())
    # Squares of half numbers overflow; float32 holds them.
    assert ops.indexed_slices_norm(torch.tensor([[300.0, 400.0]]).half(), torch.tensor([0])).item() == 500.0


def test_gradients() -> None:
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([3, -1, 3, 0, -1, 2])
    for function in (
        lambda x: ops.deduplicate_rows(x, indices).values,
        lambda x: ops.indexed_slices_to_dense(x, indices, 4),
        lambda x: ops.indexed_slices_norm(x, indices),
    ):
        assert torch.autograd.gradcheck(function, (values,))
        assert torch.autograd.gradgradcheck(function, (values,))


def test_errors_name_the_argument_and_the_value() -> None:
    for function in (ops.deduplicate_rows, lambda x, i: ops.indexed_slices_to_dense(x, i, 3), ops.indexed_slices_norm):
        for values, indices in ((torch.ones(2), torch.tensor([0])), (torch.ones(1), torch.tensor([[0]]))):
            with pytest.raises(ValueError, match=r"indices must have rank 1 and one index for each row of values"):
                function(values, indices)
        with pytest.raises(ValueError, match="Float"):
            function(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"indexed_slices_norm: values must be floating, got torch.int64"):
        ops.indexed_slices_norm(torch.ones(2, dtype=torch.int64), torch.tensor([0, 1]))


def test_clipping_takes_the_merged_norm() -> None:
    slices = tf.IndexedSlices([[3.0, 4.0], [3.0, 4.0]], [1, 1], [3, 2])
    assert tf.linalg.global_norm([slices, None, torch.tensor([0.0])]).item() == 10.0
    assert tf.linalg.global_norm([None]).item() == 0.0
    clipped = tf.clip_by_norm(slices, 5.0)
    assert clipped.indices.tolist() == [1] and clipped.values.tolist() == [[3.0, 4.0]]
    (scaled, nothing), norm = tf.clip_by_global_norm([slices, None], 5.0)
    assert nothing is None and norm.item() == 10.0
    assert tf.convert_to_tensor(scaled).tolist() == [[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]
    (scaled,), _ = tf.clip_by_global_norm([torch.tensor([math.inf])], 5.0)
    assert scaled.isnan().all()
    with pytest.raises(TypeError, match="t_list"):
        tf.linalg.global_norm(torch.ones(2))


@cpu_only
def test_clip_by_norm_of_zeros_has_a_gradient() -> None:
    x = torch.zeros(3, requires_grad=True)
    tf.clip_by_norm(x, 2.0).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 3
