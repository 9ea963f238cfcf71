"""TensorFlow's sparse operators and embeddings for recommenders, in PyTorch."""

from . import checkpoint as checkpoint
from . import data as data
from . import features as features
from . import initializers as initializers
from . import nn as nn
from . import ops as ops
from . import optim as optim
from . import profiling as profiling
from . import variable as variable
from ._library import check_errors as check_errors
from ._library import config as config
from ._library import cpu_level as cpu_level
from ._library import show_config as show_config
from ._version import __version__ as __version__
from .jagged import JaggedTensor as JaggedTensor
from .jagged import KeyedJaggedCollate as KeyedJaggedCollate
from .jagged import KeyedJaggedTensor as KeyedJaggedTensor
from .jagged import KeyedTensor as KeyedTensor
