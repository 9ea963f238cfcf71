"""A version of a checkpoint while it is being written: readers see nothing of it until it is committed."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from .._lock import release_lock, take_lock
from ..files import make_folder, naming, new_file, sync_folder
from . import _shards
from ._shards import MANIFEST, PARTIAL_MANIFEST
from ._versions import Versions
from .manifest import Manifest, Shard, VersionInfo, encode, shard_file

__all__ = ["ShardWriter", "Writer"]


class ShardWriter:
    """
    The shards that one process writes of a version, alone or beside others: see :func:`CheckpointStore.shard_writer`.

    Args:
        folder: the folder of the version, until it is committed.
        number: the number of the version.
        rank: the rank of this process among the version's writers; None: it is the only one.
        on_phase: a function that is called with ``"write shard 0"`` and so on, before each.
    """

    def __init__(self, folder: Path, number: int, rank: int | None, on_phase: Callable[[str], None]) -> None:
        self._folder, self._number, self._rank, self._on_phase = folder, number, rank, on_phase
        #: The manifest's entries of the shards written so far.
        self.shards: list[Shard] = []

    def write(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
        """
        Write one shard, as :meth:`Writer.write` does.

        Args:
            name: the name of the shard.
            tensors: the tensors by name.
            about: the manifest's entry about it, equal to what JSON reads back.
        """
        index = len(self.shards)
        self._on_phase(f"write shard {index}")
        data, described = _shards.encode_shard(name, tensors)
        file = shard_file(index, self._rank)
        with explained(self._number, self._folder):
            _write(self._folder / file, data)
        self.shards.append(Shard(name, file, len(data), _shards.checksum(data), described, dict(about or {})))

    def sync(self) -> None:
        """Bring the shards' names to the disk."""
        with explained(self._number, self._folder):
            sync_folder(self._folder)


