"""The fused gradient mode in programs that do something unusual between a lookup and its backward."""

from __future__ import annotations

import copy
from functools import partial

import kinds
import pytest
import torch
from nn.cases import DIM, ROWS, assert_same, beside, draw, loss_of, pair, stored, train_beside
from torch import Tensor, nn

from torchsparse_rec import KeyedJaggedTensor, optim
from torchsparse_rec import nn as ours
from torchsparse_rec.tables.table import table_of

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("looked_up", [False, True])
def test_a_table_that_is_frozen_with_its_module_and_thawed_alone(looked_up: bool) -> None:
    model, reference = pair()
    sides = beside(model, reference, lr=0.1)
    for side, _ in sides:
        side.requires_grad_(False)
        if looked_up:
            side(torch.tensor([[1, 2]]))
        side.table.weight.requires_grad_(True)
    train_beside(sides)
    assert_same(model, reference)


def test_a_table_that_is_replaced_by_another_parameter() -> None:
    model, _ = pair(mode="sum")
    optimizer, ids = optim.SGD(model.parameters(), lr=1.0, in_backward=True), torch.tensor([[2, 5]])
    model.table(ids).sum().backward()
    optimizer.step()
    old = stored(model).detach().clone()
    model.table.weight = new = nn.Parameter(torch.full((ROWS, DIM), 3.0))
    optimizer = optim.SGD([new, *[x for x in model.parameters() if x is not new]], lr=1.0, in_backward=True)
    output = model.table(ids)
    assert output.tolist() == [[6.0] * DIM]
    output.sum().backward()
    optimizer.step()
    assert stored(model) is new and not torch.equal(new[:1], old[:1])
    assert new[[2, 5]].eq(2.0).all() and new[[0, 1, 3, 4]].eq(3.0).all()


