"""The contents of a model's checkpoint: tables, split or whole, the other state, and states of an optimizer."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._torch import as_stored
from ..tables.blocks import MOST_BLOCKS, by_block
from ..tables.boxes import Kept
from ..tables.part import part_state
from ..tables.table import table_of
from ..variable.rows import TableRows
from ._values import encoded
from .growing import metadata_of, shards_of
from .parts import Growing, HasTables, KeptKeys, SavedRows, SavedTable, SplitOverRanks

__all__ = ["Contents", "FixedTable", "GrowingTable", "dtype_name", "module_versions"]


@dataclass
class FixedTable:
    """
    A table with a fixed number of rows.

    Args:
        saved: the table, as its module describes it.
        writes: whether this rank writes its part: of copies the first does.
        states: the optimizer's states that have something for each row of this rank's part: ``[rows, D]`` or
            ``[rows]``.
        numbers: the optimizer's numbers beside those.
    """

    saved: SavedTable
    writes: bool
    states: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def weight(self) -> Parameter:
        """The part of the table that this rank keeps."""
        return self.saved.weight

    @property
    def kept(self) -> Kept:
        """What that is of the whole."""
        return self.saved.kept

    def parts(self) -> dict[str, Tensor]:
        """Return the stored weight, by the name "", and the stored states."""
        with as_stored():
            return {"": self.weight.detach(), **self.states}

    @property
    def has_rows(self) -> bool:
        """Whether this rank has some of the table."""
        return self.parts()[""].numel() > 0


@dataclass
class GrowingTable:
    """
    A table that grows.

    Args:
        table: the module that is the table.
        keys: the keys that this rank keeps.
        is_split: whether they are split over ranks; else each rank has all.
        writes: whether this rank writes its keys: the first rank writes copies.
        key: the name of the table in the model.
    """

    table: Growing
    keys: KeptKeys
    is_split: bool
    writes: bool
    key: str

    @property
    def rows(self) -> TableRows:
        """The rows that this rank has."""
        return self.table.table_rows

    def base(self, folder: str | os.PathLike[str]) -> int | None:
        """Return the version in a folder since whose step the changes are known, if any."""
        saved = self.rows.saved
        known = saved is not None and saved[1] == self._place(folder) and not self.rows.all_changed
        return saved[2] if saved is not None and known else None

    def note_saved(self, folder: str | os.PathLike[str], version: int) -> None:
        """Note a version with this rank's present rows."""
        self.rows.note_saved((self.rows.store.step, self._place(folder), version))

    def _place(self, folder: str | os.PathLike[str]) -> str:
        # Not the folder itself: save_delta() of the variable must not write there.
        return os.path.join(os.path.abspath(folder), self.key)

    def about(self) -> dict[str, Any] | None:
        """
        Apply evict options, and return the metadata of this rank's keys for a checkpoint; None if another rank writes
        them.
        """
        with self.table.settled():
            self.rows.evict()
            self.rows.store.states.flush()
            return metadata_of(self.rows) if self.writes else None

    def shards(self, since_base: bool) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """
        Yield this rank's shards, rows of the first tier block by block.

        Args:
            since_base: whether to yield only changes since :meth:`base`.
        """
        rows = self.rows
        with self.table.settled():
            assert rows.saved is not None or not since_base
            since = rows.saved[0] if rows.saved and since_base and not rows.store.states.moves_all_rows() else None
            yield from shards_of(rows, since, since_base, by_block)


