"""Converters to and from TensorFlow's dense, sparse, sliced and ragged tensors."""

import importlib.util
import math
from itertools import product

import numpy as np
import pytest
import torch

from torchsparse_rec.compat import converters
from torchsparse_rec.compat._parity.case import COMPLEX, FLOATS, INTEGERS

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed: nothing to convert to"
    ),
]

DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]


def name(dtype):
    return str(dtype).removeprefix("torch.")


def aligned(count, offset=0, dtype=torch.float32):
    """Return ``count`` numbers whose memory begins ``offset`` elements after a multiple of 64 bytes."""
    memory = torch.arange(count + offset + 64).to(dtype)
    start = (-memory.data_ptr() % 64) // memory.element_size()
    return memory[start + offset : start + offset + count]


# ---- Dense ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_there_and_back(dtype):
    for shape, share in product([(), (0,), (5,), (3, 0, 2), (3, 4)], [True, False]):
        tensor = (torch.arange(math.prod(shape)) % 2).to(dtype).reshape(shape)
        converted = converters.tensor_to_tensorflow(tensor, share=share)
        assert converted.dtype.name == name(dtype) and converted.shape == shape
        back = converters.tensor_to_torch(converted, share=share)
        assert back.dtype == dtype and torch.equal(back, tensor), (shape, share)


def test_bfloat16_keeps_its_bits(tensorflow):
    numbers = torch.tensor([1.0, -0.0, 3.140625, float("inf"), 1e-40], dtype=torch.bfloat16)
    for share in (True, False):
        back = converters.tensor_to_torch(converters.tensor_to_tensorflow(numbers, share=share), share=share)
        assert torch.equal(back.view(torch.int16), numbers.view(torch.int16))


def test_aligned_memory_is_shared_and_other_memory_copied(tensorflow):
    shared = aligned(256)
    converted = converters.tensor_to_tensorflow(shared)
    shared[3] = -1
    assert converted[3].numpy() == -1
    for tensor in (aligned(256, offset=1), aligned(256, offset=8), aligned(256).reshape(16, 16).t()):
        converted = converters.tensor_to_tensorflow(tensor)
        before = tensor.clone()
        tensor.fill_(-1)
        # TensorFlow would end the process here: it would take this memory for aligned.
        doubled = converted + converted
        assert doubled.numpy().tolist() == (2 * before).tolist()
    unshared = aligned(256)
    converted = converters.tensor_to_tensorflow(unshared, share=False)
    unshared[3] = -1
    assert converted[3].numpy() == 3


def test_tensorflow_to_torch_copies_unless_told(tensorflow):
    source = tensorflow.zeros([256])
    copied = converters.tensor_to_torch(source)
    copied[0] = 1
    assert source[0].numpy() == 0
    shared = converters.tensor_to_torch(source, share=True)
    shared[0] = 1
    assert source[0].numpy() == 1
    variable = tensorflow.Variable([1.0, 2.0])
    assert converters.tensor_to_torch(variable).tolist() == [1.0, 2.0]


def test_tensors_that_need_a_gradient_or_are_views(tensorflow):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    assert converters.tensor_to_tensorflow(weight).numpy().tolist() == [[1.0] * 3] * 2
    number = torch.tensor([1 + 2j])
    assert converters.tensor_to_tensorflow(number.conj()).numpy().tolist() == [1 - 2j]
    assert converters.tensor_to_tensorflow(number.conj().imag).numpy().tolist() == [-2.0]
    assert converters.tensor_to_tensorflow(torch.ones(1, 3).expand(2, 3)).numpy().tolist() == [[1.0] * 3] * 2


def test_dtypes_that_the_other_side_lacks(tensorflow):
    with pytest.raises(TypeError, match="TensorFlow has no dtype for torch.float8_e5m2"):
        converters.tensor_to_tensorflow(torch.zeros(2, dtype=torch.float8_e5m2))
    with pytest.raises(TypeError, match="torch has no dtype for TensorFlow's qint8"):
        converters.tensor_to_torch(tensorflow.cast([1], tensorflow.qint8))
    with pytest.raises(TypeError, match="hash them to ids first"):
        converters.tensor_to_torch(tensorflow.constant(["a"]), share=True)
    with pytest.raises(TypeError, match="strided"):
        converters.tensor_to_tensorflow(torch.eye(2).to_sparse())


