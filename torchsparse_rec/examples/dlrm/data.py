"""Batches of Criteo's form (labels, 13 numbers, 26 raw ids): generated, or read from files."""

from __future__ import annotations

import binascii
import string
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data.criteo import CATEGORIES, INTEGERS
from .. import _generated
from .._generated import effects, zipf

#: How many different values each category has in the training file of the Display Advertising Challenge.
CARDINALITIES = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
#: The raw id of an empty field: beyond the 32 bits of the others.
MISSING = -1

# Standard deviations of what numbers and ids add to the hidden model's logit, and the logit's mean, by which a quarter
# of the labels are clicks.
_OF_NUMBERS, _OF_IDS, _BIAS = 0.8, 1.5, -1.4
_32_BITS = (1 << 32) - 1


class Batch(NamedTuple):
    """Labels, float32 ``[B]``; numbers, float32 ``[B, 13]``; raw ids, int64 ``[26, B]``, feature by feature."""

    labels: Tensor
    numbers: Tensor
    ids: Tensor

    @property
    def size(self) -> int:
        """The number of examples."""
        return self.labels.shape[0]

    def rows(self, begin: int, end: int) -> Batch:
        """Return the batch of the examples from ``begin`` up to, without, ``end``."""
        return Batch(self.labels[begin:end], self.numbers[begin:end], self.ids[:, begin:end])


# ---- Generated -------------------------------------------------------------------------------------------------------


def spread(ids: Tensor) -> Tensor:
    """Map numbers of 32 bits one to one to numbers of 32 bits in no visible order."""
    # An odd factor below 2^31 has an inverse modulo 2^32, and its product fits int64.
    ids = ((ids >> 16) ^ ids) * 0x7FEB352D & _32_BITS
    ids = ((ids >> 15) ^ ids) * 0x5BD1E995 & _32_BITS
    return (ids >> 16) ^ ids


@dataclass(frozen=True)
class Generator(_generated.Generator[Batch]):
    """
    A generator of examples of the Challenge's shape.

    The i-th commonest value of a category is about as frequent as ``i ** -1.05``, its raw id any 32 bits. Numbers are
    ``log(1 + x)`` of counts, most of which are small. Each number and each value has an effect on the label.

    Args:
        batch_size: examples in a batch.
        max_cardinality: categories have no more values than that. Default None: as many as in the Challenge,
            33,762,577 in all.
        seed: of the generator.

    Example:
        >>> batch = Generator(batch_size=4).batch(0)
        >>> batch.size, batch.numbers.shape, batch.ids.shape
        (4, torch.Size([4, 13]), torch.Size([26, 4]))
    """

    batch_size: int
    max_cardinality: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_positive("batch_size", "max_cardinality")

    def cardinalities(self) -> list[int]:
        """Return the number of values of each category."""
        return [min(count, self.max_cardinality or count) for count in CARDINALITIES]

    def batch(self, number: int) -> Batch:
        """Return the batch of a number, at least 0."""
        random = self.random(number)
        drawn = torch.randn(self.batch_size, len(INTEGERS), generator=random)
        numbers = drawn.mul(1.5).exp_().floor_().log1p_()
        uniform = torch.rand(len(CATEGORIES), self.batch_size, generator=random, dtype=torch.float64)
        values = zipf(uniform, torch.tensor(self.cardinalities()).unsqueeze(1))
        features = torch.arange(len(CATEGORIES)).unsqueeze(1)
        chance = torch.sigmoid(self._logits(drawn, values, features))
        labels = (torch.rand(self.batch_size, generator=random) < chance).to(torch.float32)
        return Batch(labels, numbers, spread((values + features * 0x3C6EF372) & _32_BITS))

    def _logits(self, drawn: Tensor, values: Tensor, features: Tensor) -> Tensor:
        weights = effects(torch.arange(len(INTEGERS)), -1)
        # An effect uniform in [-1, 1) has the variance 1/3.
        scale = _OF_IDS * (3.0 / len(CATEGORIES)) ** 0.5
        return drawn @ (weights * (_OF_NUMBERS / weights.norm())) + scale * effects(values, features).sum(0) + _BIAS


# ---- Of files --------------------------------------------------------------------------------------------------------


def as_batch(rows: Any) -> Batch:
    """
    Convert a ``pyarrow.RecordBatch`` to a batch.

    Args:
        rows: with the columns ``label``, ``I1`` to ``I13`` and ``C1`` to ``C26``. Numbers become ``log(1 + x)``, 0
            where they are missing or negative. Categories are hexadecimal strings, as in Criteo's files, or integers;
            those that are missing are MISSING.

    Raises:
        ValueError: if a column is missing, or a string is not hexadecimal of up to 8 digits.

    Example:
        >>> import pyarrow as pa
        >>> columns = {"label": [1], **{name: [1] for name in INTEGERS}, **{name: ["68fd1e64"] for name in CATEGORIES}}
        >>> batch = as_batch(pa.record_batch(columns))
        >>> batch.labels, batch.numbers[0, :2], batch.ids[:2, 0]
        (tensor([1.]), tensor([0.6931, 0.6931]), tensor([1761418852, 1761418852]))
    """
    import pyarrow as pa
    from pyarrow import compute

    for name in ("label", *INTEGERS, *CATEGORIES):
        if name not in rows.schema.names:
            raise ValueError(f"there must be a column {name!r}, got {', '.join(rows.schema.names)}")
    labels = _numpy(rows.column("label"), pa.float32(), 0.0)
    numbers = np.stack([_numpy(rows.column(name), pa.float32(), 0.0) for name in INTEGERS], 1)
    ids = np.stack([_raw_ids(pa, compute, name, rows.column(name)) for name in CATEGORIES])
    numbers = np.log1p(np.maximum(numbers, np.float32(0.0)))
    return Batch(torch.tensor(labels), torch.from_numpy(numbers), torch.from_numpy(ids))


def _numpy(column: Any, kind: Any, missing: float) -> np.ndarray:
    return column.cast(kind, safe=False).fill_null(missing).to_numpy(zero_copy_only=False)


def _raw_ids(pa: Any, compute: Any, name: str, column: Any) -> np.ndarray:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type) or pa.types.is_null(column.type):
        return _numpy(column, pa.int64(), MISSING)
    strings = column.cast(pa.string())
    hexadecimal = compute.utf8_lpad(compute.fill_null(strings, ""), 8, "0")
    try:
        if compute.any(compute.not_equal(compute.binary_length(hexadecimal), 8)).as_py():
            raise ValueError
        # What utf8_lpad returns begins at its buffer's beginning. There is no buffer without strings.
        content = memoryview(hexadecimal.buffers()[2] or b"")[: 8 * len(hexadecimal)]
        ids = np.frombuffer(binascii.unhexlify(content), ">u4")
    except ValueError:  # That of binascii does not say which.
        wrong = next(text for text in strings.to_pylist() if text is not None and not _is_hexadecimal(text))
        raise ValueError(f"column {name!r} must hold hexadecimal ids of up to 8 digits, got {wrong!r}") from None
    present = compute.fill_null(compute.not_equal(strings, ""), False)
    return np.where(present.to_numpy(zero_copy_only=False), ids.astype(np.int64), MISSING)


def _is_hexadecimal(text: str) -> bool:
    return len(text) <= 8 and set(text) <= set(string.hexdigits)
