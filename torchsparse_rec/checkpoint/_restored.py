"""A version of a checkpoint to load: the parts that this rank needs, their checks, and their way into a model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Generator, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import as_stored
from ..optim.row_optimizer import RowOptimizer, check_options
from ..tables.blocks import MOST_BLOCKS, block_range
from ..tables.boxes import Box
from ..tables.part import part_state
from ..tables.table import split_part, table_of
from ..variable.filters import SketchAdmission
from ._contents import Contents, FixedTable, GrowingTable, dtype_name, module_versions
from ._form import check_form, is_within
from ._values import decoded
from .growing import check_metadata, checks_of, refill
from .manifest import CheckpointError, Shard
from .store import DTYPES, Chain

__all__ = ["Restored"]


class Restored:
    """
    A version to load.

    Args:
        contents: the contents of the model that loads it.
        chain: the version.

    Raises:
        ValueError: :func:`save` has not written it.
    """

    def __init__(self, contents: Contents, chain: Chain) -> None:
        self._contents, self._chain = contents, chain
        self.metadata = metadata = chain.version.metadata
        try:
            check_form(metadata)
        except ValueError as error:
            raise self._error(str(error)) from None
        for key, its in metadata["variables"].items():
            if len(its["of_ranks"]) != metadata["ranks"] or its["of_ranks"].count(None) == metadata["ranks"]:
                raise self._error(f"must have what {metadata['ranks']} ranks have of table {key!r}")
        self._growing: dict[Any, list[tuple[Path, Shard]]] = {}
        self._fixed: dict[tuple[Any, Any], list[tuple[Path, Shard]]] = {}
        self._rests: list[tuple[Path, Shard]] = []
        self._before: OrderedDict[str, Any] = OrderedDict()
        newest = chain.manifest_path.parent
        for path, shard in chain.shards():
            about = shard.about
            if "variable" in about:
                self._check_about(path, shard, "variable", metadata["variables"])
                if not is_within(about.get("rank"), 0, None if path != newest else metadata["ranks"]):
                    raise CheckpointError(path / shard.file, f"must be of a rank, got {about.get('rank')!r}")
                self._growing.setdefault(about["variable"], []).append((path, shard))
            elif path == newest and "table" in about:
                self._check_about(path, shard, "table", metadata["tables"])
                self._check_about(path, shard, "state", metadata["tables"][about["table"]]["states"])
                self._fixed.setdefault((about["table"], about["state"]), []).append((path, shard))
            elif path == newest:
                self._rests.append((path, shard))

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(self._chain.manifest_path, problem)

    def _check_names(self, what: str, saved: Any, now: Any) -> None:
        missing, unexpected = sorted(saved - now), sorted(now - saved)
        if missing or unexpected:
            found = [f"lacks {missing}"] * bool(missing) + [f"has {unexpected} beside them"] * bool(unexpected)
            raise self._error(f"load: the module must have the {what} of the checkpoint, but {' and '.join(found)}")

    def _check_kinds(self, grow: bool, saved: Any, now: Any) -> None:
        """Raise unless no table that is saved is there as one of the other kind, fixed or one that grows."""
        kinds = ("of a fixed size", "an EmbeddingVariable")
        for key in saved & now:
            raise self._error(
                f"load: table {key!r} must be {kinds[grow]}, as in the checkpoint, got one that is {kinds[not grow]}"
            )

    def _check_about(self, path: Path, shard: Shard, what: str, names: dict[str, Any]) -> None:
        name = shard.about.get(what)
        if not isinstance(name, str) or name not in names:
            raise CheckpointError(path / shard.file, f"must be of a {what} in {sorted(names)}, got {name!r}")

    # ---- What this rank reads ----------------------------------------------------------------------------------------

    def _of_fixed(self, key: str, state: str, box: Box) -> Iterator[tuple[Path, Shard, Box, Box]]:
        """Yield the shards that have some elements of a box, with their boxes and what both have in common."""
        for path, shard in self._fixed.get((key, state), []):
            its = self._box_of(path, shard)
            common = its.common(box)
            if common is not None:
                yield path, shard, its, common

    def _box_of(self, path: Path, shard: Shard) -> Box:
        about, values = shard.about.get("box"), shard.tensors.get("values")
        ranges = about if isinstance(about, list) else []
        if len(ranges) != 3 or not all(isinstance(each, list) and len(each) == 2 for each in ranges):
            raise CheckpointError(path / shard.file, f"its box must be three ranges, got {about!r}")
        if not all(is_within(begin, 0) and is_within(end, begin) for begin, end in ranges):
            raise CheckpointError(path / shard.file, f"its box must be three ranges, got {about!r}")
        box = Box(*((begin, end) for begin, end in ranges))
        dtype, _ = self.metadata["tables"][shard.about["table"]]["states"][shard.about["state"]]
        if values is None or values[0] != dtype or not _is_product(values[1], box.shape):
            raise CheckpointError(path / shard.file, f"must hold a box of {dtype} {list(box.shape)}, got {values}")
        return box

    def _of_growing(self, key: str, its: GrowingTable) -> list[tuple[Path, Shard]]:
        """
        Return the shards of a table that grows which this rank reads.

        Those that it wrote, if ranks have the same keys as then. Else the shards that have some of its blocks; the
        order of a writer's rows is for a rank that has all blocks.
        """
        found, same = self._growing.get(key, []), self._same(key)
        if same:
            found = [each for each in found if each[1].about.get("rank") == self._contents.rank]
        if not found:
            raise self._error(f"must have keys of table {key!r}")
        if same:
            return found
        begin, end = its.keys.blocks
        if end - begin < MOST_BLOCKS:
            found = [each for each in found if each[1].name != "order"]
        return [(path, shard) for path, shard in found if _has_blocks(path, shard, begin, end)]

    def _metadata_of(self, key: str) -> list[dict[str, Any]]:
        """Return the metadata from the ranks whose keys :meth:`_of_growing` has."""
        of_ranks = self.metadata["variables"][key]["of_ranks"]
        found = of_ranks if not self._same(key) else [of_ranks[self._contents.rank]]
        return [each for each in found if each is not None]

    def _same(self, key: str) -> bool:
        its = self._contents.growing[key]
        return its.is_split and self.metadata["variables"][key]["where"] == its.keys.where

    def extra(self) -> Any:
        """Return the ``extra`` of ``save``, once :meth:`check` has been called."""
        return self._extra

    # ---- Checks ------------------------------------------------------------------------------------------------------

    def check(self) -> Generator[None, None, None]:
        """Read all that this rank needs, a shard at a step; raise ``ValueError`` if it does not suit or is damaged."""
        contents, metadata = self._contents, self.metadata
        self._check_kinds(False, metadata["tables"].keys(), contents.growing.keys())
        self._check_kinds(True, metadata["variables"].keys(), contents.fixed.keys())
        self._check_names("tables", metadata["tables"].keys(), contents.fixed.keys())
        self._check_names("tables that grow", metadata["variables"].keys(), contents.growing.keys())
        self._check_optimizer()
        self._decode()
        self._check_rest()
        for key, its in contents.fixed.items():
            yield from self._check_fixed(key, its)
        self._check_optimizer_state()
        for key, growing in contents.growing.items():
            yield from self._check_growing(key, growing)

    def _check_optimizer(self) -> None:
        optimizer, saved = self._contents.optimizer, self.metadata["optimizer"]
        if optimizer is None:
            return
        if saved is None:
            raise self._error("has no optimizer: load: optimizer must be None, as in the checkpoint")
        if saved["class"] != type(optimizer).__name__:
            raise self._error(
                f"load: optimizer must be a {saved['class']}, as in the checkpoint, got a {type(optimizer).__name__}"
            )
        groups, now = [group["names"] for group in saved["groups"]], self._contents.names_by_group()
        if groups != now:
            raise self._error(f"load: optimizer must have the groups of parameters {groups}, got {now}")

    def _decode(self) -> None:
        """Decode all values of the manifest, with the tensors of the shard ``rest``; all of these must be used."""
        if len(self._rests) != 1 or self._rests[0][1].name != "rest":
            names = [shard.name for _, shard in self._rests]
            raise self._error(f"must have one shard 'rest' beside the tables' shards, got {names}")
        metadata, saved = self.metadata, self.metadata["optimizer"] or {"groups": [], "dense": {}}
        ((path, shard),) = self._rests
        tensors = self._chain.read_shard(path, shard)
        try:
            # In the order of save(), by the names that it has given them.
            self._state = OrderedDict((key, decoded(x, f"model.{key}", tensors)) for key, x in metadata["rest"].items())
            self._dense, self._numbers = (
                {
                    name: {what: decoded(x, f"optimizer.{name}.{what}", tensors) for what, x in its.items()}
                    for name, its in states.items()
                }
                for states in (saved["dense"], {key: its["numbers"] for key, its in metadata["tables"].items()})
            )
            self._options = [
                decoded(group["options"], f"group {k} of the optimizer", tensors)
                for k, group in enumerate(saved["groups"])
            ]
            self._extra = decoded(metadata["extra"], "extra", tensors)
        except (RecursionError, ValueError) as error:
            raise self._error(str(error)) from None
        if tensors:
            raise self._error(f"must have what is in {path / shard.file} by the names {sorted(tensors)}")
        dense = {name for group in saved["groups"] for name in group["names"]} - metadata["tables"].keys()
        if unknown := sorted(self._dense.keys() - dense):
            raise self._error(f"must have states of the optimizer's parameters alone, got {unknown}")

    def _check_rest(self) -> None:
        state, versions = self._contents.rest, self.metadata["versions"]
        self._check_names("parameters and states", self._state.keys(), state.keys())
        its_modules = {key.rpartition(".")[0] for key in state} & module_versions(state).keys()
        if missing := sorted(its_modules - versions.keys()):
            raise self._error(f"must have the versions of the modules {missing}")
        self._state._metadata = {  # type: ignore[attr-defined]
            prefix: {"version": version} for prefix, version in versions.items()
        }
        for key, x in self._state.items():
            now = state[key]
            if (isinstance(x, Tensor) or isinstance(now, Tensor)) and _kind(x) != _kind(now):
                raise self._error(f"load: {key!r} must be {_kind(x)}, as in the checkpoint, got {_kind(now)}")

    def _check_optimizer_state(self) -> None:
        """Load the optimizer's state into a copy of the optimizer that has nothing of its own."""
        optimizer = self._contents.optimizer
        if optimizer is None:
            return
        probe = object.__new__(type(optimizer))
        probe.__dict__ = {**vars(optimizer), "_optimizer_load_state_dict_post_hooks": OrderedDict()}
        state = self._contents.optimizer_state(self._options, self._dense, self._numbers)
        try:
            _load_into(probe, state)
            for k, group in enumerate(probe.param_groups):
                check_options(f"group {k}", group, optimizer, k)
        except Exception as error:  # of any optimizer, also of torch's, which raise what comes
            raise self._error(f"its state of the optimizer is none of {type(optimizer).__name__}: {error}") from error

    def _check_fixed(self, key: str, its: FixedTable) -> Generator[None, None, None]:
        saved, weight = self.metadata["tables"][key], its.parts()[""]
        its.states.clear()
        for state, described in saved["states"].items():
            dtype, dims = described if len(described) == 2 else (None, None)
            if not isinstance(dtype, str) or dtype not in DTYPES or dims not in ((1, 2) if state else (2,)):
                raise self._error(f"states.{state} of table {key!r} must be a dtype and dimensions, got {described}")
        wanted = [its.kept.rows, its.kept.dim, dtype_name(weight)]
        got = [saved["rows"], saved["dim"], saved["states"][""][0]]
        if got != wanted:
            raise self._error(
                f"load: table {key!r} must be {got[:2]} of {got[2]}, as in the checkpoint, got {wanted[:2]} of "
                f"{wanted[2]}"
            )
        for state, (dtype, dims) in saved["states"].items():
            if state and self._contents.optimizer is None:
                continue
            shape = weight.shape if dims == 2 else weight.shape[:1]
            if state and weight.numel():  # in no memory, for the check of the optimizer
                its.states[state] = torch.zeros((), dtype=DTYPES[dtype], device=weight.device).expand(shape)
            kept = its.kept.of_state(torch.empty(0, 0) if dims == 2 else torch.empty(0))
            there = 0
            open_boxes: list[Box] = []
            for path, shard, box, common in sorted(self._of_fixed(key, state, kept.box), key=lambda each: each[2]):
                open_boxes = [each for each in open_boxes if each.places[1] > box.places[0]]
                if any(box.common(each) for each in open_boxes):
                    raise CheckpointError(path / shard.file, f"its box {box} is in another file too")
                open_boxes.append(box)
                self._chain.read_shard(path, shard)
                yield
                there += prod(common.shape)
            if there != prod(kept.box.shape):
                raise self._error(f"must have all of {state or 'the weight'} of table {key!r}")

    def _check_growing(self, key: str, its: GrowingTable) -> Generator[None, None, None]:
        store, checks = its.rows.store, checks_of(its.rows)
        shards = self._of_growing(key, its)
        of_ranks, newest = self.metadata["variables"][key]["of_ranks"], self._chain.manifest_path.parent
        for saved in filter(None, of_ranks):
            for name, has in (
                ("embedding_dim", store.weight.shape[1]),
                ("dtype", dtype_name(store.weight)),
                ("key_dtype", str(store.key_dtype).removeprefix("torch.")),
            ):
                if saved.get(name) != has:
                    raise self._error(f"load: {name} of table {key!r} must be {saved.get(name)}, got {has}")
            check_metadata(self._chain.manifest_path, saved)
        for path, shard in shards:
            saved = of_ranks[shard.about["rank"]] if path == newest else {"states": []}
            if saved is None:
                raise self._error(f"must have what rank {shard.about['rank']} has of table {key!r}")
            tensors = self._chain.read_shard(path, shard)
            checks.check_shard(path / shard.file, shard.name, tensors, saved["states"])
            yield
            if "blocks" in shard.about and [*block_range(tensors["keys"])] != shard.about["blocks"]:
                raise CheckpointError(path / shard.file, f"must have keys of the blocks {shard.about['blocks']}")
            admission = its.rows.admission
            if shard.name == "sketch" and isinstance(admission, SketchAdmission):
                saved_as, now = ((len(x), x.dtype) for x in (tensors["sketch"], admission.sketch))
                if saved_as != now:
                    raise CheckpointError(
                        path / shard.file,
                        f"load: the counters of the filter of table {key!r} must be {saved_as[0]} of {saved_as[1]}, as "
                        f"in the checkpoint, got {now[0]} of {now[1]}",
                    )

    # ---- Writing -----------------------------------------------------------------------------------------------------

    def write_rest(self) -> None:
        """Load the state beside tables, first of all: a module may yet refuse its state."""
        self._before = copy.deepcopy(self._contents.rest)
        try:
            with part_state(fixed=True):
                self._contents.module.load_state_dict(self._state, strict=False)
        except Exception as error:  # of any module
            raise self._error(f"the module does not take its states: {error}") from error

    def take_back_rest(self) -> None:
        """Undo :meth:`write_rest`, which has raised on a rank."""
        with part_state(fixed=True):
            self._contents.module.load_state_dict(self._before, strict=False)

    def write(self) -> Generator[None, None, None]:
        """Write tables and the optimizer's states, a shard at a step, after :meth:`write_rest`."""
        contents = self._contents
        for key, its in contents.fixed.items():
            yield from self._write_fixed(key, its)
        if contents.optimizer is not None:
            state = contents.optimizer_state(self._options, self._dense, self._numbers)
            _load_into(contents.optimizer, state)
        for key, growing in contents.growing.items():
            yield from self._write_growing(key, growing)

    def _write_fixed(self, key: str, its: FixedTable) -> Generator[None, None, None]:
        table_of(its.weight).release()
        optimizer = self._contents.optimizer
        there = {} if optimizer is None else optimizer.state.get(its.weight, {})
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
                    x = torch.zeros(shape, dtype=DTYPES[dtype], device=weight.device)
                its.states[state] = x
            kept = its.kept.of_state(x)
            for path, shard, box, common in self._of_fixed(key, state, kept.box):
                values = self._chain.read_shard(path, shard)["values"].view(box.shape)
                with as_stored():
                    kept.write(x.view(len(x), -1), common, values[common.within(box)])
                yield

    def _write_growing(self, key: str, its: GrowingTable) -> Generator[None, None, None]:
        rows, shards = its.rows, self._of_growing(key, its)
        part = split_part(its.table.stored_weight())
        has = None if part is None or self._same(key) else part.has
        device = rows.store.weight.device

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
                # A key's own rank has counted at least its occurrences; other ranks have counted other keys.
                yield "sketch", {"sketch": torch.stack([*sketches.values()]).amax(0)}

        with its.table.replacing():
            yield from refill(rows, self._metadata_of(key), wanted())
            if has is not None and self._contents.rank > 0:
                rows.evicted = 0  # counted on the first rank
            if self._same(key):
                its.note_saved(self._chain.path, self._chain.version.number)


def _load_into(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state whose tensors are for this optimizer alone: one that would copy them has them twice in memory."""
    if isinstance(optimizer, RowOptimizer):
        optimizer.load_own(state)
    else:
        optimizer.load_state_dict(state)


def _has_blocks(path: Path, shard: Shard, begin: int, end: int) -> bool:
    """Say whether a shard may have keys of some blocks; a shard that does not list its blocks may have all."""
    its = shard.about.get("blocks", [0, MOST_BLOCKS])
    if not isinstance(its, list) or len(its) != 2 or not all(is_within(each, 0, MOST_BLOCKS + 1) for each in its):
        raise CheckpointError(path / shard.file, f"its blocks must be a range, got {its!r}")
    return begin < end and begin < its[1] and its[0] < end


def _kind(x: Any) -> str:
    return f"a tensor of {dtype_name(x)} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _is_product(shape: Any, wanted: tuple[int, ...]) -> bool:
    return isinstance(shape, list) and all(is_within(n, 0) for n in shape) and prod(shape) == prod(wanted)
