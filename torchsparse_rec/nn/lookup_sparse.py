"""Lookups of several tables by sparse ids: SparseOperationKit's call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._reduction import COMBINERS
from .._torch import as_stored
from ..jagged import KeyedJaggedTensor
from ..jagged.inputs import as_keyed_jagged_tensor
from ..ops.embedding_collection import lookup
from ..tables.part import Part
from ..tables.table import table_if_any
from ..typing import Combiner
from ..variable.read_write_lock import reading
from ._growing import rows_of_keys
from ._owner import TableOwner
from ._refusals import growing_untraced, refuse_clipped, refused
from ._route import PLAIN, look_up_by, route
from .embedding_variable import EmbeddingVariable
from .grad_mode import OneTable
from .gradients import coalesced_mark
from .plan import Ids, LookupPlan

__all__ = ["SparseTables", "check_lengths", "checked", "ids_of", "lookup_sparse", "part_of", "weight_of"]


def lookup_sparse(params: Any, indices: Any, combiners: Any, sp_weights: Any = None) -> Any:
    """
    Look up several tables, each by sparse ids, and combine the rows of each example.

    Tables whose gradients are alike are looked up in one pass, whatever their dims. Tables that
    :func:`torchsparse_rec.distributed.shard` has split, each by itself, are looked up in one exchange of all ranks.

    Args:
        params: a list of tables, each an :class:`EmbeddingVariable`, a :class:`torch.nn.Embedding` or
            :class:`torch.nn.EmbeddingBag` (ours, of a collection, or torch's), or a parameter ``[V, D]``. One may be
            given several times.
        indices: a list of the ids for each table, in one of the forms that :mod:`torchsparse_rec.jagged` takes. Such
            forms are a :class:`JaggedTensor`, a sparse COO tensor ``[B, L]``, ``(values, offsets)`` or a
            ``SparseTensor`` of :mod:`torchsparse_rec.compat.tensorflow`.
        combiners: a list with ``"sum"``, ``"mean"`` or ``"sqrtn"`` for each table. With weights w and rows e these are
            ``s = sum(w * e)``, ``s / sum(w)`` and ``s / sqrt(sum(w * w))``.
        sp_weights: a list of the weights for each table's ids: a tensor ``[N]``, an object that has ``values()``, a
            ``SparseTensor``, or None for ids without weights. Default: the weights that the indices carry, or 1.

    Returns:
        A list of ``[B, D]``; rows of examples without ids are 0. A single tensor if ``params`` is not a list.

    Raises:
        IndexError: an id that a fixed table does not have.
        TypeError: params or indices of an unknown kind.
        ValueError: lists of different lengths; an unknown combiner; weights of another length than the ids; a table
            with a ``max_norm``. Also if
            some tables are split over ranks and others are not, and for the parameter of a variable that is split.

    Source: ``sparse_operation_kit.lookup_sparse``; DeepRec's ``group_embedding_lookup_sparse``.

    Example:
        >>> table = EmbeddingVariable(2, initializer=1.0)
        >>> ids = torch.tensor([1, 1, 3, 4, 5]), torch.tensor([0, 2, 5])
        >>> rows, means = lookup_sparse([table, torch.nn.Parameter(torch.eye(6))], [ids, ids], ["sum", "mean"])
        >>> rows.detach()
        tensor([[2., 2.],
                [3., 3.]])
    """
    if not isinstance(params, (list, tuple)):
        weights = None if sp_weights is None else [sp_weights]
        return lookup_sparse([params], [indices], [combiners], weights)[0]
    for k, given in enumerate(params):
        part = part_of(given)
        if part is not None:
            if part.look_up is None:
                raise ValueError(f"lookup_sparse: params[{k}] must be a whole table, got a part of {part.name!r}")
            return part.look_up(params, indices, combiners, sp_weights)
    check_lengths(params, indices, combiners, sp_weights)
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        if any(isinstance(given, EmbeddingVariable) for given in params):
            return growing_untraced(lookup_sparse, params, indices, combiners, sp_weights)
    ids, lengths = ids_of(indices, sp_weights)
    tables = SparseTables(params, combiners)
    try:
        return tables.look_up(tables.plan, range(len(tables.owners)), ids, lengths)
    except (IndexError, ValueError) as error:
        if torch.compiler.is_compiling():
            raise
        x = _keyed(indices)
        raise refused(error, "lookup_sparse", x, x, lambda k, _: (f"indices[{k}]", f" of params[{k}]")) from None


class _Number(str):
    """The number of a table, as the key of its ids: errors show it without quotes."""

    __repr__ = str.__str__


def _keyed(indices: Sequence[Any]) -> KeyedJaggedTensor:
    return as_keyed_jagged_tensor({_Number(k): ids for k, ids in enumerate(indices)}, owner="lookup_sparse: indices")


def ids_of(indices: Sequence[Any], sp_weights: Sequence[Any] | None) -> tuple[Ids, list[int]]:
    """Return the ids of all tables, with weights if some have any, and how many each table has."""
    x = _keyed(indices)
    return Ids(x.values(), x.offsets(), _weights(x, sp_weights), x.stride_per_key(), False), x.length_per_key()


def check_lengths(params: Sequence[Any], indices: Any, combiners: Any, sp_weights: Any) -> None:
    """Raise ``ValueError`` unless a call has as many ids, combiners and weights as tables."""
    if not params:
        raise ValueError("lookup_sparse: params must have at least one table, got none")
    for argument, value in (("indices", indices), ("combiners", combiners), ("sp_weights", sp_weights)):
        if argument == "sp_weights" and value is None:
            continue
        if not isinstance(value, (list, tuple)) or len(value) != len(params):
            got = len(value) if isinstance(value, (list, tuple)) else type(value).__name__
            raise ValueError(
                f"lookup_sparse: {argument} must be a list of {len(params)}, one for each table, got {got}"
            )


def _weights(x: KeyedJaggedTensor, sp_weights: Sequence[Any] | None) -> Tensor | None:
    """Return one weight for each id of all tables; None if no table's ids have weights."""
    if sp_weights is None or all(given is None for given in sp_weights):
        return x.weights_or_none()
    lengths = x.length_per_key()
    parts = []
    for k, (given, length) in enumerate(zip(sp_weights, lengths, strict=True)):
        if given is None:
            part = torch.ones(length, device=x.values().device)
        else:
            if not isinstance(given, Tensor) and not hasattr(given, "values"):
                raise TypeError(
                    f"lookup_sparse: sp_weights[{k}] must be a tensor, None or have values(), got "
                    f"{type(given).__name__}"
                )
            part = given
            if not isinstance(given, Tensor) or given.is_nested:
                part = given.values() if callable(given.values) else given.values
            if part.layout != torch.strided:
                part = part.coalesce().values() if part.layout == torch.sparse_coo else part.values()
            part = part.reshape(-1)
        if len(part) != length:
            raise ValueError(
                f"lookup_sparse: sp_weights[{k}] must have {length} weights, one for each id, got {len(part)}"
            )
        parts.append(part.to(x.values().device))
    return torch.cat(parts)


class SparseTables:
    """
    The tables of a call of :func:`lookup_sparse`, and its lookups of them.

    Args:
        params: the argument of the function.
        combiners: the argument of the function.
    """

    def __init__(self, params: Sequence[Any], combiners: Sequence[Combiner]) -> None:
        for k, combiner in enumerate(combiners):
            if combiner not in COMBINERS:
                known = ", ".join(map(repr, COMBINERS))
                raise ValueError(f"lookup_sparse: combiners[{k}] must be one of {known}, got {combiner!r}")
        self.owners: list[Any] = []  # the module or parameter given for each table
        tables = []
        for k, given in enumerate(params):
            place = next((i for i, owner in enumerate(self.owners) if owner is given), None)
            if place is None:
                place = len(self.owners)
                self.owners.append(checked(given, k))
            tables.append(place)
        stored = [weight_of(owner) for owner in self.owners]
        self.plan = LookupPlan(
            tuple(tables),
            tuple(range(len(tables))),
            tuple(COMBINERS[combiner] for combiner in combiners),
            tuple(weight.shape[0] for weight in stored),
            tuple(weight.shape[1] for weight in stored),
            tuple(_padding_of(owner) for owner in self.owners),
        )

    def look_up(
        self,
        plan: LookupPlan,
        tables: Sequence[int],
        ids: Ids,
        lengths: Sequence[int],
        occurrences: Tensor | None = None,
    ) -> list[Tensor]:
        """
        Look up some tables; return ``[B, D]`` for each lookup.

        Args:
            plan: the lookups; its table k is table ``tables[k]`` of all.
            tables: the tables' numbers among all.
            ids: the ids of the lookups.
            lengths: the number of ids of each feature.
            occurrences: the argument of :func:`rows_of_keys`.
        """
        owners = [self.owners[k] for k in tables]
        weights = [weight_of(owner) for owner in owners]
        growing = {k: owner for k, owner in enumerate(owners) if isinstance(owner, EmbeddingVariable)}
        if growing:
            plan, weights, ids = rows_of_keys(plan, weights, growing, ids, lengths, occurrences)
        count = ids.indices.shape[0]
        kinds = [_kind(owner, weight, count) for owner, weight in zip(owners, weights, strict=True)]
        if torch.compiler.is_exporting():  # a program has no locks, and its sizes may be no numbers
            return _look_up(owners, plan, weights, ids, kinds)
        with reading([variable._lock for variable in growing.values()]):
            return _look_up(owners, plan.of_sizes(weights), weights, ids, kinds)


def _look_up(
    owners: Sequence[Any], plan: LookupPlan, weights: list[Parameter], ids: Ids, kinds: list[str]
) -> list[Tensor]:
    groups: dict[tuple, list[int]] = {}
    for k, (owner, weight, kind) in enumerate(zip(owners, weights, kinds, strict=True)):
        alone = isinstance(owner, OneTable) and isinstance(weight, Parameter)
        way = route(owner, (0,), [weight], kind) if alone else PLAIN
        groups.setdefault((kind, weight.dtype, way, -1 if way == PLAIN else k), []).append(k)
    results: dict[int, Tensor] = {}
    for (kind, dtype, way, alone), tables in groups.items():
        part = plan.part(tables)
        its = ids
        if ids.per_sample_weights is not None and ids.per_sample_weights.dtype != dtype:
            its = ids._replace(per_sample_weights=ids.per_sample_weights.to(dtype))
        if alone >= 0:
            made = _look_up_alone(way, owners[alone], weights[alone], kind, part, its)
        else:
            chosen = [weights[k] for k in tables]
            marks = list(map(coalesced_mark, chosen)) if kind == "sparse" else None
            made = lookup(chosen, *its[:3], *part.lists(its), kind == "sparse", marks)[0]  # type: ignore[arg-type]
        for number, piece in zip(plan.lookups_of(tables), made.split(part.sizes(its)), strict=True):
            results[number] = piece.reshape(ids.bags[plan.keys[number]], plan.dims[plan.tables[number]])
    return [results[number] for number in range(len(plan.tables))]


def _look_up_alone(way: str, owner: Any, weight: Parameter, kind: str, part: LookupPlan, ids: Ids) -> Tensor:
    """Look up a table that only its module can read and update."""
    if not owner.scale_grad_by_freq:
        with as_stored():
            return look_up_by(way, owner, (0,), [weight], kind, part, ids)
    pieces = []
    for key, mode in zip(part.keys, part.modes, strict=True):
        firsts = sum(ids.bags[:key])
        assert ids.offsets is not None
        offsets = ids.offsets[firsts : firsts + ids.bags[key] + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        weights = None if ids.per_sample_weights is None else ids.per_sample_weights[begin:end]
        one = Ids(ids.indices[begin:end], offsets - begin, weights, (ids.bags[key],), True)
        padding = None if part.padding[0] < 0 else part.padding[0]
        with as_stored():
            pieces.append(owner._look_up_otherwise(way, kind, weight, mode, padding, one).reshape(-1))
    return torch.cat(pieces)


def _kind(owner: Any, weight: Tensor, ids: int) -> str:
    if isinstance(owner, OneTable):
        return owner._gradient_kind(weight, ids)
    return "sparse" if getattr(owner, "sparse", False) is True and weight.requires_grad else "dense"


def checked(given: Any, k: int) -> Any:
    """Return a table that is given to a call; raise ``TypeError`` or ``ValueError`` if it cannot be looked up."""
    known = (EmbeddingVariable, torch.nn.Embedding, torch.nn.EmbeddingBag)
    if isinstance(given, known):
        refuse_clipped("lookup_sparse", f"params[{k}]", given)
        return given
    if isinstance(given, Tensor) and given.dim() == 2 and given.is_floating_point():
        return given
    got = f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    raise TypeError(
        f"lookup_sparse: params[{k}] must be an EmbeddingVariable, Embedding, EmbeddingBag or a parameter [V, D], got "
        f"{got}"
    )


def part_of(given: Any) -> Part | None:
    """
    Return the table's part, or copy, where ranks share the table; None for all others.

    Raises:
        RuntimeError: such a table is being exported.
    """
    refuse_export = getattr(given, "refuse_export", None)
    if refuse_export is not None:  # torch.export puts other tensors for parameters, so that no part is known
        refuse_export()
    known = isinstance(given, (Tensor, EmbeddingVariable, torch.nn.Embedding, torch.nn.EmbeddingBag))
    table = table_if_any(weight_of(given)) if known else None
    return None if table is None else table.part


def weight_of(owner: Any) -> Parameter:
    """Return the stored parameter of a table that is given as a module, or by itself."""
    if isinstance(owner, Tensor):
        return owner  # type: ignore[return-value]
    return owner.stored_weight() if isinstance(owner, TableOwner) else owner.weight


def _padding_of(owner: Any) -> int:
    padding = getattr(owner, "padding_idx", None)
    return -1 if padding is None else padding
