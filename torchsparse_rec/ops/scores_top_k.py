"""The rows of a table with the highest scores, found block by block, so that the scores of all are never there."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..jagged import JaggedTensor
from ..jagged.checks import check_tensor
from ._in_place import without_result
from .scores_checks import ascending, check_block, check_factors, excluded_pairs, wide
from .scores_passes import Passes, Samples, targets_of

__all__ = ["top_k_rows"]

_ops = torch.ops.torchsparse_rec


def top_k_rows(
    query: Tensor, weight: Tensor, k: int, *, excluded: JaggedTensor | Tensor | None = None, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """
    Return the k highest scores ``query @ weight.T`` of each query, and their rows, without ever holding all scores.

    The rows of ``weight`` are read block by block. Beside the results, memory is that of one block's scores.

    Args:
        query: ``[..., D]``, N queries in all, of floats. If one of ``query`` and ``weight`` is float64, both are.
        weight: ``[V, D]``.
        k: the number of rows of each query, from 1 to V.
        excluded: the rows that do not count for a query: a ``JaggedTensor`` of N rows of ids, or ``[N, E]`` int64
            filled up with -1.
        block: the number of rows that are read at a time. The default gives 1 MB of scores, and at least 256 rows.

    Returns:
        ``(values, rows)``, each ``[..., k]``, the highest score first: float32, of float64 inputs float64; and int64.
        Of equal scores the lower row comes first. NaN is the highest score, as in ``torch.topk``. A score of -inf is no
        row: where fewer than k are left, the places at the end have the value -inf and the row -1.

    Raises:
        IndexError: an excluded row out of range, named with its position, which counts along queries.
        TypeError: an argument that is no tensor.
        ValueError: shapes, dtypes or devices that do not fit, or ``k`` or ``block`` out of its range.

    Not differentiable: the values have no graph. Scores of half types are float32, also within autocast. Products are
    torch's: as with ``torch.nn.Linear``, a query's last bits may depend on its batch, the block, the CPU and the number
    of threads.

    Source: ``torch.topk``; ``layers.factorized_top_k.Streaming`` of TensorFlow Recommenders.

    Example:
        >>> items = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [1.0, 0.0]])
        >>> top_k_rows(torch.tensor([1.0, 0.0]), items, 3)
        (tensor([2., 1., 1.]), tensor([2, 0, 3]))
        >>> top_k_rows(torch.tensor([1.0, 0.0]), items, 3, excluded=torch.tensor([[2, -1]]))
        (tensor([1., 1., 0.]), tensor([0, 3, 1]))
    """
    return best_rows("top_k_rows", query, weight, k, excluded, block=block)


def best_rows(
    name: str,
    query: Tensor,
    weight: Tensor,
    k: int,
    excluded: JaggedTensor | Tensor | None,
    *,
    of_rows: str = "weight",
    without: int | None = None,
    keys: Tensor | None = None,
    block: int | None = None,
    best_of: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Return what :func:`top_k_rows` does, by other names in errors.

    Args:
        name: the caller's name.
        query: the argument of :func:`top_k_rows`, as are the other ones.
        weight: the argument of that function.
        k: the argument of that function.
        excluded: the argument of that function.
        of_rows: the caller's name for ``weight``.
        without: a row that counts for no query.
        keys: ``[V]`` int64, the ids of the rows. Those that are excluded may be others. Default: ids are rows.
        block: the argument of that function.
        best_of: the way of a table that ranks share, given queries, pairs of excluded ids and queries, k, block, and
            the row that does not count. Default: all rows are here.
    """
    for argument, x in (("query", query), (of_rows, weight)):
        check_tensor(name, argument, x)
    check_factors(name, "query", query, of_rows, weight)
    if weight.device != query.device:
        raise ValueError(f"{name}: {of_rows} must be on the device of query, {query.device}, got {weight.device}")
    rows, shape = weight.shape[0], query.shape[:-1]
    if best_of is None:
        check_k(name, k, rows)
    check_block(name, block)
    queries = query.detach().reshape(math.prod(shape), query.shape[-1]).to(wide(query.dtype))
    padding, pairs = -1 if without is None else without, None
    if excluded is not None:
        ids, of = excluded_pairs(name, excluded, queries.shape[0], query.device, "queries")
        pairs = (targets_of(ids, rows, -1, True) if keys is None else ids.long()), of
    if best_of is not None:
        values, found = best_of(queries, pairs, k, block, padding)
        return values.view(*shape, k), found.view(*shape, k)
    targets = torch.full((queries.shape[0],), -1, device=query.device)
    in_order: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if pairs is not None:
        in_order = ascending(pairs[0] if keys is None else _rows_of(pairs[0], keys), pairs[1], targets)
    values, found = _top_k(queries, weight.detach(), targets, *in_order, k, block, padding)
    if keys is not None:
        found = keys[found].where(found >= 0, -1)
    return values.reshape(*shape, k), found.reshape(*shape, k)


