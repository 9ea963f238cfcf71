"""Operators on tensors: one module per family."""

import sys

from . import _vmap as _vmap
from . import row_update as row_update  # registers its fake kernel
from . import segment as segment
from .bucketize import *
from .candidates import *
from .embedding import *
from .embedding_collection import *
from .embedding_lookup import *
from .hash import *
from .hash_cross import *
from .indexed_slices import *
from .jagged import *
from .quantized import *
from .record import *
from .record_examples import *
from .route import *
from .row_optimizer import *
from .row_optimizer_rules import *
from .scores import *
from .scores_top_k import *
from .segment import *
from .sparse_segment import *
from .sparse_tensor import *
from .table import *
from .table_rows import *
from .unique import *

# The name of the module until the sparse segments had one of their own.
segment_rows = sys.modules[f"{__name__}.segment_rows"] = segment

_vmap.register_the_others()
