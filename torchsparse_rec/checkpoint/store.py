"""
Numbered versions of a checkpoint in a folder: each is written whole or not at all, and read only if unchanged.

Version 12 exists if ``path/000012/manifest.json`` does; beside it lie its ``shard-00000.safetensors``, and so on. A
writer works in the hidden ``path/.000012.partial``, syncs every file and folder to the disk, renames the folder, and
then the manifest: this last renaming is the commit. A folder without a manifest is no version: readers ignore it, and
the next writer removes it. A writer holds ``path/.lock`` while it works; the system releases the lock of a process that
is killed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..typing import CheckpointKind
from . import _shards
from ._shards import DTYPES as DTYPES
from ._shards import MANIFEST
from ._versions import Versions
from ._writer import ShardWriter, Writer
from .manifest import KINDS, CheckpointError, Manifest, Shard, VersionInfo

__all__ = ["Chain", "CheckpointError", "CheckpointStore", "Shard", "ShardWriter", "VersionInfo", "Writer"]


class CheckpointStore:
    """
    Numbered versions of a checkpoint under a folder, each full or a delta on top of an older one.

    There may be any number of readers and one writer at a time, in any processes of machines that share the folder's
    locks. Readers take no lock: if a version is removed while it is read, the error names the missing file.

    Args:
        path: the folder, which the first writer makes.
        keep: the number of last restorable versions that stay when a new one is committed, itself included; the
            versions that these build on stay too. Default None: all.

    Raises:
        ValueError: if ``keep`` is less than 1.

    Source:
        The format of the shards: safetensors. Full and incremental checkpoints: DeepRec's.

    Example:
        >>> import tempfile, torch
        >>> from torchsparse_rec.checkpoint import CheckpointStore
        >>> store = CheckpointStore(tempfile.mkdtemp(), keep=2)
        >>> with store.writer("full", {"step": 10}) as writer:
        ...     writer.write("rows", {"keys": torch.tensor([7, 8]), "values": torch.tensor([0.5, 1.5])})
        >>> with store.writer("delta", {"step": 11}) as writer:
        ...     writer.write("rows", {"keys": torch.tensor([8]), "values": torch.tensor([2.5])})
        >>> values = {}
        >>> for version, name, tensors in store.open():
        ...     values.update(zip(tensors["keys"].tolist(), tensors["values"].tolist()))
        >>> values, store.latest().metadata
        ({7: 0.5, 8: 2.5}, {'step': 11})
    """

    def __init__(self, path: str | os.PathLike[str], keep: int | None = None):
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"CheckpointStore: keep must be None or at least 1, got {keep!r}")
        if not os.fspath(path):
            raise ValueError("CheckpointStore: path must name a folder, got an empty name")
        self.path, self.keep = Path(path), keep
        self._versions = Versions(self.path)

    def __repr__(self) -> str:
        return f"CheckpointStore({str(self.path)!r}, keep={self.keep})"

    def versions(self) -> list[VersionInfo]:
        """
        List all versions, the oldest first; ``problem`` says why a version cannot be restored.

        Manifests are read, and the shards' sizes compared; a shard's checksum is only compared when it is read.

        Returns:
            One :class:`VersionInfo` for each manifest; an empty list if the folder does not exist.

        Raises:
            OSError: if a manifest cannot be read.
        """
        return self._versions.infos()

    def latest(self) -> VersionInfo | None:
        """
        Return the newest version, or None if there is none.

        Raises:
            CheckpointError: if the newest version is damaged; no older one is returned instead. See ``versions()``.
        """
        versions = self.versions()
        if versions and versions[-1].problem is not None:
            return self._versions.chain(versions[-1].number)[-1].info()
        return versions[-1] if versions else None

    def open(self, version: int | None = None) -> Chain:
        """
        Open a version for reading, with the versions that it is on top of.

        Args:
            version: the version's number. Default None: the newest, whether it is damaged or not.

        Returns:
            The full version and the deltas on top of it, in order.

        Raises:
            FileNotFoundError: if there is no version yet.
            ValueError: if there is no version of this number.
            CheckpointError: if a manifest is damaged, or a file missing or of another size; the error names the file.
            ImportError: without safetensors.
        """
        _shards.safetensors("CheckpointStore.open")
        numbers = self._versions.numbers()
        if not numbers:
            raise FileNotFoundError(errno.ENOENT, "there is no complete checkpoint", str(self.path))
        number = numbers[-1] if version is None else version
        if number not in numbers:
            raise ValueError(f"CheckpointStore.open: version must be one of {numbers} of {self.path}, got {version!r}")
        return Chain(self._versions, self._versions.chain(number))

    def partial(self, number: int) -> Path:
        """Return the folder of a version that is being written."""
        return self._versions.partial(number)

    def manifest(self, number: int) -> Path:
        """Return the path of a version's manifest."""
        return self._versions.folder(number) / MANIFEST

    def writer(
        self,
        kind: CheckpointKind = "full",
        metadata: Mapping[str, Any] | None = None,
        *,
        base: int | None = None,
        on_phase: Callable[[str], None] | None = None,
        rank: int | None = None,
    ) -> Writer:
        """
        Return a writer of a new version, for a ``with`` block, at whose end the version is committed.

        Args:
            kind: ``"full"`` or ``"delta"``.
            metadata: the metadata for the version's ``VersionInfo``: a mapping of strings, numbers, lists and mappings
                that JSON can hold. Default: empty.
            base: the version on which a delta builds. Default None: the newest.
            on_phase: a function that is called with the name of each phase before it begins. The phases are
                ``"sweep"``, which removes killed writers' files; ``"write shard 0"`` and so on; ``"fsync"``; ``"rename
                manifest"``; ``"committed"``, after the commit; and ``"prune"``, which removes old versions.
            rank: the rank of this process, if others write shards of the version too, each by its :meth:`shard_writer`:
                this one takes them by :meth:`Writer.add` before the commit. Default None: it writes all of them.

        Returns:
            The writer. Nothing is done before its block begins.

        Raises:
            ValueError: for an unknown kind, a base of a full version, and metadata that JSON would change.
            ImportError: without safetensors.
        """
        _shards.safetensors("CheckpointStore.writer")
        if kind not in KINDS:
            raise ValueError(f"CheckpointStore.writer: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if base is not None and kind == "full":
            raise ValueError(f"CheckpointStore.writer: base is for kind='delta', got {base!r} for a full version")
        given = dict(metadata or {})
        try:
            stored = json.loads(json.dumps(given))
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"CheckpointStore.writer: metadata must be what JSON can hold: {error}") from None
        if stored != given:
            raise ValueError(f"CheckpointStore.writer: metadata must be as JSON gives it back, {stored}, got {given}")
        return Writer(self._versions, self.keep, kind, stored, base, on_phase, rank)

    def shard_writer(self, number: int, rank: int, on_phase: Callable[[str], None] | None = None) -> ShardWriter:
        """
        Return a writer of shards of a version which another process's :class:`Writer` has begun, and will commit.

        Args:
            number: the number of the version.
            rank: the rank of this process among the version's writers: each has another.
            on_phase: a function that is called with ``"write shard 0"`` and so on, before each.

        Returns:
            The writer. Its ``shards`` are for :meth:`Writer.add`, once :meth:`ShardWriter.sync` has been called.

        Raises:
            ImportError: without safetensors.
        """
        _shards.safetensors("CheckpointStore.shard_writer")
        return ShardWriter(self._versions.partial(number), number, rank, on_phase or (lambda phase: None))


