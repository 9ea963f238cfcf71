"""A table whose keys are not known beforehand: DeepRec's Embedding Variable."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from .._reduction import SUM
from .._torch import as_stored
from .._torch_modules import any_in_fsdp, is_copied_to_average, is_in_ddp
from ..checkpoint.growing import restore, save
from ..tables.table import Table, is_growing_stale, table_of
from ..variable.arguments import check_places, check_trainable, check_whole
from ..variable.records import Export as Export
from ..variable.training_rows import TrainingRows, begin
from ._keyed_table import KeyedTable
from ._lookup import checked_ids, look_up, rows_like
from ._read import TableSet, read
from ._refusals import growing_untraced, refuse_clipped
from ._route import PLAIN, route
from .plan import Ids, LookupPlan

__all__ = ["EmbeddingVariable", "Export", "begin_lookups"]

_CALL_INSTEAD = "the module that distributed.shard() has split"


class EmbeddingVariable(KeyedTable):
    """
    A lookup table for ids of any range, without a vocabulary: a row is made when its id first comes.

    In ``train()``, unknown ids that the filter admits get a row. Each id's lookups are counted (its frequency), and the
    step of the last one is noted (its version). In ``eval()`` nothing is written: an unknown id has the initial value
    that its row would get, or ``default_value_no_permission`` where there is a filter. Initial values are a function of
    the seed and the id, so the order in which ids come does not matter.

    The table grows by doubling. ``weight`` remains the same Parameter, with more rows; optimizers of
    :mod:`torchsparse_rec.optim` grow their states with it. (torch's optimizers cannot know that rows come and go.)

    Args:
        embedding_dim: elements of a row, at least 1.
        name: the name of the table, for errors and files. Default: ``"embedding_variable"``.
        key_dtype: torch.int64 (the default) or torch.int32. All values are legal keys.
        initializer: initial values: one of :mod:`torchsparse_rec.initializers`; a number; ``P`` rows, where a key gets
            row ``key mod P``; or a function that fills a tensor in place. Default: as ``ev_option.init_option`` says,
            or a truncated normal distribution of standard deviation 1, as in DeepRec.
        ev_option: filters, evictions, tiers, see :class:`EmbeddingVariableOption`. Default: none of them.
        target_gpu: the number of the GPU that has the table; -1 (default): the table is on ``device``. In a job of
            ``torch.distributed`` it is the number of the rank to which :func:`distributed.shard` gives the table, on
            whatever device; -1: ``shard`` splits it by a hash of the key.
        capacity: the initial number of rows. Default 1024.
        seed: the seed of random initializers. Default: derived from the name, so that tables of different names differ.
        device: the device of the table. Default: torch's default device, or the GPU if the first tier is HBM.
        dtype: float16, bfloat16, float32 (default) or float64.
        grad_mode: the argument of :class:`Embedding`; None (default) is ``"sparse"``.

    Shape:
        ``input``: integers of any shape; the result has ``embedding_dim`` appended. A jagged nested tensor gives
        a jagged nested tensor.

    Raises:
        RuntimeError: the capacity is less than the ids of one step.
        ValueError: wrong sizes, dtypes or options.

    Without an optimizer of :mod:`torchsparse_rec.optim` every lookup in ``train()`` counts as a separate step: with a
    capacity, look up all ids of a step at once then. Do not erase keys between a backward and its optimizer step. Under
    ``torch.compile`` the lookup breaks the graph: a table that grows cannot be part of one.

    Source: DeepRec's ``EmbeddingVariable``.

    Example:
        >>> table = EmbeddingVariable(2, initializer=0.5)
        >>> table(torch.tensor([[9_000_000_000, -4], [9_000_000_000, 7]])).shape
        torch.Size([2, 2, 2])
        >>> table.total_count(), table.export().keys
        (3, tensor([9000000000,         -4,          7]))
    """

    _sparse = True
    max_norm = None
    scale_grad_by_freq = False
    # The largest norm with which a collection reads a row, for whoever reads rows without it; None: any.
    _clip: float | None = None
    # The count of changes at which the table was made fit for training, its weight then, and the weight's optimizer.
    _fit: tuple[int, Any, Any] = (-1, None, None)

    # ---- Lookups -----------------------------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of ``input``, see :class:`EmbeddingVariable`."""
        if self._clip is not None:
            refuse_clipped("EmbeddingVariable", "its config", self)
        if torch.compiler.is_exporting():
            return self._look_up_in_program(input)
        if torch.compiler.is_compiling():
            return growing_untraced(self.forward, input)  # type: ignore[no-any-return]
        x, _, ids = self.inputs_of(input)
        return self.output_of(x, self._look_up(ids.indices))

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(self, input: Tensor) -> Tensor: ...

    def inputs_of(self, input: Tensor) -> tuple[Tensor, list[int], Ids]:
        """Return a call's input, the place of its only feature, and the keys."""
        input = checked_ids("EmbeddingVariable", input)
        self._refuse_tracing()
        keys = self._as_keys(input.values() if input.is_nested else input)
        return input, [0], Ids(keys, None, None, (len(keys),), False)

    output_of = staticmethod(rows_like)

    def _look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of keys ``[N]``."""
        check_whole(self.stored_weight(), "EmbeddingVariable", _CALL_INSTEAD)
        with as_stored():
            return self._look_up_here(ids)

    def trains(self) -> bool:
        """Say whether lookups insert keys: in ``train()``, but not where ``update_bn`` calls an AveragedModel."""
        return self.training and (self._model is None or torch.is_grad_enabled())

    def _look_up_here(self, ids: Tensor, occurrences: Tensor | None = None) -> Tensor:
        """Return the rows of keys ``[N]`` that all belong to this process; see :meth:`rows_of`."""
        check_places(self.name, self.stored_weight(), self.keys)
        if self.trains():
            with self.writing():
                rows = self.rows_of(ids, occurrences)
            kind = self._gradient_kind(self.stored_weight(), len(ids))  # which may write the table
            with self._lock.reading():
                return self._values(rows, kind)
        if torch.is_grad_enabled() and self.stored_weight().requires_grad:
            return self._values_of_present(ids)
        return self._read_here(ids)

    def look_up_tables(
        self, plan: LookupPlan, tables: Sequence[int], ids: Ids, occurrences: Tensor | None = None
    ) -> Tensor:
        """Look up keys of this rank, by a plan whose lookups have them in order."""
        with as_stored():
            return self._look_up_here(ids.indices.to(self.key_dtype), occurrences).reshape(-1)

    @torch.no_grad()
    def lookup(self, input: Tensor) -> Tensor:
        """
        Look up without training, in either mode: nothing is inserted, counted or moved between tiers.

        Any number of threads may call it while another one trains; each row is wholly from before or after an update.

        Args:
            input: the argument of the module.

        Returns:
            As from the module, without a gradient.

        Example:
            >>> EmbeddingVariable(2, initializer=0.5).lookup(torch.tensor([3]))
            tensor([[0.5000, 0.5000]])
        """
        input = checked_ids("EmbeddingVariable.lookup", input)
        if self._clip is not None:
            refuse_clipped("EmbeddingVariable.lookup", "its config", self)
        check_whole(self.stored_weight(), "EmbeddingVariable.lookup", _CALL_INSTEAD)
        keys = self._as_keys(input.values() if input.is_nested else input)
        return rows_like(input, self._read_here(keys))

    @torch.no_grad()
    def _read_here(self, ids: Tensor) -> Tensor:
        """Do as :meth:`lookup` with keys ``[N]`` that all belong to this process."""
        if self._training.newcomers and not self._training.waits_for_a_step():
            with self.settled():
                pass
        with self._lock.reading(), as_stored():
            weight = self.stored_weight()
            if self.cold is None and not table_of(weight).is_stale():
                return self._rows_of_storage(ids)
            rows = self.keys.find(ids)
            plan = self._plan_of(SUM, weight.shape[0], weight.shape[1], -1, False)
            values = read(plan, TableSet([weight]), Ids(rows.clamp_min(0), None, None, (len(ids),), False))[0]
            values = values.reshape(len(ids), self.embedding_dim)
            return torch.where((rows < 0).unsqueeze(1), self._absent(ids, rows), values)

    def prefetch(self, input: Tensor) -> None:
        """
        Begin to read, in the background, the rows of the next batch that are not in the first tier.

        Args:
            input: the argument of the module. Without tiers this does nothing.
        """
        input = checked_ids("EmbeddingVariable.prefetch", input)
        if self.cold is not None:
            with self.writing():
                self.cold.prefetch(self._as_keys(input.values() if input.is_nested else input))

    def _rows_of_storage(self, ids: Tensor) -> Tensor:
        """Return the values of keys, where no row is stale or in another tier."""
        weight = self.stored_weight()
        return ops.table_lookup(
            self.keys.index,
            self.keys.entries,
            weight.detach(),
            ids,
            missing=self._no_permission(weight),
            **self.initial.options(weight.dtype),
        )

    def _look_up_in_program(self, input: Tensor) -> Tensor:
        """Look up for ``torch.export``: the exported program contains the present keys and rows."""
        input = checked_ids("EmbeddingVariable", input)
        why = None
        if self.training:
            why = "a program cannot insert keys: call eval() on the model"
        elif self.cold is not None:
            why = "a program has no tiers: export a table whose storage is in memory only"
        elif is_growing_stale(self):
            why = "rows are stale: call flush() of their optimizer"
        if why is not None:
            raise RuntimeError(
                f"EmbeddingVariable {self.name!r} cannot be exported as it is: {why} before torch.export"
            )
        return self._rows_of_storage(self._as_keys(input)).reshape(*input.shape, self.embedding_dim)

    def train(self, mode: bool = True):
        """Set the mode as :meth:`torch.nn.Module.train` does. Stale rows stay: lookups read them up to date."""
        return torch.nn.Module.train(self, mode)

    def _values(self, rows: Tensor, kind: str) -> Tensor:
        """Return some rows of the weight, with a gradient of a kind."""
        weight = self.stored_weight()
        way = route(self, (0,), [weight], kind)
        if way == PLAIN:
            return look_up(weight, rows, None, False, kind == "sparse")
        ids = Ids(rows, None, None, (len(rows),), False)
        return self._look_up_otherwise(way, kind, weight, SUM, None, ids).reshape(len(rows), self.embedding_dim)

    def _values_of_present(self, ids: Tensor) -> Tensor:
        """Look up without inserting, with a gradient to rows of the first tier; other rows stay where they are."""
        with self.writing():
            rows = self.keys.find(ids)
            where = (rows >= 0).nonzero().flatten()
            self._rows.note_written(ids[where])  # the optimizer may move these rows, but their versions do not change
            absent = self._absent(ids, rows)
            kind = self._gradient_kind(self.stored_weight(), len(where))
            return absent.index_copy(0, where, self._values(rows[where], kind))

    def _as_keys(self, input: Tensor) -> Tensor:
        if self.key_dtype == torch.int32 and input.dtype != torch.int32:
            raise ValueError(f"EmbeddingVariable: input must be of the key_dtype, int32, got {input.dtype}")
        return input.reshape(-1)

    def _no_permission(self, weight: Tensor) -> Tensor | None:
        """Return the values of a key that is not admitted; None without a filter."""
        if self.admission is None:
            return None
        return weight.new_full((self.embedding_dim,), self._training.default)

    def _absent(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the values of keys without a row in the first tier; other positions have undefined values."""
        weight = self.stored_weight().detach()
        missing = self._no_permission(weight)
        values = self.initial.rows_of(ids, weight, rows < 0) if missing is None else missing.repeat(len(ids), 1)
        if self.cold is not None:
            self.cold.read(ids, rows, values)
        return values

    # ---- Checkpoints in folders --------------------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], *, keep: int | None = None, on_phase: Callable[[str], None] | None = None
    ) -> int:
        """
        Write a full checkpoint: all rows of all tiers, optimizer states, filters.

        One rename at the end makes it the next numbered version under ``path``: whenever the process is killed, and
        whatever fails, earlier versions stay whole. Evict options are applied first.

        Args:
            path: a folder that is only for this variable.
            keep: the number of restorable versions that stay, the last ones. Default: all.
            on_phase: a function that is called with the name of each phase.

        Returns:
            The version's number.

        Raises:
            ImportError: safetensors is missing (the extra ``checkpoint``).
            OSError: the disk is full or fails; the error names the file.

        Source: DeepRec's full checkpoints. The files are safetensors.

        Example:
            >>> import tempfile
            >>> from torchsparse_rec.nn import EmbeddingVariable
            >>> folder = tempfile.mkdtemp()
            >>> table = EmbeddingVariable(2)
            >>> table.insert([7, 8], [[1.0, 2.0], [3.0, 4.0]])
            >>> table.save(folder)
            1
            >>> table.insert([8, 9], [[5.0, 6.0], [7.0, 8.0]])
            >>> table.save_delta(folder)
            2
            >>> other = EmbeddingVariable(2)
            >>> other.restore(folder)
            >>> other.export().values
            tensor([[1., 2.],
                    [5., 6.],
                    [7., 8.]])
        """
        return save(self, "full", path, keep, on_phase)

    def save_delta(
        self, path: str | os.PathLike[str], *, keep: int | None = None, on_phase: Callable[[str], None] | None = None
    ) -> int:
        """
        Write the changes since the last :meth:`save` or delta: rows looked up in training, keys erased or evicted.

        If the optimizer also moves rows without a gradient (Adam, momentum, decay, unless ``lazy=True``), all rows have
        changed. If more keys have gone, or were written by :meth:`insert`, than the table has rows, and more than 2^20,
        a full version may be written.

        Args:
            path: the folder of the last :meth:`save`, :meth:`save_delta` or :meth:`restore`.
            keep: the argument of :meth:`save`.
            on_phase: the argument of :meth:`save`.

        Returns:
            The version's number.

        Raises:
            ValueError: the last checkpoint is in another folder, there is none, or a state_dict has been loaded since.
            OSError: the disk is full or fails; the error names the file.

        Source: DeepRec's incremental checkpoints.

        Example:
            See :meth:`save`.
        """
        return save(self, "delta", path, keep, on_phase)

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
            shard: the number of this shard: only keys with ``key mod num_shards == shard`` are restored. Default 0.
            num_shards: the number of shards. Default 1: all keys are restored.

        Raises:
            FileNotFoundError: there is no checkpoint.
            OSError: a file cannot be read. If it disappears while rows are written, the rows read until then stay.
            ValueError: the checkpoint is of a table of another embedding_dim or key_dtype. Or it is damaged, or not a
                variable's checkpoint; then the error names the file. The variable is unchanged then: everything is read
                and checked first.

        Example:
            See :meth:`save`.
        """
        restore(self, path, version, shard, num_shards)

    # ---- Rows in training, for collections too -----------------------------------------------------------------------

    @torch.no_grad()
    def rows_of(self, ids: Tensor, occurrences: Tensor | None = None) -> Tensor:
        """
        Return the rows of ``weight`` that keys have in this training step, ``[N]`` int64; insert new keys.

        No other thread may read or write the table meanwhile.

        Args:
            ids: the keys, ``[N]``.
            occurrences: ``[N]``, the number of lookups of each, by which it is counted. Default: once.
        """
        if occurrences is not None:  # filters and frequencies count each of them
            rows = self.rows_of(ids.repeat_interleave(occurrences))
            return rows[occurrences.cumsum(0) - occurrences]
        return begin_lookups([self], [len(ids)])[0].rows_of(ids)

    def _make_fit(self) -> None:
        """Check that the table can be trained, and register it for optimizers' steps."""
        weight = self.stored_weight()
        check_trainable(self, self.name, weight)
        self._store.tend(self)
        self._fit = (Table.changes, weight, table_of(weight).optimizer_reference)

    def _apply(self, fn: Any, recurse: bool = True):
        self._flush()
        with as_stored():
            super()._apply(fn, recurse)
        self._store.tend(self)  # the Parameter may be another
        return self

    def __getstate__(self) -> dict[str, Any]:
        """
        Return the state for copies and pickles.

        Raises:
            TypeError: if rows are on disk.
        """
        self._flush()
        model = weakref.ref(self) if is_copied_to_average() else None
        return {**super().__getstate__(), "_model": model, "_fit": (-1, None, None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the result of :meth:`__getstate__`."""
        self._model = None  # older pickles do not have it
        super().__setstate__(state)
        self._rows.tell_keys()
        self._store.follow(self.stored_weight)
        self._store.tend(self)


# ---- Several tables --------------------------------------------------------------------------------------------------


def begin_lookups(variables: Sequence[EmbeddingVariable], counts: Sequence[int]) -> list[TrainingRows]:
    """Prepare a training lookup of so many ids of each table, and return what finds their rows."""
    now = None if is_in_ddp() or any_in_fsdp(variables) else Table.changes
    for variable in variables:
        if variable._fit[0] != now or variable._fit[1] is not variable._parameters.get("weight"):
            variable._make_fit()
    tables = [variable._training for variable in variables]
    optimizers = [variable._fit[2] for variable in variables]
    begin(tables, counts, [reference is None or reference() is None for reference in optimizers])
    return tables
