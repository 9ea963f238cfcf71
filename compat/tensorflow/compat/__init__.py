"""``tf.compat``."""

from . import v1 as v1
