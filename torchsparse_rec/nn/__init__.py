"""Embedding modules: torch.nn's and TorchRec's, with a choice of gradient mode and TensorFlow's combiners."""

from .. import initializers as _initializers
from .. import variable as _options
from .configs import EmbeddingBagConfig as EmbeddingBagConfig
from .configs import EmbeddingConfig as EmbeddingConfig
from .configs import PoolingType as PoolingType
from .convert import convert as convert
from .convert import explain as explain
from .convert import revert as revert
from .convert import use_optimizer as use_optimizer
from .embedding import Embedding as Embedding
from .embedding_bag import EmbeddingBag as EmbeddingBag
from .embedding_collection import EmbeddingBagCollection as EmbeddingBagCollection
from .embedding_collection import EmbeddingCollection as EmbeddingCollection
from .embedding_variable import EmbeddingVariable as EmbeddingVariable
from .gradients import sparse_to_dense_grads as sparse_to_dense_grads
from .in_batch import in_batch_softmax_loss as in_batch_softmax_loss
from .lookup_sparse import lookup_sparse as lookup_sparse
from .losses import TableCrossEntropyLoss as TableCrossEntropyLoss
from .losses import table_cross_entropy as table_cross_entropy
from .named import get_embedding_variable as get_embedding_variable
from .quantize import quantize as quantize
from .sampled_losses import nce_loss as nce_loss
from .sampled_losses import sampled_softmax_loss as sampled_softmax_loss
from .samplers import AllSampler as AllSampler
from .samplers import FixedUnigramSampler as FixedUnigramSampler
from .samplers import LearnedUnigramSampler as LearnedUnigramSampler
from .samplers import LogUniformSampler as LogUniformSampler
from .samplers import UniformSampler as UniformSampler
from .top_k import TopK as TopK


def __getattr__(name: str):
    """Return an option of :mod:`torchsparse_rec.variable`, or an initializer, by its former name here."""
    for package in (_options, _initializers):
        found = vars(package).get(name)
        if isinstance(found, type) and not name.startswith("_"):
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
