"""The rows of a table that score highest for a query: the items to recommend."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch import untraced
from ..jagged import JaggedTensor
from ..jagged.checks import type_name
from ..ops.scores_top_k import best_rows
from ..tables.part import Part
from ._owner import TableOwner
from ._refusals import growing_untraced, refuse_clipped
from .embedding_variable import EmbeddingVariable
from .lookup_sparse import part_of, weight_of

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

        Of a table that ranks share, ``RowWise`` or ``TableWise``, all ranks call this, each with its own queries, of
        any number, and with the same k. Queries travel; rows stay.

        ``excluded``: the ids that do not count for a query: a :class:`torchsparse_rec.jagged.JaggedTensor` of N rows,
        or ``[N, E]`` int64 filled up with -1. Keys that a variable does not have say nothing.

        The result is ``(values, ids)``, both ``[..., k]``, the highest first: float32, of float64 float64; and int64.
        Of equal values the lower row comes first, and of a variable over ranks the lower key. Where fewer than k
        candidates are left, the last places have the value -inf and the id -1.

    Raises:
        IndexError: an excluded id that the table does not have, named with its position.
        RuntimeError: in ``torch.export`` a table that grows, is split over ranks, or whose rows may be stale. Over
            ranks also a k or dtypes that differ.
        TypeError: a table of another kind.
        ValueError: shapes, dtypes or devices that do not fit, fewer than k rows, a table with a ``max_norm``, or one
            over ranks that is ``ColumnWise``. Over ranks an error of one is raised on all.

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
        _check_kind(table)
        refuse_clipped("TopK", "table", table)
        part = part_of(table)
        if part is not None and not part.replicated:
            return _over_ranks(part, table, query, self.k, excluded)  # type: ignore[no-any-return]
        if isinstance(table, EmbeddingVariable):
            return self._of_keys(query, table, excluded)
        weight, padding_idx = _rows_of(table)
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
        keys, values, *_ = table.export()
        return best_rows("TopK", query, values, self.k, excluded, of_rows="table", keys=keys.long())

    def extra_repr(self) -> str:
        """Describe the module in its ``repr``."""
        return f"k={self.k}"


@untraced(reason="TopK of a table of several ranks cannot be part of a graph: compile without fullgraph")
def _over_ranks(
    part: Part, table: Any, query: Tensor, k: int, excluded: JaggedTensor | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the highest scores among the rows of all ranks, of which this one has a part."""
    assert part.over_rows is not None
    over = part.over_rows(weight_of(table), "TopK")
    with over.told():
        keys, padding_idx = None, None
        if isinstance(table, EmbeddingVariable):
            keys, rows, *_ = table.export()
        elif part.has is not None:
            raise ValueError(f"TopK: table must be the EmbeddingVariable {part.name!r}, got its parameter")
        else:
            rows, padding_idx = _rows_of(table)
        best_of = partial(over.best, over.candidates(rows.detach(), None if keys is None else keys.long()))
        how: dict[str, Any] = {"of_rows": "table", "without": padding_idx, "keys": keys, "best_of": best_of}
        return best_rows("TopK", query, over.rows, k, excluded, **how)


def _rows_of(table: Any) -> tuple[Tensor, int | None]:
    """Return a table's rows, or this rank's of them, up to date, and the number of the one that does not count."""
    if isinstance(table, Tensor):
        return table, None
    if torch.compiler.is_exporting() and isinstance(table, TableOwner) and table.training and table._may_be_stale():
        raise RuntimeError(
            f"TopK: {type(table).__name__} cannot be exported in train(), as its rows may be stale: call eval() on "
            "the model before torch.export"
        )
    return table.weight, table.padding_idx


def _check_kind(table: object) -> None:
    """Raise ``TypeError`` if a table is of no kind whose rows are candidates."""
    if isinstance(table, Tensor | torch.nn.Embedding | torch.nn.EmbeddingBag | EmbeddingVariable):
        return
    way = "give a tensor [V, D] of its rows"
    if hasattr(table, "embedding_bags"):
        way = "give one of its tables, such as collection.embedding_bags['items']"
    elif hasattr(table, "embeddings"):
        way = "give one of its tables, such as collection.embeddings['items']"
    raise TypeError(
        f"TopK: table must be Embedding, EmbeddingBag, EmbeddingVariable or a tensor, got {type_name(table)}: {way}"
    )
