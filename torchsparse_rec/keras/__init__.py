"""
Layers and optimizers for Keras 3 on its torch backend: a step costs only what the batch touches.

Keras must run on torch: set ``KERAS_BACKEND=torch`` before ``keras`` is first imported.
"""

from ._backend import check_backend

check_backend()

from . import optimizers as optimizers  # noqa: E402
from .convert import convert as convert  # noqa: E402
from .convert import revert as revert  # noqa: E402
from .embedding import Embedding as Embedding  # noqa: E402
from .embedding_bag import EmbeddingBag as EmbeddingBag  # noqa: E402
from .embedding_bag_collection import EmbeddingBagCollection as EmbeddingBagCollection  # noqa: E402
