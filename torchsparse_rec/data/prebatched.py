"""Prebatched files: training batches as they were written, mapped into memory or decoded, in any order and size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..files import PathLike
from ..typing import Verify
from ._arguments import check_integer, check_place, check_state
from ._arrow import arrow
from ._epoch import Epoch
from ._lists import with_lists
from ._prebatched_file import VERIFY, PrebatchedFile
from ._prebatched_writer import write_prebatched as write_prebatched
from ._read_ahead import read_ahead
from ._rows import check_columns, path_list
from ._types import cast_stored, wider
from .errors import DataError
from .tensors import Fill, check_fill, check_integers, to_tensors

# The most stored batches that are kept before they are joined: each is a mapping, and Linux allows 65,530.
_MOST_KEPT = 1024

__all__ = ["PrebatchedDataset", "read_prebatched", "write_prebatched"]


class PrebatchedDataset(IterableDataset):
    """
    The batches of files that :func:`write_prebatched` wrote, as dictionaries of tensors (see :func:`to_tensors`).

    Uncompressed files are mapped into memory, and tensors lie in the mapping: nothing is copied. The mapping is
    private: writing to a tensor changes neither the file nor later reads. Compressed files are decoded by threads ahead
    of the consumer. The file's length is checked before each read, so that a file which has shrunk is an error. A file
    that shrinks while its tensors are in use ends the process, as with every mapped file.

    The order depends on nothing but ``seed``, the epoch (:meth:`set_epoch`), the files and the sizes given here. Each
    of ``world_size`` ranks takes a run of an epoch's batches, all ranks equally many. If the number of batches is not a
    multiple of ``world_size``, the last ranks go on with batches from the epoch's beginning. With ``drop_last`` the
    remainder is left out. Workers of a ``DataLoader(dataset, batch_size=None, num_workers=...)`` take a rank's batches
    in turn, so that the order is the same for every number of workers.

    Args:
        paths: a file, or several that are read as one. Their columns must agree; integers get the widest dtype.
        batch_size: rows of a batch; the last may have fewer. Default None: the batches as stored.
        columns: the names of the columns to read, in this order. Default None: all.
        verify: the reads that compare checksums of the data: ``"first"`` (default), this object's first one of each
            batch; ``"always"``; or ``"never"``. Checksums of metadata are compared the first time in any case.
        shuffle: whether stored batches come in a new order each epoch. Default False.
        shuffle_rows_window: the number of stored batches across which rows are shuffled, which are held in memory.
            Default 0: rows are not shuffled.
        seed: the seed of all shuffles, at least 0. Default 0.
        rank, world_size: this process's rank and the number of ranks. Default None: the ones of ``torch.distributed``
            if it is initialised, else 0 and 1.
        drop_last: whether to leave out the last batch if it has fewer than ``batch_size`` rows, and the batches that do
            not divide evenly between the ranks. Default False.
        pin_memory: whether to copy the tensors to page-locked memory. Default False. Needs CUDA.
        fill: the number that replaces nulls, as for :func:`to_tensors`. Default None.
        integers: the dtype into which all integers are copied, as for :func:`to_tensors`. Default None: as stored.
        bits: whether uint64 becomes the int64 of the same bits, as for :func:`to_tensors`. Default False.
        threads: the number of threads that decode compressed batches. Default None: as many as torch has, but one in a
            worker process.

    Raises:
        ImportError: without pyarrow.
        ValueError: an argument out of range, an unknown column.
        DataError: a file that is damaged, does not fit the first, or has been written to since it was opened. It is
            raised on construction or when a batch is read.
        OSError: a file that cannot be opened; more batches kept than the process may have mappings.

    Example:
        >>> import tempfile, torch
        >>> path = f"{tempfile.mkdtemp()}/train.arrow"
        >>> write_prebatched(path, [{"id": torch.arange(4)}, {"id": torch.arange(4, 8)}])
        8
        >>> dataset = PrebatchedDataset(path, batch_size=3, shuffle=True, seed=1, integers=torch.int64)
        >>> len(dataset), [batch["id"].tolist() for batch in dataset]
        (3, [[0, 1, 2], [3, 4, 5], [6, 7]])
        >>> dataset.get_batch(1)["id"]
        tensor([3, 4, 5])
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        batch_size: int | None = None,
        columns: Sequence[str] | None = None,
        verify: Verify = "first",
        shuffle: bool = False,
        shuffle_rows_window: int = 0,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        fill: Fill = None,
        integers: torch.dtype | None = None,
        bits: bool = False,
        threads: int | None = None,
    ) -> None:
        arrow("PrebatchedDataset")
        if verify not in VERIFY:
            raise ValueError(f"PrebatchedDataset: verify must be one of {', '.join(VERIFY)}, got {verify!r}")
        if batch_size is not None:
            batch_size = check_integer("batch_size", batch_size, 1)
        if threads is not None:
            threads = check_integer("threads", threads, 1)
        shuffle_rows_window = check_integer("shuffle_rows_window", shuffle_rows_window, 0)
        seed = check_integer("seed", seed, 0)
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("PrebatchedDataset: pin_memory needs CUDA, which this machine lacks")
        check_fill("PrebatchedDataset", fill)
        check_integers("PrebatchedDataset", integers)
        check_columns("PrebatchedDataset", columns)
        self.rank, self.world_size = check_place(rank, world_size)
        self._settings: dict[str, Any] = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "rows_window": shuffle_rows_window,
            "drop_last": drop_last,
            "seed": seed,
        }
        self._pin_memory, self._fill, self._integers, self._threads = pin_memory, fill, integers, threads
        self._bits = bits
        self._files = _open_all(path_list(paths), columns, verify)
        self._rows = np.concatenate([file.rows() for file in self._files])
        self._firsts = np.cumsum([0] + [len(file.rows()) for file in self._files])
        self._schema = _common_schema(self._files)
        # Shared, so that workers that outlive an epoch see the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._plan: Epoch | None = None
        # The batch with which this process's iteration began, and the one that it gives next; and, after
        # load_state_dict, where the next iteration begins.
        self._start, self._position = 0, 0
        self._resume: dict[str, int] | None = None

    # ---- Epochs -----------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, on which shuffles depend; every epoch but a loaded state's begins at its first batch."""
        epoch = check_integer("epoch", epoch, 0)
        if epoch != int(self._epoch):
            self._resume = None
        self._start, self._position = 0, 0
        self._epoch.fill_(epoch)

    def _current(self) -> Epoch:
        epoch = int(self._epoch)
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = Epoch(self._rows, **self._settings, epoch=epoch, rank=self.rank, world_size=self.world_size)
        return self._plan

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        return len(self._current())

    def num_rows(self) -> int:
        """Return the number of rows of all files."""
        return int(self._rows.sum())

    @property
    def schema(self) -> Any:
        """The columns as stored, a ``pyarrow.Schema``."""
        return self._schema

    def is_compressed(self) -> bool:
        """Say whether at least one of the files is compressed."""
        return any(file.compressed for file in self._files)

    def get_batch(self, i: int) -> dict[str, Any]:
        """
        Return batch i of this epoch, as iterating over the dataset gives it.

        Raises:
            IndexError: ``i`` is not in [0, len(self)).
        """
        if not 0 <= i < len(self):
            raise IndexError(f"PrebatchedDataset: i must be in [0, {len(self)}), got {i}")
        (batch,) = self._record_batches(self._current(), range(i, i + 1), threads=0)
        return self._tensors(batch)

    # ---- Iteration --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        plan, start, position = self._current(), 0, 0
        if self._resume is not None and self._resume["epoch"] == plan.epoch:
            start, position = self._resume["start"], self._resume["position"]
            if self._resume["workers"] not in (1, workers):
                raise ValueError(
                    f"PrebatchedDataset: the state is from one of {self._resume['workers']} workers, and there are "
                    f"{workers}"
                )
        self._resume = None
        self._start, self._position = start, position
        # Worker w takes the batches start + w, start + w + workers, ...: begin with its first one from position on.
        return self._iterate(plan, range(position + (start + worker - position) % workers, len(plan), workers))

    def _iterate(self, plan: Epoch, numbers: range) -> Iterator[dict[str, Any]]:
        for i, batch in zip(numbers, self._record_batches(plan, numbers, self._decoders()), strict=True):
            self._position = i + numbers.step
            yield self._tensors(batch)
        # A state that is taken from now on belongs to a complete epoch.
        self._start, self._position = 0, len(plan)

    def record_batches(self) -> Iterator[Any]:
        """Return an iterator over all batches of this epoch and rank, as ``pyarrow.RecordBatch``."""
        return self._record_batches(self._current(), range(len(self)), self._decoders())

    def _decoders(self) -> int:
        """Return the number of threads that read ahead, 0 if no file is compressed."""
        if not self.is_compressed():
            return 0
        return self._threads or (1 if get_worker_info() is not None else torch.get_num_threads())

    def _tensors(self, batch: Any) -> dict[str, Any]:
        columns = to_tensors(batch, fill=self._fill, integers=self._integers, bits=self._bits)
        if self._pin_memory:
            return {name: x.pin_memory() if hasattr(x, "pin_memory") else x for name, x in columns.items()}
        return columns

    def _record_batches(self, plan: Epoch, numbers: range, threads: int) -> Iterator[Any]:
        """Yield the batches of these numbers of an epoch, as ``pyarrow.RecordBatch``."""
        pa = arrow("PrebatchedDataset")
        read, current = read_ahead(self._read, _stored(plan, numbers), threads), -1
        rows: Any = None
        try:
            for i in numbers:
                pieces = []
                for piece in plan.pieces(i):
                    if piece.window != current:
                        rows = _concat(pa, islice(read, len(plan.window(piece.window))))
                        current, order = piece.window, plan.permutation(piece.window)
                    if order is not None:
                        pieces.append(rows.take(pa.array(order[piece.begin : piece.end].numpy())))
                    else:
                        pieces.append(rows.slice(piece.begin, piece.end - piece.begin))
                yield pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)
        finally:
            read.close()

    def _read(self, stored: int) -> Any:
        place = int(np.searchsorted(self._firsts, stored, side="right")) - 1
        file = self._files[place]
        i = stored - int(self._firsts[place])
        batch = file.read(i)
        if file.schema.equals(self._schema):
            return batch
        columns = []
        for field, column in zip(self._schema, batch.columns, strict=True):
            try:
                columns.append(cast_stored(column, field.type))
            except ValueError as error:
                problem = f"column {field.name!r} of batch {i} must be {field.type} as in other files: {error}"
                raise DataError(file.path, None, problem) from None
        return type(batch).from_arrays(columns, schema=self._schema)

    # ---- State ------------------------------------------------------------------------------------------------------

    def _fingerprint(self) -> dict[str, Any]:
        """Return the settings and sizes that must be the same for a state to mean the same batches."""
        return {**self._settings, "world_size": self.world_size, "batches": len(self._rows), "rows": self.num_rows()}

    def state_dict(self, delivered: int | None = None) -> dict[str, Any]:
        """
        Return the place of the iteration in its epoch, after the batch that it gave last.

        Args:
            delivered: the number of batches that the training loop has taken, for loaders with worker processes, whose
                progress this process cannot see. Default None: the batches that this process has iterated over.

        Returns:
            A dict of numbers and settings that JSON can hold.
        """
        info = get_worker_info()
        epoch = int(self._epoch)
        start, position = self._start, self._position
        if self._resume is not None and self._resume["epoch"] == epoch:
            start, position = self._resume["start"], self._resume["position"]
        if delivered is not None:
            position = start = start + delivered
        workers = 1 if info is None else info.num_workers
        return {"epoch": epoch, "start": start, "position": position, "workers": workers, "of": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Make the next iteration go on where :meth:`state_dict` was taken.

        This process does not learn that worker processes of ``torch.utils.data.DataLoader`` have gone on from the
        state: call :meth:`set_epoch` before the next epoch, or it begins there again. A state of a worker (from
        torchdata's ``StatefulDataLoader``) can only be loaded with the same number of workers.

        Raises:
            ValueError: the state of a dataset of other sizes or settings, or something that is no state.
        """
        mine, theirs = self._fingerprint(), check_state(state)
        for name in mine:
            if theirs.get(name) != mine[name]:
                raise ValueError(
                    f"PrebatchedDataset: the state has {name}={theirs.get(name)!r}, this dataset has {mine[name]!r}"
                )
        self.set_epoch(state["epoch"])
        position, workers = state["position"], state["workers"]
        start = position if workers == 1 else state["start"]
        self._resume = {"epoch": state["epoch"], "start": start, "position": position, "workers": workers}


def _stored(plan: Epoch, numbers: range) -> Iterator[int]:
    """Yield the numbers of the stored batches that these batches of an epoch need, each as often as it is read."""
    current = -1
    for i in numbers:
        for piece in plan.pieces(i):
            if piece.window != current:
                current = piece.window
                yield from plan.window(current)


def _concat(pa: Any, batches: Iterator[Any]) -> Any:
    """Join batches into one, some thousand at a time, since each keeps a mapping until it is copied."""
    joined: list[Any] = []
    while some := list(islice(batches, _MOST_KEPT)):
        joined.append(some[0] if len(some) == 1 else pa.concat_batches(some))
    return joined[0] if len(joined) == 1 else pa.concat_batches(joined)


def _open_all(paths: list[PathLike], columns: Sequence[str] | None, verify: Verify) -> list[PrebatchedFile]:
    """Open files, all with the columns of the first one in its order."""
    if not paths:
        raise ValueError("PrebatchedDataset: paths must have at least one file, got none")
    first = PrebatchedFile(paths[0], columns, verify)
    files = [first]
    for path in paths[1:]:
        file = PrebatchedFile(path, None, verify)
        theirs, ours = set(file.stored.names), set(first.stored.names)
        missing = [name for name in first.schema.names if name not in theirs]
        extra = [name for name in file.stored.names if name not in ours]
        if missing:
            raise DataError(file.path, None, f"column {missing[0]!r} is missing, unlike in {first.path}")
        if extra and columns is None:
            raise DataError(file.path, None, f"column {extra[0]!r} is not in {first.path}")
        file.choose(first.schema.names)
        files.append(file)
    return files


def _common_schema(files: list[PrebatchedFile]) -> Any:
    """Return the schema of the first file, with integers as wide as in any file."""
    pa = arrow("PrebatchedDataset")
    types = list(files[0].schema.types)
    for file in files[1:]:
        for i, field in enumerate(file.schema):
            common = wider(types[i], field.type)
            if common is None:
                raise DataError(
                    file.path, None, f"column {field.name!r} is {field.type}, expected {types[i]} as in {files[0].path}"
                )
            types[i] = common
    return pa.schema([pa.field(field.name, kind) for field, kind in zip(files[0].schema, types, strict=True)])


def read_prebatched(
    paths: PathLike | Sequence[PathLike],
    *,
    batch_size: int | None = None,
    columns: Sequence[str] | None = None,
    split: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """
    Read prebatched files as record batches, in order.

    Args:
        paths, batch_size, columns: the arguments of :class:`PrebatchedDataset`.
        split: the argument of :func:`read_parquet`.

    Yields:
        ``pyarrow.RecordBatch``.

    Raises:
        ImportError, ValueError, DataError: as :class:`PrebatchedDataset` raises them.

    Example:
        >>> import tempfile, torch
        >>> path = f"{tempfile.mkdtemp()}/train.arrow"
        >>> write_prebatched(path, [{"id": torch.arange(4)}])
        4
        >>> [batch.to_pydict() for batch in read_prebatched(path, batch_size=3)]
        [{'id': [0, 1, 2]}, {'id': [3]}]
    """
    dataset = PrebatchedDataset(paths, batch_size=batch_size, columns=columns, rank=0, world_size=1)
    return with_lists(dataset.record_batches(), "read_prebatched", split)
