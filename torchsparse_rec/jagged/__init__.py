"""Rows of different lengths, by feature: the types that modules take, and their conversions from other forms."""

from .collate import KeyedJaggedCollate as KeyedJaggedCollate
from .jagged_tensor import JaggedTensor as JaggedTensor
from .keyed_jagged_tensor import KeyedJaggedTensor as KeyedJaggedTensor
from .keyed_tensor import KeyedTensor as KeyedTensor
