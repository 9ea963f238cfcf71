"""``tf.linalg``: the norm of gradients."""

from ._indexed_slices import global_norm as global_norm
