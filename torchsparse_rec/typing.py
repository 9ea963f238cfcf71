"""
The words that arguments take, as types: to mypy and pyright another word is an error, before it is one at run time.

A function's own variables are annotated with them too.

Example:
    >>> from torchsparse_rec import nn
    >>> from torchsparse_rec.typing import GradMode
    >>> def table(rows: int, grad_mode: GradMode | None = None) -> nn.Embedding:
    ...     return nn.Embedding(rows, 16, grad_mode=grad_mode)
    >>> table(9, "sparse")
    Embedding(9, 16, grad_mode='sparse', 576 bytes)
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "CheckpointKind",
    "Combiner",
    "Encoding",
    "ExampleDtype",
    "FileFormat",
    "GradMode",
    "InitialKind",
    "OovMethod",
    "OutputMode",
    "PartitionStrategy",
    "PlanName",
    "Pooling",
    "RatingsLayout",
    "RecordCompression",
    "RowsFormat",
    "ShardBy",
    "SparseTextLayout",
    "Verify",
]

#: The layout of a table's gradient, see :class:`torchsparse_rec.nn.Embedding`; None is the module's default.
GradMode = Literal["sparse", "dense", "fused", "auto"]
#: How the rows of a bag become one.
Pooling = Literal["sum", "mean", "sqrtn", "max", "min"]
#: The same in TensorFlow's lookups by sparse ids, which have weights.
Combiner = Literal["sum", "mean", "sqrtn"]
#: The rows of tables for inference, see :func:`torchsparse_rec.nn.quantize`.
RowsFormat = Literal["int8", "int4", "float16", "bfloat16"]
#: The rule by which a row is in one of several shards, see :func:`torchsparse_rec.ops.embedding_lookup`.
PartitionStrategy = Literal["mod", "div"]
#: How rows of new keys start, see :func:`torchsparse_rec.ops.table_initialize_`.
InitialKind = Literal["constant", "uniform", "normal", "truncated_normal"]
#: The dtypes of :class:`torchsparse_rec.ops.ExampleColumn`.
ExampleDtype = Literal["int64", "int32", "float32", "bytes"]

#: The formats of :func:`torchsparse_rec.data.convert`.
FileFormat = Literal["criteo", "csv", "movielens", "parquet", "prebatched", "tfrecord", "tfrecord-prebatched"]
#: The layouts of MovieLens's releases, see :func:`torchsparse_rec.data.read_movielens`.
RatingsLayout = Literal["ml-100k", "ml-1m", "ml-20m"]
#: The compression of TFRecord files; None: none.
RecordCompression = Literal["gzip", "zlib"]
#: The unit in which several :class:`torchsparse_rec.data.TFRecordReader` take turns.
ShardBy = Literal["record", "file"]
#: The layouts of sparse rows in text, see :func:`torchsparse_rec.data.read_libsvm`.
SparseTextLayout = Literal["libsvm", "libffm"]
#: When :class:`torchsparse_rec.data.PrebatchedDataset` compares checksums.
Verify = Literal["first", "always", "never"]

#: The checkpoints of :class:`torchsparse_rec.variable.CheckpointStore`.
CheckpointKind = Literal["full", "delta"]
#: TorchRec's names for where a table is, see :func:`torchsparse_rec.distributed.shard`.
PlanName = Literal["row_wise", "table_wise", "column_wise", "data_parallel"]

#: The output modes of the layers of :mod:`torchsparse_rec.compat.keras` besides places.
Encoding = Literal["one_hot", "multi_hot", "count"]
#: The output modes of the layers with a vocabulary.
OutputMode = Literal["int", "one_hot", "multi_hot", "count", "tf_idf"]
#: The hash of ``IntegerLookup`` for integers out of its vocabulary.
OovMethod = Literal["floormod", "farmhash"]
