"""Restoring a variable from checkpoints in folders, which are checked as a whole before anything changes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._contents import ContentChecks, check_metadata, seen_of
from .base import VariablePart
from .checkpoint import Chain, CheckpointStore
from .filters import CounterAdmission, SketchAdmission
from .keys import packed
from .optimizer_rows import OptimizerRows
from .parts import Part

__all__ = ["Restoring"]


class Restoring(VariablePart):
    """The base class of EmbeddingVariable that restores checkpoints."""

    @torch.no_grad()
    def restore(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        version: int | None = None,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        """
        Restore the variable from a checkpoint, which may come from other tiers, another capacity or device.

        The states of the optimizer that holds ``weight`` are restored too. So make the optimizer before; if it has
        other parameters too, also load its state_dict before.

        Args:
            path: a folder of :meth:`save`; or several, of the shards of one table.
            version: the checkpoint's number. Default: the newest.
            shard: only keys with ``key mod num_shards == shard`` are restored. Default 0.
            num_shards: default 1: all keys are restored.

        Raises:
            FileNotFoundError: there is no checkpoint.
            OSError: a file cannot be read. If it disappears while rows are written, the rows read until then stay.
            ValueError: the checkpoint is of a table of another embedding_dim or key_dtype; or it is damaged, or not
                what a variable writes, and the error names the file. The variable is unchanged then: everything is
                read and checked first.

        Example:
            See :meth:`save`.
        """
        if not 0 <= shard < num_shards:
            raise ValueError(f"EmbeddingVariable.restore: shard must be in [0, {num_shards}), got {shard}")
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        if not paths:
            raise ValueError("EmbeddingVariable.restore: path must be a folder or several, got none")
        chains = [CheckpointStore(one).open(version) for one in paths]
        optimizer = OptimizerRows(self._stored_weight())
        checks = ContentChecks(self.embedding_dim, self.key_dtype, optimizer.known_states())
        for chain in chains:
            self._check(chain, checks)
        metadata = chains[0].version.metadata
        if optimizer.optimizer is None and metadata["states"]:
            warnings.warn(
                f"EmbeddingVariable.restore: the checkpoint has states of {metadata['optimizer']}, and no optimizer of "
                "torchsparse_rec.optim holds the table: make it before, to have them",
                stacklevel=3,
            )
        with self._guard.writing():
            self._note_saved(None)
            self._forget_everything(metadata)
            self.global_step = max(chain.version.metadata["global_step"] for chain in chains)
            for chain in chains:
                for _, name, tensors in chain:
                    self._apply_shard(name, tensors, shard, num_shards)
            if self.ev_option.capacity is not None:
                self._eviction.shrink()
            self._evicted = sum(chain.version.metadata["evicted"] for chain in chains)
            self._eviction.seen = max(seen_of(chain.version.metadata) for chain in chains)
            alone = len(paths) == 1 and num_shards == 1
            newest = chains[0].version
            self._note_saved((self.global_step, os.path.abspath(paths[0]), newest.number) if alone else None)

    def _check(self, chain: Chain, checks: ContentChecks) -> None:
        """Raise ``ValueError`` unless all shards of a version can be restored to this variable."""
        metadata = chain.version.metadata
        for name, has in (
            ("embedding_dim", self.embedding_dim),
            ("key_dtype", str(self.key_dtype).removeprefix("torch.")),
        ):
            if metadata.get(name) != has:
                raise ValueError(
                    f"EmbeddingVariable.restore: the checkpoint's {name} must be {has}, got {metadata.get(name)}"
                )
        check_metadata(chain.manifest_path, metadata)
        for path, name, tensors in chain.read():
            checks.check_shard(path, name, tensors)
            if name == "sketch" and not self._takes(tensors["sketch"]):
                warnings.warn(
                    "EmbeddingVariable.restore: the checkpoint's counting Bloom filter has another size: it starts "
                    "empty",
                    stacklevel=4,
                )

    def _forget_everything(self, metadata: Mapping[str, Any]) -> None:
        self.keys.clear(self.keys.capacity, self.keys.entries.device)
        self._inserted_before = -1
        self._newcomers = []
        if self.cold is not None:
            self.cold.clear()
        if isinstance(self.admission, CounterAdmission):
            self.admission.candidates.clear(1024, self.keys.entries.device)
        if isinstance(self.admission, SketchAdmission):
            self.admission.sketch.zero_()
        optimizer = OptimizerRows(self._stored_weight())
        optimizer.start_over(metadata["states"], metadata["optimizer_steps"])

    def _apply_shard(self, name: str, tensors: dict[str, Tensor], shard: int, num_shards: int) -> None:
        device = self._stored_weight().device
        if name == "sketch":
            if isinstance(self.admission, SketchAdmission) and self._takes(tensors["sketch"]):
                self.admission.sketch.copy_(tensors["sketch"])
            return
        part_keys = tensors["keys"]
        if num_shards > 1:
            mine = part_keys.remainder(num_shards) == shard
            tensors = {key: x[mine] for key, x in tensors.items()}
        keys = tensors["keys"].to(device)
        if name == "erased":
            self._erase(keys)
            if self.cold is not None:
                self.cold.erase(keys)
            if isinstance(self.admission, CounterAdmission):
                self.admission.candidates.erase(keys)
        elif name == "candidates":
            self._put_candidates(keys, tensors["frequencies"].to(device), tensors["versions"].to(device))
        elif name == "rows":
            part = Part.of_tensors(tensors, device)
            if self.cold is not None:
                self.cold.erase(keys)
            self._put(part)
            if isinstance(self.admission, CounterAdmission):
                self.admission.candidates.erase(keys)

    def _put_candidates(self, keys: Tensor, frequencies: Tensor, versions: Tensor) -> None:
        admission = self.admission
        if not isinstance(admission, CounterAdmission):
            return
        # A key that has a row is no candidate any more.
        absent = self.keys.find(keys) < 0
        keys, frequencies, versions = keys[absent], frequencies[absent], versions[absent]
        rows, _ = admission.candidates.insert(keys)
        admission.candidates.entries[rows, 1] = packed(frequencies, versions)

    def _takes(self, sketch: Tensor) -> bool:
        """Say whether a saved Bloom filter fits the variable's own, or the variable has none."""
        if not isinstance(self.admission, SketchAdmission):
            return True
        its = self.admission.sketch
        return sketch.shape == its.shape and sketch.dtype == its.dtype
