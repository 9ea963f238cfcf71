"""What two ranks do with parts of a table, each beside one process that has it whole. Each case runs on both ranks."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from torchsparse_rec import nn, optim
from torchsparse_rec.distributed.ddp import check_not_in_ddp, leave_out_of_ddp
from torchsparse_rec.distributed.losses import global_mean
from torchsparse_rec.tables.part import Part
from torchsparse_rec.tables.stale import StaleParameter, set_part

ROWS, DIM = 8, 3
LAYOUTS = ("strided", "coo", "none on rank 1")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def part_of(whole: Tensor, rank: int, group=None) -> Parameter:
    """Return the rows of a table that a rank has: every second one."""
    parameter = Parameter(whole.detach()[rank::2].clone())
    set_part(parameter, Part(group, False, "t"))
    return parameter


def give(parameter: Parameter, grad: Tensor, layout: str) -> None:
    """Set a gradient; a COO one has every row twice."""
    if layout != "coo":
        parameter.grad = None if layout.startswith("none") and not grad.any() else grad.clone()
        return
    rows, values = torch.arange(len(grad)).repeat(2), torch.cat([grad * 0.25, grad * 0.75])
    parameter.grad = torch.sparse_coo_tensor(rows[None], values, grad.shape, check_invariants=True)


def dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def close(actual: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(actual.detach(), want.detach(), rtol=1e-5, atol=1e-6)


def check_equal_on_ranks(x: Tensor) -> None:
    both = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(both, x.detach().contiguous())
    assert torch.equal(*both), both


@contextmanager
def raising(pattern: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        assert re.search(pattern, str(error)), error
    else:
        raise AssertionError(f"nothing raised {pattern!r}")


# ---- Clipping --------------------------------------------------------------------------------------------------------


def pair(rank: int, layout: str, groups=(None, None)) -> tuple[list[Parameter], list[Parameter]]:
    """Make a rank's parameters: parts of two tables, a replicated one and a dense one; and one process's."""
    mine, whole = [], []
    for k in range(4):
        values, grad = drawn(k, ROWS, DIM), drawn(10 + k, ROWS, DIM)
        if k < 2 and layout.startswith("none"):
            grad[1::2] = 0
        whole.append(Parameter(values.clone()))
        whole[k].grad = grad.clone()
        mine.append(part_of(values, rank, groups[k]) if k < 2 else Parameter(values.clone()))
        give(mine[k], grad[rank::2] if k < 2 else grad, layout)
    set_part(mine[2], Part(None, True, "replicated"))
    return mine, whole


def check_gradients(mine: list[Parameter], whole: list[Parameter], rank: int) -> None:
    for k, (one, other) in enumerate(zip(mine, whole, strict=True)):
        want = other.grad[rank::2] if k < 2 else other.grad
        close(torch.zeros_like(one) if one.grad is None else dense(one.grad), want)


def clip_norms(rank: int) -> None:
    another = dist.new_group([0, 1])
    for layout in LAYOUTS:
        for norm_type in (1.0, 2.0, 3.0, math.inf):
            for max_norm in (0.5, 1e4):
                mine, whole = pair(rank, layout, (None, another))
                got = optim.clip_grad_norm_(iter(mine), max_norm, norm_type)
                close(got, torch.nn.utils.clip_grad_norm_(whole, max_norm, norm_type))
                check_equal_on_ranks(got)
                check_gradients(mine, whole, rank)
    dist.destroy_process_group(another)


def clip_dtypes(rank: int) -> None:
    for dtype, want in ((torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        parameter = part_of(torch.zeros(ROWS, DIM, dtype=dtype), rank)
        parameter.grad = torch.ones_like(parameter, memory_format=torch.preserve_format)
        got = optim.clip_grad_norm_(parameter, 1.0)
        assert got.dtype == want and abs(got.item() - math.sqrt(ROWS * DIM)) < 1e-2


def clip_a_norm_that_is_not_finite(rank: int) -> None:
    for bad in (math.inf, math.nan):
        mine, _ = pair(rank, "strided")
        if rank == 0:
            mine[1].grad[0, 0] = bad
        before = [parameter.grad.clone() for parameter in mine]
        with raising("order 2.0 for gradients from `parameters` is non-finite"):
            optim.clip_grad_norm_(mine, 0.5, error_if_nonfinite=True)
        for parameter, grad in zip(mine, before, strict=True):
            torch.testing.assert_close(dense(parameter.grad), grad, rtol=0, atol=0, equal_nan=True)
        assert not optim.clip_grad_norm_(mine, 0.5).isfinite()


def clip_where_one_rank_has_stepped(rank: int) -> None:
    table = nn.Embedding(ROWS, DIM, grad_mode="fused")
    set_part(table.weight, Part(None, False, "t"))
    optimizer = optim.SGD(table.parameters(), lr=0.1, in_backward=True)
    if rank == 0:
        table(torch.tensor([1])).sum().backward()
    with raising("clip_grad_norm_: gradients are to be clipped.*backward.. has already updated a table"):
        optim.clip_grad_norm_(table.parameters(), 1.0)
    optimizer.step()
    assert optim.clip_grad_norm_(table.parameters(), 1.0) == 0


def clip_values(rank: int) -> None:
    for layout in LAYOUTS:
        for clip in (optim.clip_grad_value_, torch.nn.utils.clip_grad_value_):
            if layout == "coo" and clip is not optim.clip_grad_value_:
                continue
            mine, whole = pair(rank, layout)
            clip(mine, 0.3)
            torch.nn.utils.clip_grad_value_(whole, 0.3)
            check_gradients(mine, whole, rank)


# ---- Scaling ---------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "Adam": ("strided", optim.Adam, {}),
    "Adam of rows": ("coo", optim.Adam, {}),
    "Adam, fused": ("strided", optim.Adam, {"fused": True}),
    "SGD": ("coo", optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RowWiseAdagrad": ("coo", optim.RowWiseAdagrad, {}),
    "torch's SGD": ("strided", torch.optim.SGD, {"lr": 0.1}),
    "torch's Adagrad": ("coo", torch.optim.Adagrad, {}),
    "torch's SparseAdam": ("coo", torch.optim.SparseAdam, {}),
    "torch's Adam, foreach": ("strided", torch.optim.Adam, {"foreach": True}),
}


def scale(rank: int) -> None:
    for layout, make, options in OPTIMIZERS.values():
        for explicit in (False, True):
            _scale(rank, layout, make, options, explicit)


def _scale(rank: int, layout: str, make, options: dict, explicit: bool) -> None:
    whole = Parameter(drawn(0, ROWS, DIM))
    mine = part_of(whole, rank)
    sides = []
    for parameter, scaler_of in ((mine, ShardedGradScaler), (whole, torch.amp.GradScaler)):
        scaler = scaler_of("cpu", init_scale=2.0**10, growth_interval=2)
        sides.append((parameter, make([parameter], **options), scaler))
    for step in range(5):
        grad = drawn(step, ROWS, DIM)
        if step == 2:
            grad[1, 0] = math.inf  # of a row of rank 1
        for parameter, optimizer, scaler in sides:
            before = parameter.detach().clone()
            # One process has the layout too: what a row of zeros does depends on it.
            part = grad if parameter is whole else grad[rank::2]
            give(parameter, part * scaler.scale(torch.ones(())).item(), layout)
            if explicit:
                scaler.unscale_(optimizer)
                optim.clip_grad_norm_([parameter], 1.0)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(parameter, before) == (step == 2)
        check_equal_on_ranks(torch.tensor(sides[0][2].get_scale()))
        assert sides[0][2].get_scale() == sides[1][2].get_scale()
    close(mine, whole[rank::2])


def scale_by_a_fused_step_that_asks_no_other_rank(rank: int) -> None:
    parameter = part_of(drawn(0, ROWS, DIM), rank)
    optimizer, scaler = torch.optim.Adam([parameter], fused=True), ShardedGradScaler("cpu")
    parameter.grad = scaler.scale(torch.ones(ROWS // 2, DIM))
    with raising("table 't'.*asks no other rank for infinities.*fused=True: make it without"):
        scaler.step(optimizer)


# ---- Accumulation ----------------------------------------------------------------------------------------------------


def accumulate(rank: int) -> None:
    for mode in ("dense", "sparse"):
        for make in (optim.Adam, optim.Adagrad, optim.LAMB):
            whole = nn.Embedding(ROWS, DIM, grad_mode=mode)
            whole.weight.data.copy_(drawn(0, ROWS, DIM))
            mine = nn.Embedding(ROWS // 2, DIM, grad_mode=mode)
            mine.weight.data.copy_(whole.weight.data[rank::2])
            weight = mine._parameters["weight"]
            set_part(weight, Part(None, False, "t"))
            sides = [(table, make(table.parameters(), lr=0.1)) for table in (mine, whole)]
            for step in range(4):
                ids = torch.randint(0, ROWS, (2, 6), generator=torch.Generator().manual_seed(step))
                if step == 2:
                    ids = ids // 2 * 2  # none of rank 1
                for table, optimizer in sides:
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                    for each in ids:
                        each = each if table is whole else each[each % 2 == rank] // 2
                        table(each).square().sum().backward()
                        assert table is whole or type(table._parameters["weight"]) is StaleParameter
                    norm = optim.clip_grad_norm_(table.parameters(), 2.0)
                    assert norm > 2
                    optimizer.step()
            close(mine.state_dict()["weight"], whole.state_dict()["weight"][rank::2])


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------


class Child(torch.nn.Module):
    """A table, which checks as sharded modules do."""

    def __init__(self, rank: int, mode: str) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, grad_mode=mode)
        self.table.weight.data.fill_(rank + 1.0)
        set_part(self.table._parameters["weight"], Part(None, False, "t"))

    def forward(self, ids: Tensor) -> Tensor:
        check_not_in_ddp(self.table.parameters())
        return self.table(ids)


class Parent(torch.nn.Module):
    """A child, a dense layer, a part of its own, and a table that no part is of."""

    def __init__(self, rank: int, mode: str) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.child, self.head = torch.nn.ModuleList([Child(rank, mode)]), torch.nn.Linear(DIM, 1)
        self.again = self.child[0].table  # under another name
        self.own = part_of(torch.full((ROWS, DIM), rank + 1.0), rank)

    def forward(self, ids: Tensor) -> Tensor:
        check_not_in_ddp([self.own])
        return self.head(self.child[0](ids) + self.own[0])


def ddp_that_holds_parts(rank: int) -> None:
    ids = torch.tensor([1, 2])
    for left_out in ("", "own"):
        model = Parent(rank, "dense")
        if left_out:
            model._ddp_params_and_buffers_to_ignore = ["own", ".own"]
        wrapped = DistributedDataParallel(model)
        assert (model.child[0].table.weight == 1).all()  # rank 0's, on both
        with raising("table 't' is shared.*leave_out_of_ddp.parent."):
            wrapped(ids)
        assert model(ids).shape == (2, 1)  # on its own


def ddp_that_leaves_parts_out(rank: int) -> None:
    ids = torch.tensor([1, 2 + rank])
    for mode in ("dense", "sparse", "fused"):
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            model = Parent(rank, mode)
            model._ddp_params_and_buffers_to_ignore = {"something"}
            leave_out_of_ddp(model)
            assert "something" in model._ddp_params_and_buffers_to_ignore
            wrapped = DistributedDataParallel(model, **options)
            optimizer = optim.SGD(model.parameters(), lr=0.1, in_backward=mode == "fused")
            table = model.child[0].table
            assert (table.weight == rank + 1).all() and (model.own == rank + 1).all()
            for _ in range(2):
                wrapped(ids).sum().backward()
                check_equal_on_ranks(model.head.weight.grad)
                assert model.own.grad[0].any()
                optimizer.step()
                optimizer.zero_grad()
            check_equal_on_ranks(model.head.weight)
            changed = (table.weight != rank + 1).any(1).nonzero()[:, 0]
            assert changed.tolist() == ids.tolist()


# ---- Losses ----------------------------------------------------------------------------------------------------------


def mean_of_all_losses(rank: int) -> None:
    weight = drawn(0, DIM).requires_grad_()
    for sizes in ((5, 2), (5, 0), (0, 1), (4, 4), (0, 0)):
        examples = drawn(1, sum(sizes), DIM)
        here = examples.split(sizes)[rank]
        for dtype in (torch.float32, torch.float64):
            losses = (here @ weight).square().to(dtype)
            loss = global_mean(losses)
            assert loss.shape == () and loss.dtype == dtype
            (grad,) = torch.autograd.grad(loss, weight)
            both = torch.stack([grad, loss.detach().float().expand(DIM)])
            dist.all_reduce(both)
            if sum(sizes) == 0:
                assert not both.any()
                continue
            want = (examples @ weight).square().mean()
            close(both[0] / 2, torch.autograd.grad(want, weight)[0])
            close(both[1, 0] / 2, want)
            if sizes == (4, 4):
                assert torch.equal(loss, losses.mean())
    one = dist.new_subgroups(1)[0]
    assert global_mean(torch.ones(rank + 1) * 3, one) == 3


CASES = {
    case.__name__: case
    for case in (
        *(clip_norms, clip_dtypes, clip_a_norm_that_is_not_finite, clip_where_one_rank_has_stepped, clip_values),
        *(scale, scale_by_a_fused_step_that_asks_no_other_rank, accumulate),
        *(ddp_that_holds_parts, ddp_that_leaves_parts_out, mean_of_all_losses),
    )
}


def run_case(name: str) -> None:
    """Run a case on this rank. Optimizers warn of parameters that no module looks up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        CASES[name](dist.get_rank())
