"""
TensorFlow's composite tensors: :class:`SparseTensor`, :class:`RaggedTensor` and :class:`IndexedSlices` over torch
tensors. Values may be strings too: then they are a numpy array of ``bytes``, since torch has no strings.
"""

from ._ragged_tensor import RaggedTensor as RaggedTensor
from ._sparse_tensor import IndexedSlices as IndexedSlices
from ._sparse_tensor import SparseTensor as SparseTensor
from ._sparse_tensor import as_values as as_values
