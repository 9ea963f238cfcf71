"""Read and write files of training data, as batches of columns."""

from .convert import convert as convert
from .criteo import read_criteo as read_criteo
from .criteo import write_criteo as write_criteo
from .csv import read_csv as read_csv
from .csv import write_csv as write_csv
from .device import DeviceLoader as DeviceLoader
from .errors import DataError as DataError
from .libsvm import read_libsvm as read_libsvm
from .movielens import read_movielens as read_movielens
from .movielens import write_movielens as write_movielens
from .parquet import read_parquet as read_parquet
from .parquet import write_parquet as write_parquet
from .prebatched import PrebatchedDataset as PrebatchedDataset
from .prebatched import read_prebatched as read_prebatched
from .prebatched import write_prebatched as write_prebatched
from .tensors import to_record_batch as to_record_batch
from .tensors import to_tensors as to_tensors
from .tfrecord import FixedLenFeature as FixedLenFeature
from .tfrecord import TFRecordReader as TFRecordReader
from .tfrecord import TFRecordWriter as TFRecordWriter
from .tfrecord import VarLenFeature as VarLenFeature
from .tfrecord import infer_features as infer_features
from .tfrecord import read_tfrecord as read_tfrecord
from .tfrecord import write_tfrecord as write_tfrecord
from .times import with_time_parts as with_time_parts