@pytest.mark.parametrize("wrap", ["hooks", "checkpoint"])
def test_two_lookups_whose_saved_tensors_are_replaced(wrap: str) -> None:
    model, reference = pair()

    def loss(side: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, labels = batch
        if wrap == "checkpoint":
            scores = [torch.utils.checkpoint.checkpoint(side, part, use_reentrant=False) for part in (ids, ids.flip(0))]
        else:
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                scores = [side(ids), side(ids.flip(0))]
        return ((scores[0] * scores[1] - labels) ** 2).mean()

    train_beside(beside(model, reference, lr=0.1), loss)
    assert_same(model, reference, rtol=1e-4)


def test_outputs_that_are_dropped_or_kept_do_not_delay_updates() -> None:
    model, reference = pair()
    sides, batch = beside(model, reference, "SGD", lr=0.1), draw(torch.Generator().manual_seed(2))
    for _ in range(2):
        dropped, kept = model(batch[0]), model(batch[0])
        del dropped
        train_beside(sides)
        assert kept.grad_fn is not None
    size = stored(model).abs().sum()
    for side, optimizer in sides:
        optimizer.zero_grad()
        loss_of(side, batch).backward()
    assert stored(model).abs().sum() != size  # updated in the backward, though one of the kept result may follow
    for _, optimizer in sides:
        optimizer.step()
    assert_same(model, reference)


def test_dropped_outputs_leave_nothing_behind() -> None:
    model, reference = pair()
    sides = beside(model, reference, "SGD", lr=0.1)
    for _ in range(5):
        model(torch.tensor([[1, 2]]))
    train_beside(sides)
    assert not table_of(stored(model)).awaited


def test_two_modules_that_share_a_table() -> None:
    model, reference = pair()
    others = {}
    for side, make in ((model, partial(ours.EmbeddingBag, grad_mode="fused")), (reference, nn.EmbeddingBag)):
        others[side] = make(ROWS, DIM, mode="sum")
        others[side].weight = side.table._parameters["weight"]
    train_beside(
        beside(model, reference),
        lambda side, batch: loss_of(side, batch) + others[side](batch[0]).square().mean(),
    )
    assert_same(model, reference)


def test_a_table_frozen_between_lookup_and_backward() -> None:
    model, _ = pair()
    optimizer = optim.SGD(model.parameters(), lr=0.1, in_backward=True)
    loss = loss_of(model, draw(torch.Generator().manual_seed(1)))
    model.table.weight.requires_grad_(False)
    before = model.table.weight.detach().clone()
    loss.backward()
    optimizer.step()
    assert torch.equal(model.table.weight, before)


def test_a_module_that_is_gone_before_the_backward() -> None:
    model, reference = pair()
    weight, theirs = stored(model), reference.table.weight
    optimizer = optim.SGD([weight], lr=0.1, in_backward=True)
    batch = draw(torch.Generator().manual_seed(1))
    loss, expected = loss_of(model, batch), loss_of(reference, batch)
    del model
    loss.backward()
    optimizer.step()
    expected.backward()
    torch.testing.assert_close(weight.detach(), theirs.detach() - 0.1 * theirs.grad)


@pytest.mark.parametrize("leaves", [False, True])
def test_zeros_in_the_place_of_gradients_outlive_the_optimizer(leaves: bool) -> None:
    """A gradient of zeros is the parameter's: momentum moves the table in the steps of whoever holds it."""
    model, reference = pair()
    batch = draw(torch.Generator().manual_seed(1))
    for side, of_torch in ((model, False), (reference, True)):
        make = partial(torch.optim.SGD if of_torch else optim.SGD, lr=0.1, momentum=0.9)
        options = {} if of_torch else {"in_backward": True}
        weight = side.table.weight if of_torch else stored(side)
        optimizer = make(side.parameters(), **options)
        if leaves:  # its backward then steps nothing, but would leave a gradient
            optimizer.param_groups[0]["params"] = [p for p in side.parameters() if p is not weight]
        loss_of(side, batch).backward()
        optimizer.step()
        if leaves:
            optimizer.add_param_group({"params": [weight]})
        optimizer.zero_grad(set_to_none=False)
        state, optimizer = optimizer.state_dict(), make(side.parameters(), weight_decay=0.5, **options)
        if not leaves:
            state["param_groups"][0]["weight_decay"] = 0.5
            optimizer.load_state_dict(state)
        weight.requires_grad_(False)
        loss_of(side, batch).backward()
        optimizer.step()
    assert_same(model, reference)


def test_a_model_without_optimizer_can_be_read() -> None:
    model, reference = pair()
    ids = draw(torch.Generator().manual_seed(1))[0]
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            torch.testing.assert_close(model.eval()(ids), reference(ids))
    with torch.no_grad():
        torch.testing.assert_close(model.train()(ids), reference(ids))


@pytest.mark.parametrize("grad_mode", ["sparse", "dense", "fused"])
def test_a_table_of_a_collection_that_is_replaced(grad_mode: str) -> None:
    bags, larger = (kinds.table_of("collection", grad_mode, rows, DIM) for rows in (10, ROWS))
    larger.eval()
    bags.embedding_bags["t"] = copy.deepcopy(larger.embedding_bags["t"])
    optimizer = optim.SGD(bags.parameters(), lr=0.5, in_backward=True)
    ids = KeyedJaggedTensor(["f"], torch.tensor([25, 3, 25]), lengths=torch.tensor([2, 1]))
    before = bags.embedding_bags["t"].weight.detach().clone()
    assert torch.equal(bags(ids).values(), larger(ids).values())
    bags(ids).values().sum().backward()
    optimizer.step()
    moved = (bags.embedding_bags["t"].weight.detach() - before)[:, 0]
    assert moved.nonzero().flatten().tolist() == [3, 25]
    torch.testing.assert_close(moved[[3, 25]], torch.tensor([-0.5, -1.0]))


def test_a_table_of_another_width_is_refused() -> None:
    bags, wider = (kinds.table_of("collection", None, 10, dim) for dim in (DIM, DIM + 1))
    bags.embedding_bags["t"] = wider.embedding_bags["t"]
    with pytest.raises(RuntimeError, match=f"embedding_dims of their configs, {DIM} together, got {DIM + 1}"):
        bags({"f": torch.tensor([1])})
