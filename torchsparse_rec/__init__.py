"""TensorFlow's sparse operators and embeddings for recommenders, in PyTorch."""

import typing as _typing
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

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

if _typing.TYPE_CHECKING:
    from . import compat as compat  # type: ignore[attr-defined]  # no folder of the source tree
    from . import distributed as distributed
    from . import keras as keras
    from . import onnx as onnx
    from . import serving as serving

# Imported when they are used: they take time, or need an extra.
_WHEN_USED = ("compat", "distributed", "keras", "onnx", "serving")


def __getattr__(name: str) -> _ModuleType:
    """Return a package that is imported when it is used."""
    if name in _WHEN_USED:
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the library's names, with those of packages that are not imported yet."""
    return sorted({*globals(), *_WHEN_USED})
