"""The fused gradient mode where backward cannot do what a program expects: an error says so, and what to do instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from nn.cases import DIM, ROWS, assert_same, beside, draw, loss_of, pair, stored
from torch import Tensor, nn

from torchsparse_rec import nn as ours
from torchsparse_rec import optim

BATCH = draw(torch.Generator().manual_seed(1))
WRITTEN = "has already updated a table in grad_mode='fused' for this step: choose grad_mode='sparse'"
SECOND = "a second backward\\(\\) reached a table before its optimizer's step\\(\\)"


def fused(lr: float = 0.1) -> tuple[nn.Module, nn.Module, optim.SGD]:
    """Make our model and torch's, and an optimizer of ours that updates in backward."""
    model, reference = pair()
    return model, reference, optim.SGD(model.parameters(), lr=lr, in_backward=True)


WITHOUT_THE_TABLE = {
    "none": lambda model: None,
    "of torch": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "of the dense layer": lambda model: optim.SGD(model.head.parameters(), lr=0.1, in_backward=True),
}


@pytest.mark.parametrize("which", WITHOUT_THE_TABLE)
def test_an_optimizer_of_ours_is_needed(which: str) -> None:
    model, _ = pair()
    kept = WITHOUT_THE_TABLE[which](model)
    with pytest.raises(RuntimeError, match="made with in_backward=True, .* got none: .* choose grad_mode='sparse'"):
        model(BATCH[0])
    del kept


def test_an_optimizer_that_updates_in_step_is_refused() -> None:
    model, _ = pair()
    kept = optim.Adam(model.parameters())
    with pytest.raises(RuntimeError, match="made with in_backward=True, .* got Adam without it"):
        model(BATCH[0])
    assert not kept.in_backward


@pytest.mark.parametrize("moment", ["before", "between"])
def test_an_optimizer_that_is_gone(moment: str) -> None:
    model, _, optimizer = fused()
    before = stored(model).detach().clone()
    loss = loss_of(model, BATCH)
    del optimizer
    with pytest.raises(RuntimeError, match="made with in_backward=True, .* got none"):
        model(BATCH[0]) if moment == "before" else loss.backward()
    assert torch.equal(stored(model), before)


@pytest.mark.parametrize("kept", [False, True])
def test_a_second_backward_before_the_step(kept: bool) -> None:
    model, _, optimizer = fused()
    loss = loss_of(model, BATCH)
    loss.backward(retain_graph=kept)
    with pytest.raises(RuntimeError, match=SECOND):
        (loss if kept else loss_of(model, BATCH)).backward()
    optimizer.step()
    loss_of(model, BATCH).backward()


def test_a_second_backward_of_a_table_that_was_stepped_with_others() -> None:
    """Run the second backward by another lookup, of that table alone."""
    configs = [ours.EmbeddingBagConfig(num_embeddings=9, embedding_dim=2, name=n, feature_names=[n]) for n in "ab"]
    bags = ours.EmbeddingBagCollection(configs, grad_mode="fused")
    alone = ours.EmbeddingBag(9, 2, grad_mode="fused")
    alone.weight = bags.embedding_bags["a"]._parameters["weight"]
    optimizer = optim.Adam(bags.parameters(), in_backward=True)
    bags({"a": torch.tensor([1]), "b": torch.tensor([2])}).values().sum().backward()
    with pytest.raises(RuntimeError, match=SECOND):
        alone(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    alone(torch.tensor([[1]])).sum().backward()


def test_a_second_backward_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, optimizer = fused()
    begin = optim.SGD._begin

    def begin_slowly(*arguments):  # lets both threads come here at once, unless a lock keeps one out
        time.sleep(0.1)
        return begin(*arguments)

    monkeypatch.setattr(optim.SGD, "_begin", begin_slowly)

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(lambda: loss_of(model, BATCH).backward()) for _ in range(2)]
        errors = [str(error) for call in calls if (error := call.exception()) is not None]
    assert len(errors) == 1 and "a second backward()" in errors[0]
    optimizer.step()


def test_a_backward_within_a_backward() -> None:
    """Run a reentrant checkpoint, whose own backward runs between those of two other lookups."""
    model, _, _optimizer = fused()
    late = model(BATCH[0])
    within = torch.utils.checkpoint.checkpoint(
        lambda x: (model(BATCH[0]) * x).sum(), torch.ones(1, requires_grad=True), use_reentrant=True
    )
    early = model(BATCH[0])
    with pytest.raises(RuntimeError, match=SECOND):
        (late.sum() + within + early.sum()).backward()