class Chain:
    """
    A version for reading, with the versions on which it builds: see :func:`CheckpointStore.open`.

    Iteration yields (the shard's VersionInfo, the shard's name, its tensors on the CPU) in the order of writing, the
    full version first. One shard at a time is in memory. Each is verified when it is read, so a later one may still be
    damaged: read into something that can be thrown away, or call :func:`Chain.verify` first.

    Args:
        all_versions: the versions in the folder.
        manifests: the manifests of the full version and of the deltas on top of it.
    """

    def __init__(self, all_versions: Versions, manifests: list[Manifest]):
        self._folder, self._manifests = all_versions.folder, manifests
        #: The checkpoint's folder.
        self.path = all_versions.path
        #: The full version and the deltas on top of it, in order.
        self.versions = [manifest.info() for manifest in manifests]

    @property
    def version(self) -> VersionInfo:
        """The version that was asked for: the last of ``versions``."""
        return self.versions[-1]

    def __len__(self) -> int:
        """Return the number of shards of all versions together."""
        return sum(info.shards for info in self.versions)

    def __iter__(self) -> Iterator[tuple[VersionInfo, str, dict[str, Tensor]]]:
        """
        Read the shards in order.

        Raises:
            CheckpointError: if a shard is damaged or missing; the error names the file.
            OSError: if a shard cannot be read; the error names the file.
        """
        shards = ((info, shard) for info, m in zip(self.versions, self._manifests, strict=True) for shard in m.shards)
        for (info, shard), (_, _, tensors) in zip(shards, self.read(), strict=True):
            yield info, shard.name, tensors

    def read(self) -> Iterator[tuple[Path, str, dict[str, Tensor]]]:
        """Yield each shard's file, name and tensors, in the order of iteration."""
        for folder, shard in self.shards():
            yield folder / shard.file, shard.name, self.read_shard(folder, shard)

    @property
    def manifest_path(self) -> Path:
        """The path of the manifest of the version that was asked for."""
        return self._folder(self.version.number) / MANIFEST

    def shards(self) -> Iterator[tuple[Path, Shard]]:
        """Yield the folder and the description of each shard, in the order of iteration."""
        for manifest in self._manifests:
            for shard in manifest.shards:
                yield self._folder(manifest.number), shard

    def read_shard(self, folder: Path, shard: Shard) -> dict[str, Tensor]:
        """Return the tensors of a shard by name, whose checksum has been verified. Errors are as in iteration."""
        return _shards.read_shard(folder, shard)

    def verify(self) -> None:
        """
        Read all shards, and compare their checksums.

        Raises:
            CheckpointError: if a file is damaged or missing; the error names the file.
            OSError: if a file cannot be read; the error names the file.
        """
        for folder, shard in self.shards():
            _shards.read_bytes(folder, shard)
