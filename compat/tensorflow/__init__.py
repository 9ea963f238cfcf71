"""
TensorFlow's names, argument order, defaults, output dtypes and behaviour, on torch tensors.

``from torchsparse_rec.compat import tensorflow as tf`` and the calls of the ported program stay as they are. Every
symbol has a row in compat/PARITY.md, which says where it differs. TensorFlow itself is not needed and not imported.
"""

from . import raw_ops as raw_ops
from . import sparse as sparse
from . import strings as strings
from ._fingerprint import fingerprint as fingerprint
from ._tensors import IndexedSlices as IndexedSlices
from ._tensors import RaggedTensor as RaggedTensor
from ._tensors import SparseTensor as SparseTensor
from ._unique import Unique as Unique
from ._unique import UniqueWithCounts as UniqueWithCounts
from ._unique import unique as unique
from ._unique import unique_with_counts as unique_with_counts
