"""
TensorFlow's feature columns: small objects with a JSON form, and one module that makes ids and numbers of raw columns.

See docs/features.md.
"""

from ..initializers import Constant as Constant
from ._base import CategoricalColumn as CategoricalColumn
from ._base import Column as Column
from ._base import DenseColumn as DenseColumn
from ._base import column_from_config as column_from_config
from ._categorical import EmbeddingCategoricalColumn as EmbeddingCategoricalColumn
from ._categorical import HashedCategoricalColumn as HashedCategoricalColumn
from ._categorical import IdentityCategoricalColumn as IdentityCategoricalColumn
from ._categorical import VocabularyFileCategoricalColumn as VocabularyFileCategoricalColumn
from ._categorical import VocabularyListCategoricalColumn as VocabularyListCategoricalColumn
from ._categorical import categorical_column_with_embedding as categorical_column_with_embedding
from ._categorical import categorical_column_with_hash_bucket as categorical_column_with_hash_bucket
from ._categorical import categorical_column_with_identity as categorical_column_with_identity
from ._categorical import categorical_column_with_vocabulary_file as categorical_column_with_vocabulary_file
from ._categorical import categorical_column_with_vocabulary_list as categorical_column_with_vocabulary_list
from ._composed import CrossedColumn as CrossedColumn
from ._composed import IndicatorColumn as IndicatorColumn
from ._composed import SequenceCategoricalColumn as SequenceCategoricalColumn
from ._composed import WeightedCategoricalColumn as WeightedCategoricalColumn
from ._composed import crossed_column as crossed_column
from ._composed import indicator_column as indicator_column
from ._composed import weighted_categorical_column as weighted_categorical_column
from ._embedding import EmbeddingColumn as EmbeddingColumn
from ._embedding import SharedEmbeddingColumn as SharedEmbeddingColumn
from ._embedding import embedding_column as embedding_column
from ._embedding import shared_embeddings as shared_embeddings
from ._functions import Clip as Clip
from ._functions import Compose as Compose
from ._functions import FillNaN as FillNaN
from ._functions import Log as Log
from ._functions import RandomNormal as RandomNormal
from ._functions import RandomUniform as RandomUniform
from ._functions import Standardize as Standardize
from ._functions import TruncatedNormal as TruncatedNormal
from ._numeric import BucketizedColumn as BucketizedColumn
from ._numeric import NumericColumn as NumericColumn
from ._numeric import SequenceNumericColumn as SequenceNumericColumn
from ._numeric import bucketized_column as bucketized_column
from ._numeric import numeric_column as numeric_column
from ._numeric import sequence_numeric_column as sequence_numeric_column
from ._parse import parse_example_features as parse_example_features
from ._sequence import sequence_categorical_column_with_hash_bucket as sequence_categorical_column_with_hash_bucket
from ._sequence import sequence_categorical_column_with_identity as sequence_categorical_column_with_identity
from ._sequence import (
    sequence_categorical_column_with_vocabulary_file as sequence_categorical_column_with_vocabulary_file,
)
from ._sequence import (
    sequence_categorical_column_with_vocabulary_list as sequence_categorical_column_with_vocabulary_list,
)
from .transform import Features as Features
from .transform import FeatureTransform as FeatureTransform
