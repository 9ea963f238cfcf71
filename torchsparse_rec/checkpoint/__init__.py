"""Checkpoints: whole models with their optimizers in a folder, in one process or over ranks."""

from .manifest import CheckpointError as CheckpointError
from .manifest import VersionInfo as VersionInfo
from .model import load as load
from .model import save as save
from .store import CheckpointStore as CheckpointStore