# ---- tf.SparseTensor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64], ids=name)
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 2), (0, 3)])
def test_sparse_there_and_back(shape, dtype, share):
    dense = (torch.arange(int(np.prod(shape))) % 2).reshape(shape).to(dtype)
    sparse = dense.to_sparse()
    converted = converters.sparse_tensor_to_tensorflow(sparse, share=share)
    assert converted.dense_shape.numpy().tolist() == list(shape)
    assert converted.values.dtype.name == name(dtype)
    back = converters.sparse_tensor_to_torch(converted, share=share)
    assert back.dtype == dtype
    assert back.is_coalesced() == (back._nnz() < 2)  # torch needs no promise about a single entry
    assert torch.equal(back.to_dense(), dense)
    indices, values, dense_shape = converters.sparse_tensor_to_triple(converted, share=share)
    again = converters.triple_to_tensorflow(indices, values, dense_shape, share=share)
    assert again.indices.numpy().tolist() == converted.indices.numpy().tolist()
    assert torch.equal(converters.sparse_tensor_to_torch(again).to_dense(), dense)


def test_sparse_keeps_order_and_duplicates(tensorflow):
    source = tensorflow.SparseTensor([[1, 0], [0, 2], [1, 0]], [1.0, 2.0, 3.0], [2, 3])
    tensor = converters.sparse_tensor_to_torch(source)
    assert tensor._indices().tolist() == [[1, 0, 1], [0, 2, 0]] and tensor._values().tolist() == [1.0, 2.0, 3.0]
    back = converters.sparse_tensor_to_tensorflow(tensor)
    assert back.indices.numpy().tolist() == [[1, 0], [0, 2], [1, 0]]


def test_sparse_without_entries(tensorflow):
    empty = converters.triple_to_tensorflow(torch.empty(0, 2, dtype=torch.int64), torch.empty(0).bool(), [2, 3])
    tensor = converters.sparse_tensor_to_torch(empty)
    assert tensor.shape == (2, 3) and tensor.dtype == torch.bool and tensor._nnz() == 0


def test_sparse_errors(tensorflow):
    strings = tensorflow.SparseTensor([[0, 0]], ["a"], [1, 1])
    for convert in (converters.sparse_tensor_to_torch, converters.sparse_tensor_to_triple):
        with pytest.raises(TypeError, match="torch has no strings: hash them to ids first"):
            convert(strings)
    with pytest.raises(ValueError, match="found index 5"):
        converters.sparse_tensor_to_torch(tensorflow.SparseTensor([[0, 5]], [1.0], [2, 3]))
    with pytest.raises(TypeError, match="sparse COO"):
        converters.sparse_tensor_to_tensorflow(torch.eye(2))
    with pytest.raises(ValueError, match="indexed_slices_to_tensorflow"):
        converters.sparse_tensor_to_tensorflow(torch.ones(2, 3).to_sparse(1))
    with pytest.raises(ValueError, match=r"got \[2, 2\], \[1\] and \[2\]"):
        converters.triple_to_tensorflow(torch.zeros(2, 2), torch.zeros(1), [2, 3])


# ---- tf.IndexedSlices -----------------------------------------------------------------------------------------------


def test_a_gradient_of_an_embedding_there_and_back(tensorflow):
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([3, 1, 3])).sum().backward()
    gradient = embedding.weight.grad
    slices = converters.indexed_slices_to_tensorflow(gradient)
    assert slices.indices.numpy().tolist() == [3, 1, 3]
    assert slices.dense_shape.numpy().tolist() == [5, 2]
    back = converters.indexed_slices_to_torch(slices)
    assert not back.is_coalesced() and back._indices().tolist() == [[3, 1, 3]]
    assert torch.equal(back.to_dense(), gradient.to_dense())
    dense = tensorflow.convert_to_tensor(slices)
    assert torch.equal(converters.tensor_to_torch(dense), gradient.to_dense())


