"""
Keras 3's preprocessing layers as ``torch.nn.Module``, with the same arguments and results; and its optimizers.

Strings come as lists, numpy or pyarrow arrays, sparse and ragged inputs as the types of ``compat.tensorflow``; sparse
results are its ``SparseTensor``.
"""

from ._keras_bins import CategoryEncoding as CategoryEncoding
from ._keras_bins import Discretization as Discretization
from ._keras_hashing import HashedCrossing as HashedCrossing
from ._keras_hashing import Hashing as Hashing
from ._keras_lookup import IntegerLookup as IntegerLookup
from ._keras_lookup import StringLookup as StringLookup
from .tensorflow.optimizers import keras as optimizers

__all__ = [
    "CategoryEncoding",
    "Discretization",
    "HashedCrossing",
    "Hashing",
    "IntegerLookup",
    "StringLookup",
    "optimizers",
]
