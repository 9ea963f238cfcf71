"""Checkpoints: whole models with their optimizers in a folder, in one process or over ranks."""

from ._writer import ShardWriter as ShardWriter
from ._writer import Writer as Writer
from .manifest import CheckpointError as CheckpointError
from .manifest import Shard as Shard
from .manifest import VersionInfo as VersionInfo
from .model import load as load
from .model import save as save
from .store import Chain as Chain
from .store import CheckpointStore as CheckpointStore
