"""Embedding modules: torch.nn's and TorchRec's, with a choice of gradient mode and TensorFlow's combiners."""

from .auto import calibrate as calibrate
from .configs import EmbeddingBagConfig as EmbeddingBagConfig
from .configs import EmbeddingConfig as EmbeddingConfig
from .configs import PoolingType as PoolingType
from .convert import convert as convert
from .convert import explain as explain
from .convert import use_optimizer as use_optimizer
from .embedding import Embedding as Embedding
from .embedding_bag import EmbeddingBag as EmbeddingBag
from .embedding_collection import EmbeddingBagCollection as EmbeddingBagCollection
from .embedding_collection import EmbeddingCollection as EmbeddingCollection
from .gradients import sparse_to_dense_grads as sparse_to_dense_grads