def check_k(name: str, k: int, rows: int) -> None:
    """Raise ``ValueError`` if a table does not have k rows."""
    if not 1 <= k <= rows:
        raise ValueError(f"{name}: k must be in [1, {rows}], got {k}")


def _rows_of(ids: Tensor, keys: Tensor) -> Tensor:
    """Return the rows of ids, -1 of those without one, and of -1."""
    ordered, rows = keys.sort()
    places = places_of_keys(ordered, ids)
    return rows[places].where(places >= 0, -1)


def places_of_keys(ordered: Tensor, ids: Tensor) -> Tensor:
    """Return the places of ids among ascending keys, of which there is one; -1 of those without one, and of -1."""
    places = torch.searchsorted(ordered, ids).clamp_max(ordered.shape[0] - 1)
    return places.where((ordered[places] == ids) & (ids != -1), -1)


def best_of_passes(
    passes: Passes, rows_of: Callable[[int, int], Tensor], k: int, excludes_targets: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of each sample, and their rows: ``[N, k]``; -inf and -1 where none is left."""
    of = passes.of
    values = of.input.new_full((of.input.shape[0], k), -torch.inf)
    found = torch.full_like(values, -1, dtype=torch.int64)
    samples = torch.arange(values.shape[0], device=values.device)
    for begin, end in passes.blocks():
        scores = passes.scores(passes.units(rows_of(begin, end), begin, end)[0], begin, end)
        if excludes_targets:
            _ops.scores_exclude_.default(scores, of.targets, samples, begin)
        _ops.scores_top_k_.default(scores, begin, values, found)
    return values, found


# ---- The operator ----------------------------------------------------------------------------------------------------

_library = torch.library.Library("torchsparse_rec_scores", "FRAGMENT")
_library.define(
    "top_k(Tensor input, Tensor rows, Tensor targets, Tensor? ids, Tensor? samples, SymInt k, SymInt? block,"
    " int padding)"
    " -> (Tensor values, Tensor found)"
)


def _forward(
    input: Tensor,
    rows: Tensor,
    targets: Tensor,
    ids: Tensor | None,
    samples: Tensor | None,
    k: int,
    block: int | None,
    padding: int,
) -> tuple[Tensor, Tensor]:
    of = Samples(input.contiguous(), targets, None, None, ids, samples, 0.0, False, block, padding)
    with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
        return best_of_passes(Passes(of, rows.shape[0]), lambda begin, end: rows[begin:end], k)


def _fake(
    input: Tensor, rows: Tensor, targets: Tensor, ids: Tensor | None, samples: Tensor | None, k: int, *_: int | None
) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape[0], k), targets.new_empty(input.shape[0], k)


_library.impl("top_k", _forward, "CompositeExplicitAutograd")
_library.impl("top_k", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("torchsparse_rec_scores::top_k", _fake, lib=_library)
without_result("scores_top_k_")
_top_k = torch.ops.torchsparse_rec_scores.top_k.default
