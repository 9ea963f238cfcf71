"""``tf.compat.v1``: functions whose arguments differ from those of ``tf``, and the optimizers."""

from . import nn as nn
from . import train as train
