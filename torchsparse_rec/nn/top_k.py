"""The rows of a table that score highest for a query: the items to recommend."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..jagged import JaggedTensor
from ..jagged.checks import type_name
from ..ops.scores_top_k import best_rows
from ..tables.table import split_part
from ._owner import TableOwner
from ._refusals import growing_untraced
from .embedding_variable import EmbeddingVariable

__all__ = ["TopK"]


class TopK(torch.nn.Module):
    """
    The k rows of a table with the highest products with a query, found without ever holding all scores.

    The table is given at each call, so that one that is looked up elsewhere is in a ``state_dict`` once. It is read
    block by block, with all rows up to date. The row ``padding_idx`` of a module is no candidate.

    Args:
        k: the number of rows for each query, at least 1.

    Shape:
        ``query``: ``[..., D]``, N queries in all, of floats.

        ``table``: :class:`Embedding` or :class:`EmbeddingBag`, also torch's, or a table of a collection, such as
        ``collection.embedding_bags["items"]``; or a tensor ``[V, D]``; or :class:`EmbeddingVariable`. Of the latter all
        present keys are candidates, and ids are keys. Each call copies its rows: to call it often between two steps,
        take ``export()`` once, give its ``values``, and read the ids in its ``keys``.

        ``excluded``: the ids that do not count for a query: a :class:`torchsparse_rec.jagged.JaggedTensor` of N rows,
        or ``[N, E]`` int64 filled up with -1. Keys that a variable does not have say nothing.

        The result is ``(values, ids)``, both ``[..., k]``, the highest first: float32, of float64 float64; and int64.
        Of equal values the lower row comes first. Where fewer than k candidates are left, the last places have the
        value -inf and the id -1.

    Raises:
        IndexError: an excluded id that the table does not have, named with its position.
        RuntimeError: a table that is split over ranks; in ``torch.export``, one that grows, or whose rows may be stale.
        TypeError: a table of another kind.
        ValueError: shapes, dtypes or devices that do not fit, or fewer than k rows.

    Not differentiable. See :func:`torchsparse_rec.ops.top_k_rows` for half types, NaN and bits.

    Source: ``layers.factorized_top_k`` of TensorFlow Recommenders, with its ``query_with_exclusions``.

    Example:
        >>> from torchsparse_rec.nn import Embedding
        >>> rows = torch.tensor([[9.0, 9.0], [1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
        >>> items = Embedding(4, 2, padding_idx=0, _weight=rows)
        >>> values, ids = TopK(2)(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), items)
        >>> ids
        tensor([[3, 1],
                [2, 3]])
        >>> TopK(2)(torch.tensor([[1.0, 0.0]]), items, excluded=torch.tensor([[3, -1]]))
        (tensor([[1., 0.]]), tensor([[1, 2]]))
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"TopK: k must be at least 1, got {k}")
        self.k = k

    def forward(
        self, query: Tensor, table: torch.nn.Module | Tensor, *, excluded: JaggedTensor | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the highest scores of each query, and their ids; see the class."""
        if isinstance(table, EmbeddingVariable):
            return self._of_keys(query, table, excluded)
        padding_idx = None
        if isinstance(table, Tensor):
            weight = table
        elif isinstance(table, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            if isinstance(table, TableOwner):
                _check_owner(table)
            weight, padding_idx = table.weight, table.padding_idx
        else:
            _refuse(table)
        return best_rows("TopK", query, weight, self.k, excluded, of_rows="table", without=padding_idx)

    def _of_keys(
        self, query: Tensor, table: EmbeddingVariable, excluded: JaggedTensor | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the highest scores among a variable's keys, and these."""
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"TopK: EmbeddingVariable {table.name!r} grows, and cannot be exported: give the program the values of "
                "its export(), whose keys tell the ids"
            )
        if torch.compiler.is_compiling():
            return growing_untraced(self._of_keys, query, table, excluded)  # type: ignore[no-any-return]
        _check_owner(table)
        keys, values, *_ = table.export()
        return best_rows("TopK", query, values, self.k, excluded, of_rows="table", keys=keys.long())

    def extra_repr(self) -> str:
        """Describe the module in its ``repr``."""
        return f"k={self.k}"


def _check_owner(table: TableOwner) -> None:
    """Raise ``RuntimeError`` if a table's stored rows are not all there or, in a program, perhaps stale."""
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting() and table.training and table._may_be_stale():
            raise RuntimeError(
                f"TopK: {type(table).__name__} cannot be exported in train(), as its rows may be stale: call eval() on "
                "the model before torch.export"
            )
        return
    part = split_part(table.stored_weight())
    if part is not None:
        raise RuntimeError(
            f"TopK: table {part.name!r} is split over ranks, and this one has only its own rows: take the best of each "
            "rank's rows by ops.top_k_rows, and of these the best, or load the model's checkpoint in one process"
        )


def _refuse(table: object) -> NoReturn:
    way = "give a tensor [V, D] of its rows"
    if hasattr(table, "embedding_bags"):
        way = "give one of its tables, such as collection.embedding_bags['items']"
    elif hasattr(table, "embeddings"):
        way = "give one of its tables, such as collection.embeddings['items']"
    raise TypeError(
        f"TopK: table must be Embedding, EmbeddingBag, EmbeddingVariable or a tensor, got {type_name(table)}: {way}"
    )
