"""
TensorFlow's optimizers as torch optimizers, for models whose training goes on as in TensorFlow.

:mod:`.v1` has the optimizers of ``tf.compat.v1.train``, :mod:`.keras` Keras 3's. Their rules differ from torch's, and
from each other, for rows that are not in a sparse gradient and for rows that occur twice.
"""

from . import keras as keras
from . import v1 as v1
from ._lazy_adam import LazyAdam as LazyAdam
from ._slots import export_slots as export_slots
from ._slots import import_slots as import_slots
