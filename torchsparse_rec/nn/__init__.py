"""Embedding modules: torch.nn's, with a choice of gradient layout and TensorFlow's combiners."""

from .convert import convert as convert
from .convert import explain as explain
from .convert import use_optimizer as use_optimizer
from .embedding import Embedding as Embedding
from .embedding_bag import EmbeddingBag as EmbeddingBag
from .gradients import sparse_to_dense_grads as sparse_to_dense_grads