class Contents:
    """
    The contents of a model's checkpoint on this rank.

    Args:
        module: the model; of a ``DistributedDataParallel`` the module in it.
        optimizer: an optimizer that holds parameters of the model, if any.
        what: ``"save"`` or ``"load"``, which all ranks are about to do.

    Raises:
        ValueError: tables are split over different ranks.
        RuntimeError: ranks call different things.
    """

    def __init__(self, module: Module, optimizer: Optimizer | None, what: str) -> None:
        self.module = module.module if isinstance(module, DistributedDataParallel) else module
        self.optimizer = optimizer
        its = [child.saved_over() for child in self.module.modules() if isinstance(child, SplitOverRanks)]
        for over in its:
            of_child, wanted = (dist.get_process_group_ranks(each.group) for each in (over, its[0]))
            if of_child != wanted:
                raise ValueError(
                    f"{what}: all tables must be split over the same ranks, {wanted}, got {of_child} of {over.name}: "
                    "take a folder for each"
                )
        alone = not its and not dist.is_initialized()
        self.group: Any = None if alone else its[0].group if its else dist.group.WORLD
        self.rank, self.ranks = (0, 1) if alone else (dist.get_rank(self.group), dist.get_world_size(self.group))
        self.fixed: dict[str, FixedTable] = {}
        self.growing: dict[str, GrowingTable] = {}
        self._find_tables()
        if its:
            its[0].announce(what, self.module.training)

    def _find_tables(self) -> None:
        found = [
            (title, child, child.saved_tables())
            for title, child in self.module.named_modules()
            # Without parameters its tables are buffers, as quantised ones are: they are saved as all buffers.
            if next(child.parameters(), None) is not None and isinstance(child, HasTables)
        ]
        # A table that grows is a module too: one in a collection is the collection's.
        inside = {
            id(each.table)
            for _, child, its in found
            for each in its
            if isinstance(each, SavedRows)
            if each.table is not child
        }
        for title, child, its in found:
            for each in its if id(child) not in inside else []:
                key = f"{title}.{each.key}".lstrip(".")
                if isinstance(each, SavedTable):
                    self.fixed[key] = FixedTable(each, not each.is_copied or self.rank == 0)
                    continue
                # All versions of the format have these words.
                keys = each.keys or KeptKeys(f"NoneType of {self.ranks}", (0, MOST_BLOCKS))
                is_split = each.keys is not None
                self.growing[key] = GrowingTable(each.table, keys, is_split, is_split or self.rank == 0, key)

    # ---- What is there now -------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> dict[int, str]:
        """The name of each parameter, by its id."""
        named = self.module.named_parameters(remove_duplicate=False)
        found: dict[int, str] = {}
        for name, parameter in named:
            found.setdefault(id(parameter), name)
        with as_stored():
            found.update({id(its.weight): key for key, its in self.fixed.items()})
            found.update({id(its.table.stored_weight()): key for key, its in self.growing.items()})
        return found

    @cached_property
    def rest(self) -> OrderedDict[str, Any]:
        """The state of the module without its tables; as torch's, it has the modules' versions."""
        with part_state(fixed=True):
            state: OrderedDict[str, Any] = self.module.state_dict()  # type: ignore[assignment]
        inside = tuple(
            f"{key.removesuffix('weight')}{child}."
            for key, its in self.growing.items()
            for child, _ in its.table.named_children()
        )
        for key in [key for key in state if key in self.fixed or key.startswith(inside)]:
            del state[key]
        return state

    def base(self, folder: str | os.PathLike[str]) -> int | None:
        """Return the version in a folder on which a delta of this rank can build, if any."""
        bases = {its.base(folder) for its in self.growing.values()}
        return bases.pop() if len(bases) == 1 else None

    def alike(self) -> dict[str, Any]:
        """Return the facts in which all ranks must agree, by their names."""
        optimizer = self.optimizer and (type(self.optimizer).__name__, self.names_by_group())
        return {
            "tables": [*self.fixed, *self.growing],
            "parameters and states": list(self.rest),
            "optimizer": optimizer,
        }

    def read(self) -> dict[str, Any]:
        """
        Bring tables and states up to date; return this rank's description of the model, for JSON, and dense tensors.

        Returns:
            ``"said"``: the manifest's content, and ``"tensors"`` by name.

        Raises:
            ValueError: a parameter of the optimizer is not the module's; a tensor that no rank has whole; a state that
                is no tensor and that JSON cannot hold.
        """
        tensors: dict[str, Tensor] = {}
        rest = {key: encoded(x, f"model.{key}", tensors) for key, x in self.rest.items()}
        said: dict[str, Any] = {"rest": rest, "versions": module_versions(self.rest), "optimizer": None}
        if self.optimizer is not None:
            said["optimizer"] = self._read_optimizer(tensors)
        for its in self.fixed.values():
            table_of(its.weight).flush()
        said["tables"] = {
            key: {
                "rows": its.kept.rows,
                "dim": its.kept.dim,
                "states": {name: [dtype_name(x), x.dim()] for name, x in its.parts().items()},
                "numbers": its.numbers,
                "has_rows": its.has_rows,
            }
            for key, its in self.fixed.items()
        }
        said["variables"] = {
            key: {"where": its.keys.where, "of_ranks": its.about()} for key, its in self.growing.items()
        }
        return {"said": said, "tensors": tensors}

    def _read_optimizer(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        assert self.optimizer is not None
        state_dict, groups = self.optimizer.state_dict(), []
        dense: dict[str, Any] = {}
        for name, state in self._states_by_name(state_dict):
            if name in self.growing:
                continue
            its = self.fixed.get(name)
            for what, x in state.items():
                if its is not None and isinstance(x, Tensor) and x.dim() > 0:
                    shape = its.parts()[""].shape
                    by_columns = its.saved.by_columns
                    if x.shape != shape and (x.shape != shape[:1] or by_columns):
                        wanted = f"{list(shape)}" + (", by columns" if by_columns else f" or [{shape[0]}]")
                        raise ValueError(
                            f"save: state {what!r} of table {name!r} must be {wanted}, something for each row, got "
                            f"{list(x.shape)}: take an optimizer of torchsparse_rec.optim"
                        )
                    its.states[what] = x
                else:
                    to = dense.setdefault(name, {}) if its is None else its.numbers
                    to[what] = encoded(x, f"optimizer.{name}.{what}", tensors)
        for k, (group, its_names) in enumerate(zip(state_dict["param_groups"], self.names_by_group(), strict=True)):
            options = {what: x for what, x in group.items() if what != "params"}
            groups.append({"names": its_names, "options": encoded(options, f"group {k} of the optimizer", tensors)})
        return {"class": type(self.optimizer).__name__, "groups": groups, "dense": dense}

    def names_by_group(self) -> list[list[str]]:
        """Return the names of the parameters of each of the optimizer's groups; see :meth:`read` for its errors."""
        assert self.optimizer is not None
        result = []
        for group in self.optimizer.param_groups:
            unknown = [k for k, parameter in enumerate(group["params"]) if id(parameter) not in self.names]
            if unknown:
                raise ValueError(
                    "the optimizer must hold parameters of the module alone, got another, number "
                    f"{unknown[0]} of a group"
                )
            result.append([self.names[id(parameter)] for parameter in group["params"]])
        return result

    def _states_by_name(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for names, group in zip(self.names_by_group(), state_dict["param_groups"], strict=True):
            for name, number in zip(names, group["params"], strict=True):
                yield name, state_dict["state"].get(number, {})

    # ---- What was saved ----------------------------------------------------------------------------------------------

    def optimizer_state(
        self,
        options: list[dict[str, Any]],
        dense: Mapping[str, dict[str, Any]],
        numbers: Mapping[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """
        Return a state for the optimizer's ``load_state_dict``.

        Args:
            options: the options of each group.
            dense: the states of parameters that are no tables, by name.
            numbers: the numbers of tables, by name. States of this rank's parts are in :attr:`fixed`.
        """
        assert self.optimizer is not None
        now = self.optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for names, group, its_options in zip(self.names_by_group(), now["param_groups"], options, strict=True):
            groups.append({**its_options, "params": group["params"]})
            for name, number in zip(names, group["params"], strict=True):
                its = self.fixed.get(name)
                if its is None:
                    found = dense.get(name, {})
                else:
                    found = {**its.states, **numbers[name]} if its.has_rows else {}
                if found and name not in self.growing:
                    state[number] = found
        return {"state": state, "param_groups": groups}


def module_versions(state: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the version of each module whose state this is: modules recognise older states by it."""
    return {prefix: metadata.get("version") for prefix, metadata in getattr(state, "_metadata", {}).items()}


def dtype_name(x: Tensor) -> str:
    """Return the name of a tensor's dtype in files."""
    return str(x.dtype).removeprefix("torch.")
