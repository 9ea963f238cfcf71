"""Losses over all rows of a table: the scores of all rows are never there, nor, if the table is fused, its gradient."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch import as_stored, untraced
from .._torch_modules import is_in_ddp
from ..jagged import JaggedTensor
from ..jagged.checks import type_name
from ..ops.scores import Options, check_loss, cross_entropy
from ..ops.scores_checks import ascending, excluded_pairs
from ..ops.scores_passes import loss
from ..tables.part import Part
from ..tables.stale import are_trained
from ..tables.table import split_part
from ..variable.arguments import check_places
from ..variable.keys import KeyRows
from ._fused_graph import fused_loss, number_of_call
from ._fused_loss import fused_losses
from ._refusals import check_export, check_shards, growing_untraced, refuse_clipped
from .embedding_variable import EmbeddingVariable
from .grad_mode import OneTable
from .lookup_sparse import part_of, weight_of

__all__ = ["TableCrossEntropyLoss", "table_cross_entropy"]


def table_cross_entropy(
    input: Tensor,
    table: torch.nn.Module | Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
    normalize: bool = False,
    excluded: JaggedTensor | Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """
    Return the cross entropy of each target among all rows of a table, without ever holding all scores.

    The loss is ``F.cross_entropy(input @ table.weight.T + bias, target)``. A table may be looked up as well (tied
    weights). What its gradient is, ``grad_mode`` says:

    * ``"dense"``, None and ``"sparse"``: strided, as every row has a gradient.
    * ``"fused"``: it is never there. Backward steps each block of rows as it has the block's gradient. Where lookups or
      other losses of the same backward reach the table, it steps all rows once when the backward ends.
    * ``"auto"``: ``"fused"`` if the optimizer has ``in_backward=True``, and the table's lookups are fused or there are
      none; else ``"dense"``.

    Args:
        input: ``[..., D]``, N samples in all, of floats. If one of the floating tensors is float64, all are.
        table: an ``Embedding`` or ``EmbeddingBag`` of this library or of torch, or a tensor ``[V, D]``. A module's
            ``padding_idx`` is no candidate, and as a target is ignored. A table of a collection is given as
            ``collection.embeddings["items"]``. Of a table that ranks share, ``RowWise`` or ``TableWise``, all ranks
            call this, each with its own samples, of any number. Of an ``EmbeddingVariable`` see below.
        target: ``[...]``, int32 or int64: rows in ``[0, V)``, or ``ignore_index``. Of an ``EmbeddingVariable``: keys.
        bias: ``[V]``, added to the scores. Over ranks it is the same on all, as is ``weight``.
        weight: the argument of :func:`torchsparse_rec.ops.linear_cross_entropy`, as are all that follow.
        ignore_index: the argument of that function.
        reduction: the argument of that function.
        label_smoothing: the argument of that function.
        temperature: the argument of that function.
        normalize: the argument of that function.
        excluded: the argument of that function.
        block: the argument of that function.

    Returns:
        A scalar, or with ``reduction="none"`` the shape of ``target``: float32, of float64 inputs float64. Over ranks
        it is of this rank's samples; for a mean over those of all ranks, give the losses to
        :func:`torchsparse_rec.distributed.global_mean`.

    The classes of an :class:`EmbeddingVariable` are its keys that have a row. In ``train()`` with gradients a target
    without one is first inserted, and counted, as by a lookup. A key that a filter has just admitted is a class by its
    initial values. Excluded keys that are not there say nothing. The loss moves all rows, so that a full version
    follows in the place of the next :meth:`EmbeddingVariable.save_delta`. On CUDA it waits for the device.

    Raises:
        IndexError: a target or an excluded row out of range, named with its position. Also a target key without a row
            where none is inserted, or which the filter has not admitted yet.
        RuntimeError: ``weight`` that requires a gradient. In ``"fused"`` as for lookups: no optimizer with
            ``in_backward=True`` holds the table, or it has a ``.grad`` or a hook. Also a table that was updated, or
            whose keys were erased or evicted, between the loss and its backward. Over ranks also options or dtypes that
            differ, and a ``DistributedDataParallel`` that does not leave the table out.
        TypeError: an argument of another type, such as a collection.
        ValueError: shapes, dtypes or devices that do not fit, an option out of its range, a table with a ``max_norm``,
            or one over ranks that is ``ColumnWise`` or ``Replicated``. Over ranks an error of one is raised on all.
            Also an ``EmbeddingVariable`` of several tiers; ``bias`` or ``weight`` for one, whose keys have no fixed
            rows.

    Over ranks, gradients of the table are averaged, as those of lookups; ``input`` has the gradient of this rank's
    loss. The mean over ranks of the bias's gradients, which ``DistributedDataParallel`` takes, is the right one.

    Differentiable in ``input``, ``bias`` and a table that is not fused, once. Products are torch's: a sample's last
    bits may depend on its batch.

    Source: ``torch.nn.functional.cross_entropy``, ``torch.nn.functional.linear_cross_entropy``.

    Example:
        >>> from torchsparse_rec.nn import Embedding
        >>> items = Embedding.from_pretrained(torch.eye(3))
        >>> table_cross_entropy(2 * torch.eye(3)[:2], items, torch.tensor([0, 2]), reduction="none")
        tensor([0.2395, 2.2395])
    """
    options = Options(weight, ignore_index, reduction, label_smoothing, temperature, normalize, excluded, block)
    refuse_clipped(_NAME, "table", table)
    if isinstance(table, EmbeddingVariable):
        return _over_keys(input, table, target, bias, options)
    if not isinstance(table, Tensor | torch.nn.Embedding | torch.nn.EmbeddingBag):
        raise TypeError(
            f"{_NAME}: table must be an Embedding, an EmbeddingBag, an EmbeddingVariable or a tensor, got "
            f"{type_name(table)}: for other tables there is nn.sampled_softmax_loss"
        )
    part = part_of(table)
    if part is not None:
        return _over_ranks(part, table, input, target, bias, options)
    padding, losses_of = None, None
    if isinstance(table, Tensor):
        rows = table
    else:
        padding = table.padding_idx
        rows, losses_of = _of_module(table) if isinstance(table, OneTable) else (table.weight, None)
    return cross_entropy(
        _NAME,
        input,
        rows,
        target,
        bias,
        options,
        names=_NAMES,
        padding=-1 if padding is None else padding,
        losses_of=losses_of,
    )


class TableCrossEntropyLoss(torch.nn.Module):
    """
    :func:`table_cross_entropy` as a module, which holds its options but no table.

    Args:
        weight: ``[V]``, the weights of the classes.
        ignore_index: the argument of :func:`table_cross_entropy`, as are all that follow.
        reduction: the argument of the function.
        label_smoothing: the argument of the function.
        temperature: the argument of the function.
        normalize: the argument of the function.
        block: the argument of the function.

    Example:
        >>> from torchsparse_rec.nn import Embedding
        >>> loss = TableCrossEntropyLoss(temperature=0.5)
        >>> loss(torch.eye(3)[:2], Embedding.from_pretrained(torch.eye(3)), torch.tensor([0, 2]))
        tensor(1.2395)
    """

    weight: Tensor | None

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
        temperature: float = 1.0,
        normalize: bool = False,
        block: int | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.temperature, self.normalize, self.block = temperature, normalize, block

    def forward(
        self,
        input: Tensor,
        table: torch.nn.Module | Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        excluded: JaggedTensor | Tensor | None = None,
    ) -> Tensor:
        """Return the loss; see :func:`table_cross_entropy`."""
        options: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS}
        return table_cross_entropy(input, table, target, bias=bias, excluded=excluded, **options)

    def extra_repr(self) -> str:
        """Return the options, but for the weights."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in _OPTIONS if name != "weight")


