"""The family ``sparse_tensor`` against TensorFlow and its references, on random inputs."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.sparse_tensor import sparse_reorder, sparse_to_dense

with_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


ANY_INDEX = st.integers(-(2**63), 2**63 - 1)
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def index_lists(data: st.DataObject, shape: list[int], valid: bool) -> Tensor:
    columns = [st.integers(0, max(size - 1, 0)) if valid else ANY_INDEX for size in shape]
    rows = data.draw(st.lists(st.tuples(*columns), max_size=12)) if all(shape) else []
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), len(shape))


@pytest.mark.tensorflow
@with_tensorflow
@settings(max_examples=60)
@given(data=st.data())
def test_reshape_agrees_with_tensorflow(data: st.DataObject) -> None:
    import tensorflow as tf

    shape = data.draw(SIZES)
    new_shape = data.draw(st.permutations([*shape, 1]))
    indices = index_lists(data, shape, data.draw(st.booleans()))
    wanted = tf.raw_ops.SparseReshape(
        input_indices=indices.numpy(),
        input_shape=torch.tensor(shape).numpy(),
        new_shape=torch.tensor(new_shape).numpy(),
    )
    assert ops.sparse_reshape(indices, shape, new_shape).tolist() == wanted.output_indices.numpy().tolist()


@pytest.mark.tensorflow
@with_tensorflow
@settings(max_examples=60)
@given(data=st.data())
def test_fill_and_its_gradient_agree_with_tensorflow(data: st.DataObject) -> None:
    import tensorflow as tf

    shape = data.draw(SIZES)
    indices = index_lists(data, shape, True)
    values = torch.arange(1.0, indices.shape[0] + 1, requires_grad=True)
    default = torch.tensor(-1.0, requires_grad=True)
    filled = ops.sparse_fill_empty_rows(indices, values, shape[0], default)
    weights = torch.arange(1.0, filled.values.shape[0] + 1)
    (filled.values * weights).sum().backward()
    given_values, given_default = tf.constant(values.detach().numpy()), tf.constant(-1.0)
    with tf.GradientTape() as tape:
        tape.watch([given_values, given_default])
        wanted = tf.raw_ops.SparseFillEmptyRows(
            indices=indices.numpy(),
            values=given_values,
            dense_shape=torch.tensor(shape).numpy(),
            default_value=given_default,
        )
        total = tf.reduce_sum(wanted.output_values * weights.numpy())
    for x, y in zip(filled, wanted, strict=True):
        assert x.tolist() == y.numpy().tolist()
    for x, y in zip((values, default), tape.gradient(total, [given_values, given_default]), strict=True):
        assert x.grad is not None and x.grad.tolist() == y.numpy().tolist()


@settings(max_examples=60)
@given(data=st.data())
def test_reorder_and_dense_are_what_they_mean(data: st.DataObject) -> None:
    shape = data.draw(SIZES)
    anywhere, inside = index_lists(data, shape, False), index_lists(data, shape, True)
    for x, y in zip(
        torch.ops.torchsparse_rec.sparse_reorder.default(anywhere),
        sparse_reorder(anywhere),
        strict=True,
    ):
        assert torch.equal(x, y)
    arguments = (inside, shape, torch.arange(1, inside.shape[0] + 1), torch.tensor(0), False)
    dense = torch.ops.torchsparse_rec.sparse_to_dense.default(*arguments)
    assert torch.equal(dense, sparse_to_dense(*arguments))
