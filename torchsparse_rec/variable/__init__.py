"""The options and initializers of :class:`torchsparse_rec.nn.EmbeddingVariable`, under DeepRec's names."""

from .initial import Constant as Constant
from .initial import Normal as Normal
from .initial import TruncatedNormal as TruncatedNormal
from .initial import Uniform as Uniform
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
