"""``tf.compat.v1``: functions whose arguments differ from those of ``tf``, and the optimizers."""

from . import nn as nn
from . import random as random
from . import train as train
from .random import set_random_seed as set_random_seed
