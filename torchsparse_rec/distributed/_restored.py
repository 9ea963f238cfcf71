"""A version of a checkpoint that is to be loaded: what of it this rank needs, its checks, and its way into a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._torch import as_stored
from ..tables.part import part_state
from ..tables.table import split_part, table_of
from ..variable.checkpoint import Chain, CheckpointError, Shard
from ..variable.filters import SketchAdmission
from ..variable.saving import check_metadata, checks_of, refill
from ._contents import Contents, FixedTable, GrowingTable, dtype_name
from ._values import decoded
from .blocks import MOST_BLOCKS
from .boxes import Box

__all__ = ["Restored"]


class Restored:
    """
    A version that is to be loaded.

    Args:
        contents: of the model that loads it.
        chain: the version.

    Raises:
        ValueError: :func:`save` has not written it.
    """

    def __init__(self, contents: Contents, chain: Chain) -> None:
        self._contents, self._chain = contents, chain
        self.metadata = chain.version.metadata
        missing = {"tables", "variables", "rest", "versions", "optimizer", "extra", "ranks"} - self.metadata.keys()
        if missing:
            raise CheckpointError(chain.manifest_path, "is of something else than torchsparse_rec.distributed.save")
        self._growing: dict[Any, list[tuple[Path, Shard]]] = {}
        self._fixed: dict[tuple[Any, Any], list[tuple[Path, Shard]]] = {}
        self._rests: list[tuple[Path, Shard]] = []
        newest = chain.manifest_path.parent
        for path, shard in chain.shards():
            about = shard.about
            if "variable" in about:
                self._growing.setdefault(about["variable"], []).append((path, shard))
            elif path == newest and "table" in about:
                self._fixed.setdefault((about["table"], about.get("state")), []).append((path, shard))
            elif path == newest:
                self._rests.append((path, shard))

    # ---- What this rank reads ----------------------------------------------------------------------------------------

    def _of_fixed(self, key: str, state: str, box: Box) -> Iterator[tuple[Path, Shard, Box, Box]]:
        """Yield the shards that have some elements of a box, with their boxes and what both have in common."""
        for path, shard in self._fixed.get((key, state), []):
            its = self._box_of(path, shard)
            common = its.common(box)
            if common is not None:
                yield path, shard, its, common

    def _box_of(self, path: Path, shard: Shard) -> Box:
        try:
            box = Box(*((int(begin), int(end)) for begin, end in shard.about["box"]))
            described = shard.tensors["values"][1]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(path / shard.file, "its box is not three ranges, as the manifest says") from None
        if prod(described) != prod(box.shape) or min(box.shape) < 0:
            raise CheckpointError(path / shard.file, f"must hold a box of {list(box.shape)}, got {described}")
        return box

    def _of_growing(self, key: str, its: GrowingTable) -> list[tuple[Path, Shard]]:
        """
        Return the shards of a table that grows which this rank reads.

        Those that it wrote, if ranks have the same keys as then. Else those that have some of its blocks; the order of
        a writer's rows is for a rank that has all blocks.
        """
        found, same = self._growing.get(key, []), self._same(key)
        if same:
            found = [each for each in found if each[1].about.get("rank") == self._contents.rank]
        if not found:
            raise CheckpointError(self._chain.manifest_path, f"must have keys of table {key!r}")
        if same:
            return found
        begin, end = its.blocks
        if end - begin < MOST_BLOCKS:
            found = [each for each in found if each[1].name != "order"]
        return [(path, shard) for path, shard in found if _has_blocks(path, shard, begin, end)]

    def _metadata_of(self, key: str) -> list[dict[str, Any]]:
        """Return what ranks have said of the keys that :meth:`_of_growing` are of."""
        of_ranks = self.metadata["variables"][key]["of_ranks"]
        return [of_ranks[self._contents.rank]] if self._same(key) else [each for each in of_ranks if each is not None]

    def _same(self, key: str) -> bool:
        its = self._contents.growing[key]
        return its.plan is not None and self.metadata["variables"][key]["where"] == its.where()

    def extra(self) -> Any:
        """Return what the caller of ``save`` wanted back."""
        return decoded(self.metadata["extra"], self._rest)

    # ---- Checks ------------------------------------------------------------------------------------------------------

    def check(self) -> Generator[None, None, None]:
        """Read all that this rank needs, a shard at a step; raise ``ValueError`` if it does not suit or is damaged."""
        contents, metadata = self._contents, self.metadata
        _check_names("tables", metadata["tables"].keys(), contents.fixed.keys())
        _check_names("tables that grow", metadata["variables"].keys(), contents.growing.keys())
        self._check_optimizer()
        self._check_rest()
        for key, its in contents.fixed.items():
            yield from self._check_fixed(key, its)
        for key, growing in contents.growing.items():
            yield from self._check_growing(key, growing)

    def _check_optimizer(self) -> None:
        optimizer, saved = self._contents.optimizer, self.metadata["optimizer"]
        if optimizer is None:
            return
        if saved is None:
            raise ValueError("load: optimizer must be None, as the checkpoint has none")
        if saved["class"] != type(optimizer).__name__:
            raise ValueError(
                f"load: optimizer must be a {saved['class']}, as in the checkpoint, got a {type(optimizer).__name__}"
            )
        groups, now = [group["names"] for group in saved["groups"]], self._contents.names_by_group()
        if groups != now:
            raise ValueError(f"load: optimizer must have the groups of parameters {groups}, got {now}")

    def _check_rest(self) -> None:
        state = self._contents.rest
        if len(self._rests) != 1:
            raise CheckpointError(self._chain.manifest_path, f"must have one shard 'rest', got {len(self._rests)}")
        ((path, shard),) = self._rests
        self._rest = self._chain.read_shard(path, shard)
        _check_names("parameters and states", self.metadata["rest"].keys(), state.keys())
        self._state = OrderedDict(decoded(self.metadata["rest"], self._rest))
        self._state._metadata = {  # type: ignore[attr-defined]
            prefix: {"version": version} for prefix, version in self.metadata["versions"].items()
        }
        for key, x in self._state.items():
            now = state[key]
            if isinstance(x, Tensor) and _kind(x) != _kind(now):
                raise ValueError(f"load: {key!r} must be {_kind(x)}, as in the checkpoint, got {_kind(now)}")

    def _check_fixed(self, key: str, its: FixedTable) -> Generator[None, None, None]:
        saved, weight = self.metadata["tables"][key], its.parts()[""]
        wanted = [its.kept.rows, its.kept.dim, dtype_name(weight)]
        got = [saved["rows"], saved["dim"], saved["states"][""][0]]
        if got != wanted:
            raise ValueError(f"load: table {key!r} must be {got[:2]} of {got[2]}, as in the checkpoint, got {wanted}")
        for state, (_, dims) in saved["states"].items():
            if state and self._contents.optimizer is None:
                continue
            kept = its.kept_of(torch.empty(0, 0) if dims == 2 else torch.empty(0))
            there = 0
            for path, shard, _, common in self._of_fixed(key, state, kept.box):
                self._chain.read_shard(path, shard)
                yield
                there += prod(common.shape)
            if there != prod(kept.box.shape):
                raise CheckpointError(
                    self._chain.manifest_path, f"must have all of {state or 'the weight'} of table {key!r}"
                )

    def _check_growing(self, key: str, its: GrowingTable) -> Generator[None, None, None]:
        store, checks = its.variable._store, checks_of(its.variable._rows)
        shards = self._of_growing(key, its)
        for saved in self._metadata_of(key):
            for name, has in (
                ("embedding_dim", store.weight.shape[1]),
                ("dtype", dtype_name(store.weight)),
                ("key_dtype", str(store.key_dtype).removeprefix("torch.")),
            ):
                if saved.get(name) != has:
                    raise ValueError(f"load: {name} of table {key!r} must be {saved.get(name)}, got {has}")
            check_metadata(self._chain.manifest_path, saved)
        for path, shard in shards:
            tensors = self._chain.read_shard(path, shard)
            checks.check_shard(path / shard.file, shard.name, tensors)
            yield
            admission = its.variable.admission
            if shard.name == "sketch" and isinstance(admission, SketchAdmission):
                saved_as, now = ((len(x), x.dtype) for x in (tensors["sketch"], admission.sketch))
                if saved_as != now:
                    raise ValueError(
                        f"load: the counters of the filter of table {key!r} must be {saved_as[0]} of {saved_as[1]}, as "
                        f"in the checkpoint, got {now[0]} of {now[1]}"
                    )

    # ---- Writing -----------------------------------------------------------------------------------------------------

    def write(self) -> Generator[None, None, None]:
        """Write all into the model and its optimizer, a shard at a step."""
        contents = self._contents
        with part_state(fixed=True):
            contents.module.load_state_dict(self._state, strict=False)
        for key, its in contents.fixed.items():
            yield from self._write_fixed(key, its)
        if contents.optimizer is not None:
            saved, tables = self.metadata["optimizer"], self.metadata["tables"]
            contents.optimizer.load_state_dict(contents.optimizer_state(saved, tables, self._rest))
        for key, growing in contents.growing.items():
            yield from self._write_growing(key, growing)

    def _write_fixed(self, key: str, its: FixedTable) -> Generator[None, None, None]:
        table_of(its.table.weight).release()
        optimizer = self._contents.optimizer
        there = {} if optimizer is None else optimizer.state.get(its.table.weight, {})
        its.states.clear()
        for state, (dtype, dims) in self.metadata["tables"][key]["states"].items():
            weight = its.parts()[""]
            if state and (optimizer is None or not weight.numel()):
                continue
            x = weight
            if state:
                shape = weight.shape if dims == 2 else weight.shape[:1]
                now = there.get(state)
                if isinstance(now, Tensor) and now.shape == shape and dtype_name(now) == dtype:
                    x = now  # no state is in memory twice
                else:
                    x = torch.zeros(shape, dtype=getattr(torch, dtype), device=weight.device)
                its.states[state] = x
            kept = its.kept_of(x)
            for path, shard, box, common in self._of_fixed(key, state, kept.box):
                values = self._chain.read_shard(path, shard)["values"].view(box.shape)
                with as_stored():
                    kept.write(x.view(len(x), -1), common, values[common.within(box)])
                yield

    def _write_growing(self, key: str, its: GrowingTable) -> Generator[None, None, None]:
        variable, shards = its.variable, self._of_growing(key, its)
        part = split_part(variable._stored_weight())
        has = None if part is None or self._same(key) else part.has
        device = variable._store.weight.device

        def wanted() -> Iterator[tuple[str, dict[str, Tensor]]]:
            sketches: dict[int, Tensor] = {}
            for path, shard in shards:
                tensors = self._chain.read_shard(path, shard)
                if shard.name == "sketch":
                    sketches[shard.about["rank"]] = tensors["sketch"]
                    continue
                if has is not None:
                    mine = has(tensors["keys"].to(device)).cpu()
                    tensors = {name: x[mine] for name, x in tensors.items()}
                yield shard.name, tensors
            if sketches:
                # Of a key its own rank has counted no less than has come; other ranks have counted other keys.
                yield "sketch", {"sketch": torch.stack([*sketches.values()]).amax(0)}

        with variable.writing():
            variable._training.forget()
            yield from refill(variable._rows, self._metadata_of(key), wanted())
            if has is not None and self._contents.rank > 0:
                variable._rows.evicted = 0  # counted on the first rank
            if self._same(key):
                its.note_saved(self._chain.path, self._chain.version.number)


def _has_blocks(path: Path, shard: Shard, begin: int, end: int) -> bool:
    """Say whether a shard may have keys of some blocks; one that does not say which it has may have all."""
    try:
        first, last = shard.about.get("blocks", (0, MOST_BLOCKS))
        return bool(first < end and begin < last)
    except (TypeError, ValueError):
        raise CheckpointError(path / shard.file, "its blocks are not a range, as the manifest says") from None


def _kind(x: Any) -> str:
    return f"a tensor of {dtype_name(x)} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _check_names(what: str, saved: Any, now: Any) -> None:
    missing, unexpected = sorted(saved - now), sorted(now - saved)
    if missing or unexpected:
        raise ValueError(
            f"load: the module must have the {what} of the checkpoint, but lacks {missing} and has {unexpected} beside "
            "them"
        )