_NAME, _NAMES = "table_cross_entropy", ("table", "bias")
_OPTIONS = ("weight", "ignore_index", "reduction", "label_smoothing", "temperature", "normalize", "block")


@untraced(reason=f"{_NAME} of a table of several ranks cannot be part of a graph: compile without fullgraph")
def _over_ranks(part: Part, table: Any, input: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Return the loss over the rows of all ranks, of which this one has a part."""
    weight = weight_of(table)
    assert part.over_rows is not None
    if part.has is not None:
        raise ValueError(f"{_NAME}: table must have numbered rows, got a part of {part.name!r}, which grows")
    over = part.over_rows(weight, _NAME, ", or take nn.sampled_softmax_loss")
    with over.told():
        padding = getattr(table, "padding_idx", None)
        if isinstance(table, OneTable) and _kind(table, weight) == "fused":
            losses_of = partial(over.losses, table.readers_of((0,)))
        else:
            losses_of = partial(over.losses, table if isinstance(table, Tensor) else table.weight)
        return cross_entropy(
            _NAME,
            input,
            over.rows,
            target,
            bias,
            options,
            names=_NAMES,
            padding=-1 if padding is None else padding,
            losses_of=losses_of,
        )


# ---- Tables of numbered rows -----------------------------------------------------------------------------------------


def _of_module(module: OneTable) -> tuple[Tensor, Any]:
    """Return a table, and how the loss of each sample is made; None: of the rows, which are then up to date."""
    stored = module.stored_weight()
    with as_stored():
        kind = _kind(module, stored)
        wanted = torch.is_grad_enabled() and stored.requires_grad
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        # A table that has a dense gradient has no stale rows. A sparse one is flushed, outside of the graph.
        sparse = module._grad_mode == "sparse" or (module._grad_mode is None and module._sparse)
        if kind == "fused" or (not sparse and module._may_be_stale() and not wanted):
            module._refuse_tracing()
            how = kind == "fused", module.training, module._number, number_of_call()
            return stored, lambda *of: fused_loss(module._leaf, *of, *how)[0]
        return module.weight if sparse else stored, None
    if kind == "dense":
        return module.weight, None
    module._refuse_tracing()
    return stored, lambda *of: fused_losses(module.readers_of((0,)), of, module.training)


def _kind(module: OneTable, weight: Tensor) -> str:
    """Return the layout of the gradient that a loss gives a module's table: dense or fused."""
    mode = module._grad_mode
    if torch.compiler.is_exporting():
        check_export(module, mode or "dense")
        return "dense"
    if not torch.is_grad_enabled() or not are_trained([weight]):
        return "dense"
    fuses = mode == "fused"
    if torch.compiler.is_compiling():
        fuses |= mode == "auto" and module._auto.mode == "fused"
    elif mode == "auto":
        fuses = module._auto.wish_of_loss(weight) == "fused"
    else:
        module._auto.has_loss = True
    kind = "fused" if fuses else "dense"
    if is_in_ddp() and (mode == "sparse" or (mode == "auto" and module._auto.mode == "sparse")):
        raise RuntimeError(
            f"{_NAME}: with grad_mode={mode!r} DistributedDataParallel expects a sparse gradient, and a loss over all "
            "rows gives a strided one: choose grad_mode='dense' for the table"
        )
    check_shards(module, [kind])
    return kind


# ---- Tables that grow ------------------------------------------------------------------------------------------------


def _over_keys(
    input: Tensor, table: EmbeddingVariable, target: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """Return the loss over the keys of a table that grows; its other rows are no classes."""
    if torch.compiler.is_exporting():
        raise RuntimeError(
            f"{_NAME}: EmbeddingVariable {table.name!r} grows, and cannot be exported: give the program the values of "
            "its export()"
        )
    if torch.compiler.is_compiling():
        return growing_untraced(_over_keys, input, table, target, bias, options)  # type: ignore[no-any-return]
    table._refuse_tracing()
    weight = table.stored_weight()
    _check_growing(table, weight, bias, options.weight)
    check_loss(_NAME, input, weight, target, None, options, _NAMES)
    excluded = options.excluded
    pairs = None if excluded is None else excluded_pairs(_NAME, excluded, target.numel(), input.device)
    with as_stored():
        check_places(table.name, weight, table.keys)
        kind, wanted = _kind(table, weight), torch.is_grad_enabled() and weight.requires_grad
    with table.writing():
        rows = _rows_of_targets(table, target, options.ignore_index)
        if kind == "dense":
            table._flush()
        if wanted:
            table.table_rows.note_all()
        with table.settled():  # a key that the filter has just admitted is a class by the values of its own
            live, erasures = table.keys.taken(), table.keys.erasures
        left_out = None if pairs is None else table.keys.find(pairs[0]).where(pairs[0] != -1, -1)

    def losses_of(samples: Tensor, targets: Tensor, *rest: Any) -> Tensor:
        if pairs is not None and left_out is not None:
            rest = *rest[:2], *ascending(left_out, pairs[1], targets), *rest[4:]
        with table._lock.reading(), as_stored():
            if kind == "fused":
                losses = fused_losses(table.readers_of((0,)), (samples, targets, *rest, live), table.training)
            else:
                losses = loss(samples, weight, targets, *rest, live)[0]
        if losses.requires_grad:
            losses.register_hook(partial(_check_keys, table.name, table.keys, erasures))
        return losses

    options = options._replace(ignore_index=-1, excluded=None)
    return cross_entropy(_NAME, input, weight, rows, None, options, names=_NAMES, losses_of=losses_of)


def _check_growing(table: EmbeddingVariable, stored: Tensor, bias: Tensor | None, weight: Tensor | None) -> None:
    """Raise ``ValueError`` where a loss over the rows of a table that grows has no meaning, or not all of its rows."""
    for argument, x in (("bias", bias), ("weight", weight)):
        if x is not None:
            raise ValueError(
                f"{_NAME}: {argument} must be None for a table that grows, whose keys have no fixed rows, got "
                f"{type_name(x)}"
            )
    if (part := split_part(stored)) is not None:
        raise ValueError(
            f"{_NAME}: table must be whole in this process, got a part of {part.name!r}, which grows over ranks: "
            "nn.sampled_softmax_loss takes it"
        )
    if table.cold is not None:
        raise ValueError(
            f"{_NAME}: table must have all rows in one tier, got EmbeddingVariable {table.name!r} of several: "
            "nn.sampled_softmax_loss reads only the rows of targets and candidates"
        )


def _rows_of_targets(table: EmbeddingVariable, target: Tensor, ignore_index: int) -> Tensor:
    """Return the row of each target, which a lookup in training inserts; -1 of those that are ignored."""
    if table.key_dtype == torch.int32 and target.dtype != torch.int32:
        raise ValueError(f"{_NAME}: target must be of the key_dtype of table, int32, got {target.dtype}")
    places = (target != ignore_index).nonzero()
    keys = target[tuple(places.T)]
    inserts = table.trains() and torch.is_grad_enabled()
    found = table.rows_of(keys) if inserts else table.keys.find(keys)
    bad = (found < table.keys.reserved).nonzero()
    if len(bad):
        place, key = places[bad[0, 0]].tolist(), keys[bad[0, 0]].item()
        where = f"[{', '.join(map(str, place))}]" if place else ""
        why = "its filter has not admitted that yet" if inserts else "in eval() and without gradients none is inserted"
        raise IndexError(
            f"{_NAME}: target{where} must be a key of EmbeddingVariable {table.name!r} or ignore_index, "
            f"{ignore_index}, got {key}: {why}"
        )
    rows = torch.full_like(target, -1, dtype=torch.int64)
    rows[tuple(places.T)] = found
    return rows


def _check_keys(name: str, keys: KeyRows, erasures: int, _grad: Tensor) -> None:
    """Raise ``RuntimeError`` in the backward of a loss if rows may have other keys than in its forward."""
    if keys.erasures != erasures:
        raise RuntimeError(
            f"{_NAME}: keys of EmbeddingVariable {name!r} were erased or evicted between the loss and its backward, "
            "which needs the rows as they were: look up all ids of a step before the loss"
        )
