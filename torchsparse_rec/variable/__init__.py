"""The options of :class:`torchsparse_rec.nn.EmbeddingVariable`, under DeepRec's names."""

from .options import CacheStrategy as CacheStrategy
from .options import CBFFilter as CBFFilter
from .options import CheckpointOption as CheckpointOption
from .options import CounterFilter as CounterFilter
from .options import EmbeddingVariableOption as EmbeddingVariableOption
from .options import GlobalStepEvict as GlobalStepEvict
from .options import InitializerOption as InitializerOption
from .options import L2WeightEvict as L2WeightEvict
from .options import LFUEvict as LFUEvict
from .options import LRUEvict as LRUEvict
from .options import StorageOption as StorageOption
from .options import StorageType as StorageType