class Raising(torch.autograd.Function):
    """A node whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("then", ["zero_grad", "step"])
def test_rows_of_a_backward_that_raised_do_not_count(then: str) -> None:
    """Raise between the backwards of two lookups, the first of which is the last one made."""
    model, reference, optimizer = fused()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    late = model.table(BATCH[0])
    between = Raising.apply(torch.ones(1, requires_grad=True))
    early = model.table(BATCH[0])
    with pytest.raises(RuntimeError, match="on purpose"):
        (late.sum() + between.sum() + early.sum()).backward()
    del late, early
    with pytest.raises(RuntimeError, match=SECOND):
        (model.table(BATCH[0]).sum() + model.table(BATCH[0]).sum()).backward()
    getattr(optimizer, then)()
    for side, its in ((model, optimizer), (reference, theirs)):
        loss_of(side, BATCH).backward()
        its.step()
    assert_same(model, reference)


def tied(model: nn.Module) -> Tensor:
    """Return a loss in which the table is the weight of a dense layer."""
    return nn.functional.linear(model.table(BATCH[0]), model.table.weight).sum()


def penalised(model: nn.Module) -> Tensor:
    """Return a loss with an L2 term."""
    return loss_of(model, BATCH) + model.table.weight.square().sum()


@pytest.mark.parametrize("loss", [tied, penalised])
def test_a_gradient_of_something_else_than_lookups(loss: Callable[[nn.Module], Tensor]) -> None:
    model, _, optimizer = fused()
    loss(model).backward()
    with pytest.raises(
        RuntimeError, match="SGD: a table has a .grad from something other than its lookups.*" + WRITTEN
    ):
        optimizer.step()
    with pytest.raises(RuntimeError, match="the table has a .grad.* set .grad to None, or choose grad_mode='sparse'"):
        model(BATCH[0])


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook(register: str) -> None:
    model, _, _optimizer = fused()
    handle = getattr(stored(model), register)(lambda _: None)
    with pytest.raises(RuntimeError, match="has a hook on its gradient, which would never run"):
        model(BATCH[0])
    handle.remove()
    model(BATCH[0])


def test_hooks_of_the_sparse_mode_are_ours() -> None:
    model, _, _optimizer = fused()
    model.table.grad_mode = "sparse"
    model(BATCH[0])
    model.table.grad_mode = "fused"
    model(BATCH[0])


@pytest.mark.parametrize("name", ["lr", "momentum", "maximize"])
def test_a_hyperparameter_that_changes_before_the_step(name: str) -> None:
    model, _, optimizer = fused()
    loss_of(model, BATCH).backward()
    optimizer.param_groups[0][name] = 0.5
    with pytest.raises(RuntimeError, match="SGD: a hyperparameter has changed before step.*" + WRITTEN):
        optimizer.step()


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping(name: str) -> None:
    model, _, optimizer = fused()
    loss_of(model, BATCH).backward()
    with pytest.raises(RuntimeError, match="gradients are to be clipped.*" + WRITTEN):
        getattr(optim, name)(model.parameters(), 1.0)
    optimizer.step()
    getattr(optim, name)(model.parameters(), 1.0)  # the dense layer's gradients are there


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler(unscale: bool) -> None:
    model, _, optimizer = fused()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, BATCH)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="divides gradients by its scale.*" + WRITTEN):
        scaler.step(optimizer)


def test_a_grad_scaler_of_an_optimizer_without_fused_tables() -> None:
    model, reference = pair("sparse")
    for side, its in beside(model, reference, "SGD", lr=0.1):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(side, BATCH)).backward()
        scaler.step(its)
    assert_same(model, reference)


def test_a_model_in_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _optimizer = fused()
    # DistributedDataParallel sets this within its forward.
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    with pytest.raises(RuntimeError, match="is in a DistributedDataParallel.* choose grad_mode='sparse'"):
        model(BATCH[0])


def test_nothing_of_it_is_a_parameter() -> None:
    table = ours.Embedding(ROWS, DIM, grad_mode="fused")
    assert [name for name, _ in table.named_parameters()] == list(table.state_dict()) == ["weight"]
    assert not list(table.named_buffers())
    optimizer = optim.SGD(table.parameters(), lr=0.1, in_backward=True)
    table(torch.tensor([1])).sum().backward()
    assert optimizer.param_groups[0]["params"] == [table._parameters["weight"]]
    assert "in_backward" not in optimizer.state_dict()["param_groups"][0]
