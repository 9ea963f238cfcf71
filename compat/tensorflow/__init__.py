"""
TensorFlow's names, argument order, defaults, output dtypes and behaviour, on torch tensors.

Write ``from torchsparse_rec.compat import tensorflow as tf``, and the calls of the ported program stay unchanged. Every
symbol has a row in compat/PARITY.md with its differences. TensorFlow itself is not needed and not imported.
"""

from . import compat as compat
from . import linalg as linalg
from . import math as math
from . import nn as nn
from . import optimizers as optimizers
from . import ragged as ragged
from . import random as random
from . import raw_ops as raw_ops
from . import sparse as sparse
from . import strings as strings
from ._candidates import AccidentalHits as AccidentalHits
from ._candidates import SampledCandidates as SampledCandidates
from ._fingerprint import fingerprint as fingerprint
from ._indexed_slices import clip_by_global_norm as clip_by_global_norm
from ._indexed_slices import clip_by_norm as clip_by_norm
from ._indexed_slices import convert_to_tensor as convert_to_tensor
from ._row_update import sparse_apply_adadelta as sparse_apply_adadelta
from ._row_update import sparse_apply_adagrad as sparse_apply_adagrad
from ._row_update import sparse_apply_adagrad_da as sparse_apply_adagrad_da
from ._row_update import sparse_apply_adagrad_v2 as sparse_apply_adagrad_v2
from ._row_update import sparse_apply_centered_rms_prop as sparse_apply_centered_rms_prop
from ._row_update import sparse_apply_ftrl as sparse_apply_ftrl
from ._row_update import sparse_apply_ftrl_v2 as sparse_apply_ftrl_v2
from ._row_update import sparse_apply_keras_momentum as sparse_apply_keras_momentum
from ._row_update import sparse_apply_momentum as sparse_apply_momentum
from ._row_update import sparse_apply_proximal_adagrad as sparse_apply_proximal_adagrad
from ._row_update import sparse_apply_proximal_gradient_descent as sparse_apply_proximal_gradient_descent
from ._row_update import sparse_apply_rms_prop as sparse_apply_rms_prop
from ._unique import Unique as Unique
from ._unique import UniqueWithCounts as UniqueWithCounts
from ._unique import unique as unique
from ._unique import unique_with_counts as unique_with_counts
from .tables import load_tables as load_tables
from .tables import save_tables as save_tables
from .tensors import IndexedSlices as IndexedSlices
from .tensors import RaggedTensor as RaggedTensor
from .tensors import SparseTensor as SparseTensor