class Writer:
    """
    A version that is being written: see :func:`CheckpointStore.writer`.

    Args:
        versions: the versions to which the new one will belong.
        keep: the argument of :class:`CheckpointStore`.
        kind: ``"full"`` or ``"delta"``.
        metadata: the metadata of the version, equal to what JSON reads back.
        base: the version that a delta is on top of; None: the newest.
        on_phase: the argument of :func:`CheckpointStore.writer`.
        rank: the argument of :func:`CheckpointStore.writer`.

    Raises:
        BlockingIOError: when the block begins, if another writer is at work.
        CheckpointError: when the block begins, if the base of a delta is damaged.
        ValueError: when the block begins, if a delta has no base.
        OSError: in ``write`` and ``commit``, if the disk is full or fails; the error names the file. Nothing is
            published.
    """

    def __init__(
        self,
        versions: Versions,
        keep: int | None,
        kind: str,
        metadata: dict[str, Any],
        base: int | None,
        on_phase: Callable[[str], None] | None,
        rank: int | None = None,
    ):
        self._versions, self._keep = versions, keep
        self._kind, self._metadata, self._base = kind, metadata, base
        self._on_phase, self._rank = on_phase or (lambda phase: None), rank
        self._base_crc32c: str | None = None
        self._written: ShardWriter | None = None
        # "new", "open" in the block, "failed" once something raised, "committed", "closed".
        self._state = "new"
        self._lock = -1
        #: The version's number, known once the block has begun.
        self.number = 0
        self._folder = Path()

    def __enter__(self) -> Writer:
        if self._state != "new":
            raise RuntimeError(f"Writer: must be entered once, but is {self._state}")
        path = self._versions.path
        make_folder(path)
        # The lock's file is never removed: otherwise two writers could hold locks on two files of the same name.
        self._lock = take_lock(path / ".lock", _busy)
        try:
            self._on_phase("sweep")
            self._versions.sweep()
            if self._kind == "delta":
                self._find_base()
            self.number = max(self._versions.numbers(committed=False), default=0) + 1
            self._folder = self._versions.partial(self.number)
            os.mkdir(self._folder)
        except BaseException:
            release_lock(self._lock)
            raise
        self._written = ShardWriter(self._folder, self.number, self._rank, self._on_phase)
        self._state = "open"
        return self

    def _find_base(self) -> None:
        numbers = self._versions.numbers()
        if self._base is None and numbers:
            self._base = numbers[-1]
        if self._base not in numbers:
            wanted = f"must be one of {numbers}" if numbers else "needs a full version to be on top of"
            raise ValueError(f"CheckpointStore.writer: base {wanted} in {self._versions.path}, got {self._base}")
        self._versions.chain(self._base)
        self._base_crc32c = self._versions.manifest(self._base)[1]

    def write(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
        """
        Write one shard.

        Its tensors are copied from their device, and are in memory twice meanwhile: write a large table in parts.

        Args:
            name: the name of the shard, for readers; several shards may have the same name.
            tensors: the tensors by name: dense, of floats, integers or bool, on any device.
            about: the manifest's entry about the shard, a mapping equal to what JSON reads back. Default: nothing.

        Raises:
            ValueError: for tensors that cannot be stored.
            RuntimeError: outside the block, after a commit or an error.
            OSError: if the disk is full or fails; the error names the file.
        """
        with self._step() as written:
            written.write(name, tensors, about)

    def add(self, shards: Iterable[Shard]) -> None:
        """
        Take shards into the version that another process has written.

        Args:
            shards: the shards of the other process's :class:`ShardWriter`.

        Raises:
            RuntimeError: outside the block, after a commit or an error.
            CheckpointError: if a shard is missing, or has another size; the error names the file.
        """
        with self._step() as written:
            for shard in shards:
                _shards.check_file(self._folder / shard.file, shard.nbytes)
                written.shards.append(shard)

    def commit(self) -> VersionInfo:
        """
        Publish the version, and then remove the older ones that are not kept.

        Returns:
            The version.

        Raises:
            RuntimeError: outside the block, after a commit or an error.
            OSError: if the disk is full or fails; the error names the file. Nothing is published.

        Warns:
            RuntimeWarning: if an older version could not be removed; the new one exists.
        """
        with self._step() as written:
            manifest = Manifest(
                self.number, self._kind, self._base, self._base_crc32c, self._metadata, list(written.shards)
            )
            self._on_phase("fsync")
            with explained(self.number, self._folder):
                _write(self._folder / PARTIAL_MANIFEST, encode(manifest)[0])
                sync_folder(self._folder)
                folder = self._versions.folder(self.number)
                os.rename(self._folder, folder)
                self._folder = folder
                sync_folder(self._versions.path)
            self._on_phase("rename manifest")
            with explained(self.number, self._folder):
                os.replace(folder / PARTIAL_MANIFEST, folder / MANIFEST)
                sync_folder(folder)
            self._state = "committed"
        self._on_phase("committed")
        if self._keep is not None:
            self._on_phase("prune")
            try:
                self._versions.prune(self._keep)
            except OSError as error:
                warnings.warn(
                    f"version {self.number} is saved, but an older one could not be removed: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return manifest.info()

    @contextmanager
    def _step(self) -> Iterator[ShardWriter]:
        """Check that the writer is open, and mark it failed if the step raises: it can then not be committed."""
        if self._state != "open" or self._written is None:
            raise RuntimeError(f"Writer: must be open, as in its block before commit(), but is {self._state}")
        try:
            yield self._written
        except BaseException:
            self._state = "failed"
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._state == "open":
                self.commit()
            elif kind is None and self._state == "failed":
                raise RuntimeError(f"Writer: version {self.number} was not written, since an error came before")
        finally:
            if self._state != "committed":
                # The next writer removes what cannot be removed now.
                with suppress(OSError):
                    _shards.remove_version(self._folder)
            self._state = "closed"
            release_lock(self._lock)


def _write(path: Path, data: bytes) -> None:
    with naming(path), new_file(path) as file:
        file.write(data)


@contextmanager
def explained(number: int, folder: Path) -> Iterator[None]:
    """Make an ``OSError`` say that this version was not written, and that earlier versions are unchanged."""
    try:
        yield
    except OSError as error:
        problem = f"version {number} was not written, those before it are as they were: {error.strerror}"
        raise OSError(error.errno or errno.EIO, problem, error.filename or str(folder)) from error


def _busy(holder: str) -> str:
    return f"another writer (process {holder}) is writing a version here; one at a time can"
