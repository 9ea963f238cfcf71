"""
Losses over all rows of a table that ranks share, and its best rows: samples travel to the rows, results travel back.

Each rank passes over its own rows with the samples of all ranks, in forward and in backward. Rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from .._torch import as_stored
from ..nn.streamed import Deferred
from ..ops.scores_passes import Factors, Passes, Samples, backward_of, weights_of
from ..ops.scores_top_k import best_of_passes, check_k
from ..tables.blocks import Blocks
from ._candidates import Candidates, of_blocks, of_keys
from .exchange import Sizes, exchange, scale_gradient
from .plan import ColumnWise, Replicated, RowWise
from .ranks import Call, known_call
from .shards import COUNTS_OF_LOSS
from .together import module_of

__all__ = ["OverRanks"]


class OverRanks:
    """
    The way over all rows of a table that ranks share, which all of them call.

    Args:
        weight: the parameter, with this rank's part.
        name: the name of the caller, for errors.
        instead: the end of the error where the plan does not fit: another way.

    Raises:
        ValueError: the table is ``ColumnWise`` or ``Replicated``.
    """

    def __init__(self, weight: Parameter, name: str, instead: str = "") -> None:
        self._module = module = module_of(weight)
        self._weight, self._shards = weight, module.shards
        its = zip(self._shards.tables, self._shards.plans, strict=True)
        table, self._plan = next((table, plan) for table, plan in its if table.weight is weight)
        if isinstance(self._plan, (ColumnWise, Replicated)):
            raise ValueError(
                f"{name}: table {table.name!r} must be RowWise or TableWise, got {type(self._plan).__name__}: choose "
                f"its plan in shard(){instead}"
            )
        self._caller, self._name = name, table.name
        self._rows = 1 if table.grows else table.rows
        with as_stored():
            # Of the whole table: its shape, one row if it grows, dtype and device, in the memory of one number.
            self.rows = weight.detach().new_empty(1, 1).expand(self._rows, table.dim)

    def told(self) -> AbstractContextManager[None]:
        """Return a context that raises its error on all ranks."""
        self._shards.refuse_export()
        return self._shards.told(self._module.training)  # type: ignore[no-any-return]

    def losses(self, rows: Any, *given: Any) -> Tensor:
        """
        Return the losses of this rank's samples, ``[N]``; their gradient is that of the mean over ranks.

        Args:
            rows: this rank's rows, up to date; or the readers of a fused table, whose backward updates it.
            given: the fields of :class:`Samples`, of this rank's samples and all rows.

        Raises:
            RuntimeError: see :class:`Ranks`; ranks differ in the kind of samples, biases and weights, or options.
        """
        of, module, shards = Samples(*given), self._module, self._shards
        ranks, device = shards.ranks, of.input.device
        count, (samples, dim) = ranks.count, of.input.shape
        with as_stored():
            trained = torch.is_grad_enabled() and (
                self._weight.requires_grad or (of.bias is not None and of.bias.requires_grad)
            )
        details = [f"{of.input.dtype}", f"label_smoothing {of.label_smoothing}", f"normalize {of.normalize}"]
        details += [f"gradients {torch.is_grad_enabled()}, of table or bias {trained}", f"padding {of.padding}"]
        details += [f"{name} of {x.dtype}" for name, x in (("bias", of.bias), ("weight", of.weight)) if x is not None]
        call = self._call("loss over all rows", ", ".join(details))
        shards.check(module, module.stored_weights(), trained)
        pairs = [of.targets[:0]] * 2 if of.ids is None or of.samples is None else [of.ids, of.samples]
        told = torch.tensor([[samples, len(pairs[0]), of.input.requires_grad]]).expand(count, COUNTS_OF_LOSS)
        ns, es, wants = ranks.headers(call, told).T.tolist()
        travels = torch.is_grad_enabled() and any(wants)
        leaf = torch.zeros((), device=device, requires_grad=True) if trained or travels else None
        # A rank's own gradients are not divided by the number of ranks, those of the rows are.
        of = of._replace(
            input=scale_gradient(of.input, count), bias=None if of.bias is None else scale_gradient(of.bias, count)
        )
        with ranks, torch.autocast(device.type, enabled=False):
            parts = [of.input.reshape(-1), of.targets, *(pairs if any(es) else [])]
            got = self._of_all(call, parts, [[n * dim for n in ns], ns, es, es], leaf if travels else None)
            local = self._local(of, got, ns, es)
            lookups = None if isinstance(rows, Tensor) else rows
            with as_stored():
                maximum, total, own, shared = _Sums.apply(
                    rows if lookups is None else lookups.leaf,
                    *(local.input, local.bias, local.targets, *local[3:], lookups, module.training),
                )
            # As bits, which have no gradient.
            bits = maximum.detach().view(torch.int64 if maximum.dtype == torch.float64 else torch.int32)
            sizes = [Sizes(ns, [samples] * count)] * 3 + [Sizes([len(shared)] * count, [len(shared)] * count)]
            answers = [bits, total, own, shared.repeat(count)]
            bits, *others = exchange(ranks, ranks.group, call, sizes, answers, leaf, 1.0)
            of_ranks = [x.view(count, x.numel() // count) for x in (bits.view(maximum.dtype), *others)]
            losses = _losses(of, self._rows - (of.padding >= 0), *of_ranks)
            return scale_gradient(losses, 1 / count)

    def best(
        self,
        its: Candidates,
        queries: Tensor,
        excluded: tuple[Tensor, Tensor] | None,
        k: int,
        block: int | None,
        padding: int,
    ) -> tuple[Tensor, Tensor]:
        """
        Return the k highest scores of each of this rank's queries among the rows of all, and their ids: ``[N, k]``.

        Args:
            its: this rank's rows.
            queries: ``[N, D]``.
            excluded: the ids that do not count, -1 for none, and for which query: ``[E]`` int64.
            k: the number of rows of each query.
            block: the number of rows that are read at a time.
            padding: an id that counts for no query; -1: all count.

        Raises:
            RuntimeError: see :class:`Ranks`; ranks differ in the dtype of queries, or in k.
            ValueError: all ranks together have fewer than k rows.
        """
        ranks, (mine, dim) = self._shards.ranks, queries.shape
        count = ranks.count
        call = self._call("best of all rows", f"{queries.dtype}, k {k}")
        pairs = excluded or [queries.new_empty(0, dtype=torch.int64)] * 2
        told = torch.tensor([[mine, len(pairs[0]), its.size]]).expand(count, COUNTS_OF_LOSS)
        ns, es, candidates = ranks.headers(call, told).T.tolist()
        check_k(self._caller, k, sum(candidates))
        with ranks, torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
            parts = [queries.reshape(-1), *(pairs if any(es) else [])]
            got = self._of_all(call, parts, [[n * dim for n in ns], es, es])
            ids = of = None
            if any(es):
                ids, of = _left_out(its.places_of(got[1]), got[2], ns, es)
            place = int(its.places_of(torch.tensor([padding], device=queries.device)))
            samples = Samples(got[0].view(sum(ns), dim), pairs[0][:0], None, None, ids, of, 0.0, False, block, place)
            values, places = best_of_passes(Passes(samples, its.size), its.rows_of, k)
            answers = [values.reshape(-1), its.ids_of(places).where(places >= 0, -1).reshape(-1)]
            sizes = [Sizes([n * k for n in ns], [mine * k] * count)] * 2
            came = exchange(ranks, ranks.group, call, sizes, answers, None, 1.0)
        values, ids = (x.view(count, mine, k).transpose(0, 1).reshape(mine, count * k) for x in came)
        ids, order = ids.sort(dim=1)  # of equal values the lower id comes first
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        return values[:, :k].contiguous(), ids.gather(1, order[:, :k])

    def _call(self, what: str, details: str) -> Call:
        mode = "train" if self._module.training else "eval"
        return known_call(self._shards.name, f"{what} of {self._name!r}", mode, details)

    def _of_all(
        self, call: Call, parts: Sequence[Tensor], amounts: Sequence[Sequence[int]], leaf: Tensor | None = None
    ) -> list[Tensor]:
        """Return vectors of all ranks, of which each has such amounts; gradients come back if a leaf is given."""
        ranks = self._shards.ranks
        sizes = [Sizes([came[ranks.rank]] * ranks.count, came) for came in amounts[: len(parts)]]
        return exchange(ranks, ranks.group, call, sizes, [x.repeat(ranks.count) for x in parts], leaf, 1.0)

    def candidates(self, rows: Tensor, keys: Tensor | None) -> Candidates:
        """Return this rank's rows, given up to date; those of a table that grows by their keys."""
        ranks = self._shards.ranks
        if len(rows) == 0:
            return Candidates()
        if keys is not None:
            return of_keys(rows, keys)
        if isinstance(self._plan, RowWise):
            return of_blocks(rows, Blocks(self._rows), ranks.rank, ranks.count)
        return Candidates(len(rows), lambda begin, end: rows[begin:end], lambda ids: ids, lambda places: places)

    def _local(self, of: Samples, got: list[Tensor], ns: list[int], es: list[int]) -> Samples:
        """Return the samples of all ranks, and what their passes over this rank's rows are told."""
        ranks, device = self._shards.ranks, of.input.device
        input, targets = got[0].view(sum(ns), of.input.shape[1]), self._rows_of(got[1])
        ids = samples = bias = weight = live = None
        if len(got) > 2:
            ids, samples = _left_out(self._rows_of(got[2]), got[3], ns, es)
        if isinstance(self._plan, RowWise):
            blocks = Blocks(self._rows)
            absent = blocks.without_id(ranks.rank, ranks.count).to(device)
            if len(absent):  # nobody reads them else: an optimizer may have made them NaN
                live = torch.ones(self._weight.shape[0], dtype=torch.bool, device=device).index_fill_(0, absent, False)
            its = partial(blocks.ids_of, ranks.rank, ranks.count)
        else:
            its = partial(torch.arange, self._rows if self._plan.rank == ranks.rank else 0)
        if of.bias is not None or (of.weight is not None and of.label_smoothing):
            classes = its().clamp_max(self._rows - 1).to(device)
            bias = None if of.bias is None else of.bias.index_select(0, classes)
            weight = of.weight.index_select(0, classes) if of.weight is not None and of.label_smoothing else None
        padding = int(self._rows_of(torch.tensor([of.padding])))
        options = of.label_smoothing, of.normalize, of.block, padding, live
        return Samples(input, targets, bias, weight, ids, samples, *options)

    def _rows_of(self, ids: Tensor) -> Tensor:
        """Return the row that this rank has of each id; -1 of -1, and of ids that other ranks have."""
        ranks = self._shards.ranks
        if isinstance(self._plan, RowWise):
            return Blocks(self._rows).rows_of_ids(ids, ranks.rank, ranks.count)
        return ids if self._plan.rank == ranks.rank else torch.full_like(ids, -1)