def test_a_gradient_of_tensorflow(tensorflow):
    variable = tensorflow.Variable(tensorflow.ones([4, 2]))
    with tensorflow.GradientTape() as tape:
        looked_up = tensorflow.gather(variable, [2, 2, 0])
    gradient = converters.indexed_slices_to_torch(tape.gradient(looked_up, variable))
    assert gradient.to_dense()[:, 0].tolist() == [1.0, 0.0, 2.0, 0.0]
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    parameter.grad = gradient
    torch.optim.SGD([parameter], lr=1.0).step()
    assert parameter[:, 0].tolist() == [0.0, 1.0, -1.0, 1.0]


def test_slices_errors(tensorflow):
    ones = tensorflow.ones([1, 2])
    with pytest.raises(ValueError, match="dense_shape is None"):
        converters.indexed_slices_to_torch(tensorflow.IndexedSlices(ones, tensorflow.constant([0])))
    with pytest.raises(ValueError, match="not a valid gradient"):
        shape = tensorflow.constant([4, 2])
        converters.indexed_slices_to_torch(tensorflow.IndexedSlices(ones, tensorflow.constant([4]), shape))
    with pytest.raises(ValueError, match="one sparse dimension, got 2"):
        converters.indexed_slices_to_tensorflow(torch.eye(2).to_sparse())


# ---- tf.RaggedTensor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=name)
def test_ragged_there_and_back(dtype, share):
    values = torch.randn(5, 3)
    offsets = torch.tensor([0, 2, 2, 5], dtype=dtype)
    ragged = converters.ragged_tensor_to_tensorflow(values, offsets, share=share)
    assert ragged.shape.as_list() == [3, None, 3] and ragged.row_splits.dtype.name == name(dtype)
    back_values, back_offsets = converters.ragged_tensor_to_torch(ragged, share=share)
    assert torch.equal(back_values, values) and torch.equal(back_offsets, offsets) and back_offsets.dtype == dtype


def test_nested_there_and_back(tensorflow):
    rows = [torch.randn(2, 3), torch.randn(0, 3), torch.randn(4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    ragged = converters.nested_to_tensorflow(nested)
    assert ragged.row_lengths().numpy().tolist() == [2, 0, 4]
    back = converters.ragged_tensor_to_nested(ragged)
    assert all(torch.equal(a, b) for a, b in zip(back.unbind(), rows, strict=True))


def test_nested_with_holes(tensorflow):
    table = torch.arange(12).reshape(3, 4)
    nested = torch.nested.narrow(table, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 0]), layout=torch.jagged)
    assert converters.nested_to_tensorflow(nested).to_list() == [[0, 1], [5, 6, 7], []]


def test_ragged_without_values(tensorflow):
    ragged = converters.ragged_tensor_to_tensorflow(torch.empty(0, dtype=torch.bool), torch.tensor([0, 0, 0]))
    assert ragged.to_list() == [[], []]
    values, offsets = converters.ragged_tensor_to_torch(ragged)
    assert values.dtype == torch.bool and offsets.tolist() == [0, 0, 0]


def test_ragged_errors(tensorflow):
    with pytest.raises(ValueError, match="merge_dims"):
        converters.ragged_tensor_to_torch(tensorflow.ragged.constant([[[1], [2]], []]))
    with pytest.raises(TypeError, match="hash them"):
        converters.ragged_tensor_to_torch(tensorflow.ragged.constant([["a"]]))
    for offsets in ([0, 2], [1, 3], [0, 3, 2, 3]):
        with pytest.raises(ValueError, match="offsets must rise from 0 to the number of values, 3"):
            converters.ragged_tensor_to_tensorflow(torch.ones(3), torch.tensor(offsets))
    for offsets in (torch.zeros(2), torch.zeros(0).int(), torch.zeros(1, 1).int()):
        with pytest.raises(ValueError, match="offsets must be a vector"):
            converters.ragged_tensor_to_tensorflow(torch.ones(3), offsets)
    with pytest.raises(ValueError, match="rank >= 1"):
        converters.ragged_tensor_to_tensorflow(torch.tensor(1.0), torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="torch.jagged"):
        converters.nested_to_tensorflow(torch.ones(2, 2))
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="ragged in dimension 1"):
        converters.nested_to_tensorflow(nested.transpose(1, 2))
