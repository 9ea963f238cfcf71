"""``tf.compat.v1``: where its arguments differ from those of ``tf``."""

from . import nn as nn
from . import train as train
