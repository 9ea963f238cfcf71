""":class:`RaggedTensor`: rows of different lengths, as a partition of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ._padding import default_like, kept_lengths, padded, wanted_sizes
from ._sparse_tensor import SparseTensor, as_int64, as_values, checked, device_of, take
from .arguments import as_size


@dataclass(frozen=True)
class RaggedTensor:
    """
    ``tf.RaggedTensor``: row ``r`` is ``values[row_splits[r] : row_splits[r + 1]]``.

    Made by the factories (``from_row_splits``, ...), not by the constructor, as in TensorFlow. ``values`` are a tensor
    ``[N, ...]``, strings, or the RaggedTensor of the inner rows. Row partitions are int64 whatever they are made from.
    """

    values: Any
    row_splits: Tensor

    @classmethod
    def from_row_splits(
        cls, values: Any, row_splits: Any, name: str | None = None, validate: bool = True
    ) -> RaggedTensor:
        """
        Make the tensor from where each row begins, and where the last ends.

        Args:
            values: ``[N, ...]``, a tensor or strings, or the :class:`RaggedTensor` of the inner rows.
            row_splits: ``[nrows + 1]``, from 0 to N, not decreasing.
            name: the name, ignored.
            validate: an argument that is ignored: row_splits are always checked.

        Example:
            >>> RaggedTensor.from_row_splits([3, 1, 4], [0, 2, 2, 3]).row_splits
            tensor([0, 2, 2, 3])
        """
        values, splits = _with_partition(values, "row_splits", row_splits)
        if splits.dim() != 1 or splits.shape[0] < 1:
            raise ValueError(f"row_splits must be a vector of at least 1 element, got shape {list(splits.shape)}")
        count = values.shape[0]
        if int(splits[0]) != 0 or int(splits[-1]) != count or bool((splits.diff() < 0).any()):
            raise ValueError(f"row_splits must go from 0 to {count}, the number of values, without decreasing")
        return cls(values, splits)

    @classmethod
    def from_row_lengths(
        cls, values: Any, row_lengths: Any, name: str | None = None, validate: bool = True
    ) -> RaggedTensor:
        """
        Make the tensor from the length of each row.

        Example:
            >>> RaggedTensor.from_row_lengths([3, 1, 4], [2, 0, 1]).to_list()
            [[3, 1], [], [4]]
        """
        values, lengths = _with_partition(values, "row_lengths", row_lengths)
        if lengths.dim() != 1 or bool((lengths < 0).any()):
            raise ValueError(f"row_lengths must be a vector of numbers >= 0, got {lengths.tolist()}")
        return cls.from_row_splits(values, ops.lengths_to_offsets(lengths))

    @classmethod
    def from_value_rowids(
        cls, values: Any, value_rowids: Any, nrows: Any = None, name: str | None = None, validate: bool = True
    ) -> RaggedTensor:
        """
        Make the tensor from the row of each value, sorted.

        Args:
            values: ``[N, ...]``.
            value_rowids: ``[N]``, sorted and not negative.
            nrows: the number of rows. Default: the last row id + 1.
            name: the name, ignored.
            validate: an argument that is ignored.

        Example:
            >>> RaggedTensor.from_value_rowids([3, 1, 4], [0, 0, 2], 4).to_list()
            [[3, 1], [], [4], []]
        """
        values, ids = _with_partition(values, "value_rowids", value_rowids)
        count = values.shape[0]
        if ids.shape != (count,):
            raise ValueError(
                f"value_rowids must have one element for each of the {count} values, got shape {list(ids.shape)}"
            )
        least = int(ids[-1]) + 1 if ids.shape[0] else 0
        rows = least if nrows is None else as_size("nrows", nrows)
        if rows < max(least, 0):
            raise ValueError(f"nrows must be at least {least}, the last of value_rowids + 1, got {rows}")
        if bool((ids.diff() < 0).any()) or (ids.shape[0] and int(ids[0]) < 0):
            raise ValueError(f"value_rowids must be sorted and not negative, got {ids.tolist()}")
        return cls.from_row_splits(values, ops.row_ids_to_offsets(ids, rows))

    @classmethod
    def from_row_starts(
        cls, values: Any, row_starts: Any, name: str | None = None, validate: bool = True
    ) -> RaggedTensor:
        """Make the tensor from where each row begins; the first must begin at 0."""
        values, starts = _with_partition(values, "row_starts", row_starts)
        return cls.from_row_splits(values, torch.cat([starts, starts.new_tensor([values.shape[0]])]))

    @classmethod
    def from_row_limits(
        cls, values: Any, row_limits: Any, name: str | None = None, validate: bool = True
    ) -> RaggedTensor:
        """Make the tensor from where each row ends; the last must end with the values."""
        values, limits = _with_partition(values, "row_limits", row_limits)
        return cls.from_row_splits(values, torch.cat([limits.new_zeros(1), limits]))

    @classmethod
    def from_uniform_row_length(
        cls, values: Any, uniform_row_length: Any, nrows: Any = None, validate: bool = True, name: str | None = None
    ) -> RaggedTensor:
        """
        Make the tensor from one length for all rows; a length of 0 needs ``nrows``, else it follows from the values.

        Example:
            >>> RaggedTensor.from_uniform_row_length([3, 1, 4, 1], 2).to_list()
            [[3, 1], [4, 1]]
        """
        values = _as_inner(values)
        length, count = as_size("uniform_row_length", uniform_row_length), values.shape[0]
        rows = as_size("nrows", nrows) if nrows is not None else count // length if length > 0 else 0
        if length < 0 or rows < 0 or rows * length != count:
            raise ValueError(
                f"uniform_row_length times nrows must be {count}, the number of values, got {length} times {rows}"
            )
        return cls.from_row_splits(values, torch.arange(rows + 1) * length)

    @classmethod
    def from_nested_row_splits(
        cls, flat_values: Any, nested_row_splits: Sequence[Any], name: str | None = None, validate: bool = True
    ) -> RaggedTensor:
        """
        Make the tensor from the row splits of every level, the outermost first.

        Example:
            >>> RaggedTensor.from_nested_row_splits([1, 2, 3, 4], [[0, 1, 2], [0, 3, 4]]).to_list()
            [[[1, 2, 3]], [[4]]]
        """
        return reduce(cls.from_row_splits, reversed(list(nested_row_splits)), flat_values)

    @classmethod
    def from_nested_row_lengths(
        cls, flat_values: Any, nested_row_lengths: Sequence[Any], name: str | None = None, validate: bool = True
    ) -> RaggedTensor:
        """Make the tensor from the row lengths of every level, the outermost first."""
        return reduce(cls.from_row_lengths, reversed(list(nested_row_lengths)), flat_values)

    @classmethod
    def from_tensor(
        cls,
        tensor: Any,
        lengths: Any = None,
        padding: Any = None,
        ragged_rank: int = 1,
        name: str | None = None,
        row_splits_dtype: torch.dtype = torch.int64,
    ) -> RaggedTensor:
        """
        Make the tensor from a dense tensor, or strings, of rank >= 2.

        Args:
            tensor: ``[nrows, ncols, ...]``.
            lengths: ``[nrows]``: how much of each row to keep; cut to ``[0, ncols]``. Only with ragged_rank 1.
            padding: a value: elements at a row's end that are equal to it are dropped. Not with ``lengths``.
            ragged_rank: the number of dimensions after the first that become ragged.
            name: the name, ignored.
            row_splits_dtype: torch.int64; others are not supported.

        Example:
            >>> RaggedTensor.from_tensor([[3, 0, 1, 0], [0, 0, 0, 0]], padding=0).to_list()
            [[3, 0, 1], []]
        """
        if row_splits_dtype != torch.int64:
            raise ValueError(f"row_splits_dtype must be torch.int64, got {row_splits_dtype}")
        if lengths is not None and padding is not None:
            raise ValueError("at most one of lengths and padding may be given, got both")
        dense = as_values("tensor", tensor)
        if dense.ndim <= max(ragged_rank, 1) or ragged_rank < 1:
            raise ValueError(
                f"tensor must have a rank above ragged_rank, which must be >= 1, got {dense.ndim} and {ragged_rank}"
            )
        rows, columns = dense.shape[0], dense.shape[1]
        if ragged_rank > 1:
            if lengths is not None:
                raise ValueError(f"lengths must be None for a ragged_rank above 1, got {lengths!r}")
            inner = cls.from_tensor(dense.reshape(-1, *dense.shape[2:]), None, padding, ragged_rank - 1)
            return cls(inner, torch.arange(rows + 1, device=device_of(dense)) * columns)
        kept = kept_lengths(dense, lengths, padding)
        exists = torch.arange(columns, device=kept.device) < kept.unsqueeze(1)
        return cls(take(dense, exists), ops.lengths_to_offsets(kept))

    @classmethod
    def from_sparse(
        cls, st_input: SparseTensor, name: str | None = None, row_splits_dtype: torch.dtype = torch.int64
    ) -> RaggedTensor:
        """
        Make the tensor from a :class:`SparseTensor` of rank 2 whose rows begin at column 0 and have no holes.

        As in TensorFlow, rows that are not sorted pass: the values stay in their order, the lengths are counted.

        Raises:
            TypeError: for an ``st_input`` that is not a SparseTensor.
            ValueError: for another rank, rows with holes, or a row outside the shape.

        Example:
            >>> RaggedTensor.from_sparse(SparseTensor([[0, 0], [0, 1], [2, 0]], [3, 1, 4], [4, 5])).to_list()
            [[3, 1], [], [4], []]
        """
        st_input = checked("st_input", st_input)
        if row_splits_dtype != torch.int64:
            raise ValueError(f"row_splits_dtype must be torch.int64, got {row_splits_dtype}")
        if len(st_input.shape) != 2:
            raise ValueError(f"st_input must have rank 2, got shape {list(st_input.shape)}")
        rows, columns, nrows = st_input.indices[:, 0], st_input.indices[:, 1], st_input.shape[0]
        wanted = torch.where(rows[1:] == rows[:-1], columns[:-1] + 1, 0)
        if bool((columns[:1] != 0).any()) or bool((columns[1:] != wanted).any()):
            raise ValueError("st_input must have rows that begin at column 0 and have no holes")
        if bool(((rows < 0) | (rows >= nrows)).any()):
            raise ValueError(f"st_input must have rows in [0, {nrows}), got {rows.tolist()}")
        return cls(st_input.values, ops.lengths_to_offsets(torch.bincount(rows, minlength=nrows)))

    # ---- Partitions ----

    @property
    def ragged_rank(self) -> int:
        """The number of levels of rows."""
        return 1 + (self.values.ragged_rank if isinstance(self.values, RaggedTensor) else 0)

    @property
    def flat_values(self) -> Any:
        """The values of the innermost rows."""
        return self.values.flat_values if isinstance(self.values, RaggedTensor) else self.values

    @property
    def dtype(self) -> Any:
        """The dtype of the values; ``bytes`` for strings."""
        return self.flat_values.dtype if isinstance(self.flat_values, Tensor) else bytes

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The sizes of all dimensions, None for ragged ones."""
        return (self.row_splits.shape[0] - 1, None, *self.values.shape[1:])

    @property
    def nested_row_splits(self) -> tuple[Tensor, ...]:
        """The row splits of every level, the outermost first."""
        inner = self.values.nested_row_splits if isinstance(self.values, RaggedTensor) else ()
        return (self.row_splits, *inner)

    def nested_row_lengths(self, name: str | None = None) -> tuple[Tensor, ...]:
        """Return the row lengths of every level, the outermost first."""
        return tuple(splits.diff() for splits in self.nested_row_splits)

    def nested_value_rowids(self, name: str | None = None) -> tuple[Tensor, ...]:
        """Return the row ids of every level, the outermost first."""
        return tuple(ops.offsets_to_row_ids(splits) for splits in self.nested_row_splits)

    def nrows(self, out_type: torch.dtype | None = None, name: str | None = None) -> Tensor:
        """Return the number of rows: a scalar, int64 or ``out_type``."""
        return torch.tensor(self.row_splits.shape[0] - 1, dtype=out_type or torch.int64)

    def row_starts(self, name: str | None = None) -> Tensor:
        """Return where each row begins, ``[nrows]``."""
        return self.row_splits[:-1]

    def row_limits(self, name: str | None = None) -> Tensor:
        """Return where each row ends, ``[nrows]``."""
        return self.row_splits[1:]

    def value_rowids(self, name: str | None = None) -> Tensor:
        """Return the row of each value."""
        return ops.offsets_to_row_ids(self.row_splits, self.values.shape[0])

    def row_lengths(self, axis: int = 1, name: str | None = None) -> Any:
        """
        Return the lengths of rows along ``axis``: a vector for 1, a RaggedTensor beyond, the number of rows for 0.

        The lengths along a uniform inner dimension are all equal, one for each place of the dimensions before it.

        Raises:
            ValueError: for an axis that there is not.
        """
        rank = len(self.shape)
        if not -rank <= axis < rank:
            raise ValueError(f"axis must be in [{-rank}, {rank}), got {axis}")
        axis %= rank
        if axis == 0:
            return self.nrows()
        if axis == 1:
            return self.row_splits.diff()
        if isinstance(self.values, RaggedTensor):
            return self.with_values(self.values.row_lengths(axis - 1))
        *places, length = self.values.shape[:axis]
        return self.with_values(torch.full(places, length, device=self.row_splits.device))

    def bounding_shape(self, axis: Any = None, name: str | None = None, out_type: torch.dtype | None = None) -> Tensor:
        """
        Return the shape of the smallest dense tensor that holds all rows, or its size or sizes along ``axis``.

        Raises:
            ValueError: for an axis that there is not.
        """
        longest = int(self.row_splits.diff().max()) if self.row_splits.shape[0] > 1 else 0
        inner = self.values.bounding_shape().tolist() if isinstance(self.values, RaggedTensor) else self.values.shape
        shape = torch.tensor([self.row_splits.shape[0] - 1, longest, *inner[1:]], dtype=out_type or torch.int64)
        if axis is None:
            return shape
        rank = shape.shape[0]
        axes = as_int64("axis", axis, shape.device)
        if bool(((axes < -rank) | (axes >= rank)).any()):
            raise ValueError(f"axis must be in [{-rank}, {rank}), got {axis}")
        return shape[axes]

    # ---- Other forms ----

    def with_values(self, new_values: Any) -> RaggedTensor:
        """Return the same rows with as many other values."""
        inner = _as_inner(new_values)
        if inner.shape[0] != self.values.shape[0]:
            raise ValueError(f"new_values must have {self.values.shape[0]} rows, got {inner.shape[0]}")
        return RaggedTensor(inner, self.row_splits)

    def with_flat_values(self, new_values: Any) -> RaggedTensor:
        """Return the same rows with as many other innermost values."""
        if isinstance(self.values, RaggedTensor):
            return self.with_values(self.values.with_flat_values(new_values))
        return self.with_values(new_values)

    def to_list(self) -> list:
        """Return the rows as nested lists."""
        inner = self.values.to_list() if isinstance(self.values, RaggedTensor) else self.values.tolist()
        bounds = self.row_splits.tolist()
        return [inner[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]

    def to_tensor(self, default_value: Any = None, name: str | None = None, shape: Any = None) -> Any:
        """
        Return a dense tensor (strings: a numpy array) with ``default_value`` behind the ends of shorter rows.

        Args:
            default_value: a scalar of the values' kind, or of the shape of one innermost value; default: 0, "" or
                False.
            name: the name, ignored.
            shape: sizes of the result; None: as large as the rows need. Longer rows are cut.

        Example:
            >>> RaggedTensor.from_row_splits([3, 1, 4], [0, 2, 2, 3]).to_tensor(-1)
            tensor([[ 3,  1],
                    [-1, -1],
                    [ 4, -1]], dtype=torch.int32)
        """
        sizes = wanted_sizes(shape, len(self.shape))
        return padded(self, sizes, default_like(self.flat_values, default_value))

    def to_sparse(self, name: str | None = None) -> SparseTensor:
        """
        Return a :class:`SparseTensor` with an entry for each value, in order; its shape is :meth:`bounding_shape`.

        Example:
            >>> RaggedTensor.from_row_splits([3, 1, 4], [0, 2, 2, 3]).to_sparse().indices
            tensor([[0, 0],
                    [0, 1],
                    [2, 0]])
        """
        columns = [torch.arange(self.row_splits.shape[0] - 1, device=self.row_splits.device)]
        for splits in self.nested_row_splits:
            row = ops.offsets_to_row_ids(splits)
            place = torch.arange(row.shape[0], device=row.device) - splits[row]
            columns = [*(column[row] for column in columns), place]
        flat = self.flat_values
        for size in flat.shape[1:]:
            place = torch.arange(size, device=columns[0].device).repeat(columns[0].shape[0])
            columns = [*(column.repeat_interleave(size) for column in columns), place]
        return SparseTensor(torch.stack(columns, 1), flat.reshape(-1), self.bounding_shape())


def _as_inner(values: Any) -> Any:
    inner = values if isinstance(values, RaggedTensor) else as_values("values", values)
    if len(inner.shape) == 0:
        raise ValueError("values must have rank >= 1, got a scalar")
    return inner


def _with_partition(values: Any, argument: str, partition: Any) -> tuple[Any, Tensor]:
    """Convert the values of rows and, on their device, the numbers that part them into rows."""
    inner = _as_inner(values)
    device = inner.row_splits.device if isinstance(inner, RaggedTensor) else device_of(inner)
    return inner, as_int64(argument, partition, device)
