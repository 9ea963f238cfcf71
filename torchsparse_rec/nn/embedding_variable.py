"""A table whose keys are not known beforehand: DeepRec's Embedding Variable."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import ops
from .._reduction import SUM
from ..tables.table import is_growing_stale, table_of
from ..variable.cold import ColdRows, cold_rows_of
from ..variable.contents import Contents
from ..variable.contents import Export as Export
from ..variable.eviction import Eviction
from ..variable.filters import admission_of
from ..variable.growth import Growth
from ..variable.guard import Guard
from ..variable.initial import InitialRows
from ..variable.keys import KeyRows
from ..variable.memory import new_zeros
from ..variable.options import EmbeddingVariableOption
from ..variable.parts import Part
from ..variable.restoring import Restoring
from ..variable.saving import Saving
from ..variable.training_rows import TrainingRows
from ._lookup import check_ids, look_up
from ._plan import Ids
from ._read import TableSet, read
from .auto import AutoChoice
from .grad_mode import GradModeMixin, forward_untraced

__all__ = ["EmbeddingVariable", "Export"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class EmbeddingVariable(TrainingRows, Contents, Growth, Saving, Restoring, GradModeMixin):
    """
    A lookup table for ids of any range, without a vocabulary: a row is made when its id first comes.

    In ``train()``, unknown ids that the filter admits get a row; each id's lookups are counted (its frequency), and the
    step of the last one is noted (its version). In ``eval()`` nothing is written: an unknown id has the initial value
    that its row would get, or ``default_value_no_permission`` where there is a filter. Initial values are a function of
    the seed and the id, so the order in which ids come does not matter.

    The table grows by doubling. ``weight`` remains the same Parameter, with more rows; optimizers of
    :mod:`torchsparse_rec.optim` grow their states with it. (torch's optimizers cannot know that rows come and go.)

    Args:
        embedding_dim: elements of a row, at least 1.
        name: of the table, for errors and files. Default: ``"embedding_variable"``.
        key_dtype: torch.int64 (the default) or torch.int32. All values are legal keys.
        initializer: initial values: one of :mod:`torchsparse_rec.initializers`; a number; ``P`` rows, of which a key
            gets row ``key mod P``; or a function that fills a tensor in place. Default: as ``ev_option.init_option``
            says, or a truncated normal distribution of standard deviation 1, as in DeepRec.
        ev_option: filters, evictions, tiers, see :class:`EmbeddingVariableOption`. Default: none of them.
        target_gpu: the number of the GPU that has the table; -1 (default): the table is on ``device``.
        capacity: the initial number of rows. Default 1024.
        seed: of random initializers. Default: derived from the name, so that tables of different names differ.
        device: of the table. Default: torch's default device, or the GPU if the first tier is HBM.
        dtype: float16, bfloat16, float32 (default) or float64.
        grad_mode: as of :class:`Embedding`; None (default) is ``"sparse"``.

    Shape:
        ``input``: int32 or int64 of any shape; the result has ``embedding_dim`` appended. A jagged nested tensor gives
        a jagged nested tensor.

    Raises:
        RuntimeError: the capacity is less than the ids of one step.
        ValueError: wrong sizes, dtypes or options.

    Without an optimizer of :mod:`torchsparse_rec.optim` every lookup in ``train()`` counts as a step of its own: with a
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

    keys: KeyRows
    _filtered: Tensor
    _sparse = True
    max_norm = None

    def __init__(
        self,
        embedding_dim: int,
        *,
        name: str | None = None,
        key_dtype: torch.dtype = torch.int64,
        initializer: Any = None,
        ev_option: EmbeddingVariableOption | None = None,
        target_gpu: int = -1,
        capacity: int = 1024,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        grad_mode: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name or "embedding_variable"
        option = EmbeddingVariableOption() if ev_option is None else ev_option
        _check_arguments(
            embedding_dim,
            key_dtype,
            option,
            target_gpu,
            capacity,
            dtype,
            self.name,
            seed,
            device or torch.empty(0).device,
        )
        if target_gpu >= 0:
            device = f"cuda:{target_gpu}"
        tiers = option.storage_option.storage_type.tiers()
        if device is None and tiers[0] == "HBM":
            device = "cuda"
        self.embedding_dim, self.key_dtype, self.target_gpu = embedding_dim, key_dtype, target_gpu
        self.ev_option = option
        self.admission = admission_of(self.name, option.filter_option, device)
        if option.capacity is not None:
            capacity = min(capacity, option.capacity + int(self.admission is not None))
        # Where there is a filter, keys that are not admitted share row 0.
        self.keys = KeyRows(self.name, capacity, reserved=int(self.admission is not None), device=device)
        seed = zlib.crc32(self.name.encode()) if seed is None else seed
        self.initial = InitialRows(initializer, option.init_option, embedding_dim, seed, dtype, device)
        self.register_parameter("weight", Parameter(new_zeros((capacity, embedding_dim), dtype, device)))
        self.global_step = 0
        self._guard = Guard()
        self._eviction = Eviction(self)
        self.cold: ColdRows | None = cold_rows_of(self)
        if self.cold is not None and self.cold.most_rows() < capacity:
            self._take_capacity(self.cold.most_rows())
            self.keys.clear(self.cold.most_rows(), self._stored_weight().device)
        self._looked_up, self._found_cold, self._evicted = 0, 0, 0
        self._newcomers: list[tuple[Tensor, Tensor]] = []
        self._newcomers_step = 0
        self.register_buffer("_filtered", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        self._init_saving()
        self._init_grad_mode(grad_mode)
        self._tend(self._stored_weight())
        if option.ckpt is not None and option.ckpt.ckpt_to_load_from is not None:
            self.restore(option.ckpt.ckpt_to_load_from)

    # ---- Lookups -----------------------------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of ``input``, see :class:`EmbeddingVariable`."""
        if torch.compiler.is_exporting():
            return self._look_up_in_program(input)
        if torch.compiler.is_compiling():
            return forward_untraced(self, input)
        check_ids("EmbeddingVariable", input)
        self._refuse_tracing()
        if input.is_nested:
            return _nested_like(input, self(input.values()))
        ids = self._as_keys(input)
        if self.training:
            with self._guard.writing():
                rows = self.rows_of(ids)
            kind = self._gradient_kind(self._stored_weight(), len(ids))  # which may write the table
            with self._guard.reading():
                values = self._values(rows, kind)
        elif torch.is_grad_enabled() and self._stored_weight().requires_grad:
            values = self._values_of_present(ids)
        else:
            values = self.lookup(ids)
        return values.reshape(*input.shape, self.embedding_dim)

    @torch.no_grad()
    def lookup(self, input: Tensor) -> Tensor:
        """
        Look up without training, in either mode: nothing is inserted, counted or moved between tiers.

        Any number of threads may call it while another one trains; each row is wholly from before or after an update.

        Args:
            input: as for the module.

        Returns:
            As from the module, without a gradient.

        Example:
            >>> EmbeddingVariable(2, initializer=0.5).lookup(torch.tensor([3]))
            tensor([[0.5000, 0.5000]])
        """
        check_ids("EmbeddingVariable.lookup", input)
        if input.is_nested:
            return _nested_like(input, self.lookup(input.values()))
        ids = self._as_keys(input)
        if self._newcomers and not self._waits_for_a_step():
            with self._guard.writing():
                self._let_in()
        with self._guard.reading():
            weight = self._stored_weight()
            if self.cold is None and not table_of(weight).is_stale():
                values = self._rows_of_storage(ids)
            else:
                rows = self.keys.find(ids)
                plan = self._plan_of(SUM, weight.shape[0], weight.shape[1], -1, False)
                values = read(plan, TableSet([weight]), Ids(rows.clamp_min(0), None, None, (len(ids),), False))[0]
                values = values.reshape(len(ids), self.embedding_dim)
                values = torch.where((rows < 0).unsqueeze(1), self._absent(ids, rows), values)
        return values.reshape(*input.shape, self.embedding_dim)

    def prefetch(self, input: Tensor) -> None:
        """
        Begin to read, in the background, the rows of the next batch that are not in the first tier.

        Args:
            input: as for the module. Without tiers this does nothing.
        """
        check_ids("EmbeddingVariable.prefetch", input)
        if self.cold is not None:
            self.cold.prefetch(self._as_keys(input.values() if input.is_nested else input))

    def _rows_of_storage(self, ids: Tensor) -> Tensor:
        """Return the values of keys, where no row is stale or in another tier."""
        weight = self._stored_weight()
        return ops.table_lookup(
            self.keys.index,
            self.keys.entries,
            weight.detach(),
            ids,
            missing=self._no_permission(weight),
            **self.initial.options(weight.dtype),
        )

    def _look_up_in_program(self, input: Tensor) -> Tensor:
        """Look up for ``torch.export``: the exported program contains the keys and rows as they are now."""
        check_ids("EmbeddingVariable", input)
        why = None
        if self.training:
            why = "a program cannot insert keys: call eval() on the model"
        elif self.cold is not None:
            why = "a program has no tiers: export a table whose storage is in memory alone"
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
        weight = self._stored_weight()
        if self._is_plain(weight, kind):
            return look_up(weight, rows, None, False, kind == "sparse")
        return self._look_up_otherwise(kind, weight, SUM, None, Ids(rows, None, None, (len(rows),), False)).reshape(
            len(rows), self.embedding_dim
        )

    def _values_of_present(self, ids: Tensor) -> Tensor:
        """Look up without inserting, with a gradient to rows of the first tier; other rows stay where they are."""
        with self._guard.writing():
            rows = self.keys.find(ids)
            where = (rows >= 0).nonzero().flatten()
            self._note_written(ids[where])  # the optimizer may move these rows, but their versions do not change
            absent = self._absent(ids, rows)
            kind = self._gradient_kind(self._stored_weight(), len(where))
            return absent.index_copy(0, where, self._values(rows[where], kind))

    scale_grad_by_freq = False

    def _as_keys(self, input: Tensor) -> Tensor:
        if self.key_dtype == torch.int32 and input.dtype != torch.int32:
            raise ValueError(f"EmbeddingVariable: input must be of the key_dtype, int32, got {input.dtype}")
        return input.reshape(-1)

    def _no_permission(self, weight: Tensor) -> Tensor | None:
        """Return the values of a key that is not admitted; None without a filter."""
        if self.admission is None:
            return None
        return weight.new_full((self.embedding_dim,), self._default())

    def _absent(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the values of keys without a row in the first tier; other positions have undefined values."""
        weight = self._stored_weight().detach()
        missing = self._no_permission(weight)
        values = self.initial.rows_of(ids, weight, rows < 0) if missing is None else missing.repeat(len(ids), 1)
        if self.cold is not None:
            self.cold.read(ids, rows, values)
        return values

    @property
    def auto(self) -> AutoChoice:
        """The choice that ``grad_mode="auto"`` has made."""
        return self._auto

    # ---- Calls from an optimizer: see Growing in optim/_tables.py ----------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the table's lock for writing: no other thread reads or writes rows inside."""
        with self._guard.writing():
            yield

    def lock_number(self) -> int:
        """Return the number of the table's lock; a thread takes several locks in ascending order."""
        return self._guard.number

    def steps(self) -> None:
        """Prepare for a step of the optimizer: initialise the rows of keys that a filter has just admitted."""
        if self._newcomers:
            with self._guard.writing():
                self._let_in()

    def stepped(self) -> None:
        """Count a step that the optimizer has ended."""
        self.global_step += 1

    def history_ends(self) -> None:
        """Flush the rows of other tiers, before the optimizer forgets its history."""
        if self.cold is not None:
            self.cold.flush()

    # ---- Copies ------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True):
        self._flush()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """
        Return the state for copies and pickles.

        Raises:
            TypeError: if rows are on disk.
        """
        if self.cold is not None and self.cold.has_files():
            raise TypeError(
                f"EmbeddingVariable {self.name!r}: a table with rows on disk cannot be copied or pickled: use save()"
            )
        self._flush()
        state = dict(super().__getstate__())
        state["cold"] = None if self.cold is None else self.cold.tensors()
        state["_eviction"] = self._eviction.seen
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the result of :meth:`__getstate__`."""
        super().__setstate__(state)
        seen, self._eviction = self.__dict__.get("_eviction", 0), Eviction(self)
        self._eviction.seen = seen
        cold, self.cold = self.cold, cold_rows_of(self)
        if self.cold is not None and cold:
            self.cold.put(Part.of_tensors(cold, self._stored_weight().device))  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Return the arguments that ``repr`` shows."""
        mode = "" if self.grad_mode is None else f", grad_mode={self.grad_mode!r}"
        return f"{self.embedding_dim}, name={self.name!r}{mode}"


def _check_arguments(
    embedding_dim: int,
    key_dtype: torch.dtype,
    option: Any,
    target_gpu: int,
    capacity: int,
    dtype: torch.dtype,
    name: Any,
    seed: Any,
    device: torch.device | str | None,
) -> None:
    owner = "EmbeddingVariable"
    for argument, value, least in (
        ("embedding_dim", embedding_dim, 1),
        ("capacity", capacity, 2),
        ("target_gpu", target_gpu, -1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{owner}: {argument} must be an integer of at least {least}, got {value!r}")
    if capacity >= 2**31:
        raise ValueError(f"{owner}: capacity must be below 2**31, got {capacity}")
    if key_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{owner}: key_dtype must be torch.int32 or torch.int64, got {key_dtype}")
    if dtype not in _FLOATS:
        raise ValueError(f"{owner}: dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    if not isinstance(name, str):
        raise TypeError(f"{owner}: name must be a string, got {type(name).__name__}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise ValueError(f"{owner}: seed must be an integer of 64 bits, got {seed!r}")
    if torch.empty(0, device=device).device.type == "meta":
        raise ValueError(f"{owner}: device must have memory: keys are looked up in it, got {device!r}")
    if not isinstance(option, EmbeddingVariableOption):
        raise TypeError(f"{owner}: ev_option must be an EmbeddingVariableOption, got {type(option).__name__}")


def _nested_like(input: Tensor, rows: Tensor) -> Tensor:
    offsets, lengths = input.offsets(), input.lengths()  # type: ignore[attr-defined]
    return torch.nested.nested_tensor_from_jagged(rows, offsets=offsets, lengths=lengths)