def _left_out(rows: Tensor, samples: Tensor, ns: list[int], es: list[int]) -> tuple[Tensor, Tensor]:
    """Return which rows do not count for which samples of all ranks, by row, given the rows here, -1 of others."""
    firsts = torch.tensor([0, *accumulate(ns)][:-1]).repeat_interleave(torch.tensor(es)).to(rows.device)
    here = rows >= 0
    rows, order = rows[here].sort(stable=True)
    return rows, (samples + firsts)[here][order]


def _losses(of: Samples, classes: int, maximum: Tensor, total: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    """Return the loss of each sample from the sums of each rank, ``[W, N]``, and those of label smoothing."""
    counts, maximum = of.targets >= 0, maximum.double()
    most = maximum.amax(0)
    factors = (maximum - most).exp().where(maximum != -torch.inf, 0)  # of ranks that have no class of a sample
    lse = most + (total * factors).sum(0).where(counts, 1).log()
    losses = (1 - of.label_smoothing) * weights_of(of.targets, of.weight, torch.float64) * (lse - own.sum(0))
    if of.label_smoothing:
        row, bias, weight = shared.sum(0).tensor_split((-2, -1))
        mean = torch.mv(of.input.double(), row) + bias
        losses = losses + of.label_smoothing / classes * (weight.detach() * lse - mean)
    return losses.where(counts, 0).to(of.input.dtype)


class _RankPasses(Passes):
    """Passes over the rows that a rank keeps. The targets of samples whose row another rank has are -1."""

    def forward(self, rows_of: Callable[[int, int], Tensor]) -> Any:
        """Return maximum, sum and own score of each sample; and, with label smoothing, its sums in a vector."""
        maximum, total, own, shared = self.sums(rows_of)
        sums = total[:0] if shared is None else torch.cat([shared.row, shared.bias[None], shared.weight[None]])
        return maximum, total, own.double(), sums


def _factors(passes: Passes, maximum: Tensor, total: Tensor, own: Tensor, shared: Tensor) -> Factors:
    """Return the factors of the sums of a rank's rows, whose gradients are given."""
    dtype = passes.of.input.dtype
    factors = Factors(maximum, total.to(dtype), own.to(dtype))
    if len(shared) == 0:
        return factors
    return factors._replace(every_input=-shared[:-2].to(dtype), every_sum=-shared[-2])


class _Sums(torch.autograd.Function):
    """The sums over a rank's rows that losses are made of, of the samples of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, input: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any) -> Any:
        weight, ids, samples, *ctx.options, ctx.lookups, training = rest
        of = Samples(input.contiguous(), targets, bias, weight, ids, samples, *ctx.options)
        if ctx.lookups is None:
            sums = _RankPasses(of, rows.shape[0]).forward(lambda begin, end: rows[begin:end])
        else:
            *sums, ctx.before = ctx.lookups.losses(of, training, _RankPasses)
            # The context lives as long as the backward can come.
            ctx.number = ctx.lookups.expect(ctx.lookups.tables(), ref(ctx))
        maximum = sums[0]
        ctx.mark_non_differentiable(maximum)
        ctx.save_for_backward(*of[:6], maximum, rows if ctx.lookups is None else None)
        return tuple(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _maximum: Any, *grads: Tensor) -> Any:
        """Return the gradients of rows, input and bias; update a fused table."""
        *tensors, maximum, rows = ctx.saved_tensors
        of = Samples(*tensors, *ctx.options)
        total, own, shared = grads
        factors = partial(_factors, maximum=maximum, total=total, own=own, shared=shared)
        of_rows, of_input, of_bias = ctx.needs_input_grad[:3]
        if ctx.lookups is None:
            with as_stored():
                wanted = of_input, of_rows, of_bias
                made = backward_of(_RankPasses(of, rows.shape[0]), rows, factors, wanted)
            input_grad, rows_grad, bias_grad = (x if want else None for x, want in zip(made, wanted, strict=True))
        else:
            number, rows_grad = ctx.number if ctx.lookups.is_wanted() else None, None
            loss = Deferred(of, factors, _RankPasses)
            input_grad, bias_grad = ctx.lookups.finish_loss(number, ctx.before, loss, (of_input, of_bias))
        return rows_grad, input_grad, bias_grad, *(None,) * 11
