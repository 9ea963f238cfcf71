"""The versions in the folder of a checkpoint, and the version on which each builds."""

from __future__ import annotations

import os
import re
from pathlib import Path

from . import _shards
from ._shards import MANIFEST
from .manifest import CheckpointError, Manifest, VersionInfo, decode, is_shard

__all__ = ["Versions"]

_PARTIAL = re.compile(r"\.\d{6,}\.partial")


class Versions:
    """
    The versions of a checkpoint.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, number: int) -> Path:
        """Return the folder of a version."""
        return self.path / f"{number:06d}"

    def partial(self, number: int) -> Path:
        """Return the folder of a version that is being written."""
        return self.path / f".{number:06d}.partial"

    def numbers(self, committed: bool = True) -> list[int]:
        """Return the numbers of all versions, ascending; if not ``committed``, of all folders named so."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        numbers = sorted(int(n) for n in names if n.isascii() and n.isdecimal() and n == f"{int(n):06d}" and int(n))
        return [n for n in numbers if not committed or os.path.lexists(self.folder(n) / MANIFEST)]

    def manifest(self, number: int) -> tuple[Manifest, str]:
        """Return a version's manifest and its checksum."""
        path = self.folder(number) / MANIFEST
        return decode(_shards.read_file(path), path, number)

    def _check_sizes(self, manifest: Manifest) -> None:
        folder = self.folder(manifest.number)
        for shard in manifest.shards:
            _shards.check_file(folder / shard.file, shard.nbytes)
        # A writer names all that it has written.
        named = {shard.file for shard in manifest.shards}
        if unknown := [name for name in sorted(os.listdir(folder)) if is_shard(name) and name not in named]:
            raise CheckpointError(folder / MANIFEST, f"must name {unknown[0]}, which is beside it")

    def _check_base(self, manifest: Manifest, base: VersionInfo | None, crc: str) -> None:
        """Raise ``CheckpointError`` unless a delta's base exists, can be restored, and has the right checksum."""
        assert manifest.base is not None
        path = self.folder(manifest.base) / MANIFEST
        if base is None:
            raise CheckpointError(path, f"the file is missing: version {manifest.number} is on top of it")
        if base.problem is not None:
            raise CheckpointError(path.parent, f"version {manifest.number} is on top of it: {base.problem}")
        if crc != manifest.base_crc32c:
            raise CheckpointError(path, f"is not the one on top of which version {manifest.number} was written")

    def chain(self, number: int) -> list[Manifest]:
        """Return the manifests of a version and of the versions on which it builds, the full version first."""
        manifest, _ = self.manifest(number)
        chain = [manifest]
        while manifest.base is not None:
            base, crc = self.manifest(manifest.base)
            self._check_base(manifest, base.info(), crc)
            chain.append(base)
            manifest = base
        for manifest in chain:
            self._check_sizes(manifest)
        return chain[::-1]

    def infos(self) -> list[VersionInfo]:
        """List all versions, as :meth:`CheckpointStore.versions` does."""
        found: dict[int, tuple[VersionInfo, str]] = {}
        for number in self.numbers():
            info, crc = VersionInfo(number), ""
            try:
                manifest, crc = self.manifest(number)
                info = manifest.info()
                self._check_sizes(manifest)
                if manifest.base is not None:
                    self._check_base(manifest, *found.get(manifest.base, (None, "")))
            except CheckpointError as error:
                # If its manifest is gone, the version was removed in the meantime.
                if not os.path.lexists(self.folder(number) / MANIFEST):
                    continue
                info = VersionInfo(number, info.kind, info.base, info.metadata, info.shards, info.nbytes, str(error))
            found[number] = info, crc
        return [info for info, _ in found.values()]

    def sweep(self) -> None:
        """Remove what killed writers have left. The caller must hold the lock."""
        for name in os.listdir(self.path):
            if _PARTIAL.fullmatch(name) and not (self.path / name).is_symlink():
                _shards.remove_version(self.path / name)
        for number in set(self.numbers(committed=False)).difference(self.numbers()):
            folder = self.folder(number)
            # A folder that no writer made may have a number for its name.
            if folder.is_dir() and not folder.is_symlink() and _shards.is_ours(folder):
                _shards.remove_version(folder)

    def prune(self, keep: int) -> None:
        """Remove the versions that are older than the last ``keep`` and that none of these is on top of."""
        versions = {info.number: info for info in self.infos()}
        kept = [number for number, info in versions.items() if info.problem is None][-keep:]
        needed = set(kept)
        # A base has a smaller number than its delta, so it is added before the loop comes to it.
        for number in sorted(versions, reverse=True):
            base = versions[number].base
            if number in needed and base is not None:
                needed.add(base)
        # Deltas are removed before their bases: a crash in between leaves no delta without its base.
        for number in sorted(versions, reverse=True):
            if kept and number < kept[0] and number not in needed:
                _shards.remove_version(self.folder(number))
