"""
Keras 3's preprocessing layers as ``torch.nn.Module``, with the same arguments and results; and its optimizers.

Strings come as lists, numpy or pyarrow arrays, sparse and ragged inputs as the types of ``compat.tensorflow``; sparse
results are its ``SparseTensor``.
"""

from ..tensorflow.optimizers import keras as optimizers
from .bins import CategoryEncoding as CategoryEncoding
from .bins import Discretization as Discretization
from .hashing import HashedCrossing as HashedCrossing
from .hashing import Hashing as Hashing
from .lookup import IntegerLookup as IntegerLookup
from .lookup import StringLookup as StringLookup

__all__ = [
    "CategoryEncoding",
    "Discretization",
    "HashedCrossing",
    "Hashing",
    "IntegerLookup",
    "StringLookup",
    "optimizers",
]
