"""Anchors of fused tables where a program treats them as any parameter: clipping, failures, copies, files."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from torchsparse_rec import nn as ours
from torchsparse_rec import optim
from torchsparse_rec.nn._anchor import gradient_of_anchor, new_anchor
from torchsparse_rec.optim._tables import is_anchor

ROWS, DIM = 10, 3


def pair(apply: str = "step") -> tuple[ours.Embedding, nn.Embedding]:
    """Our table and torch's, with the same weights."""
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    return (
        ours.Embedding(ROWS, DIM, grad_mode="fused", apply=apply, _weight=weight.clone()),
        nn.Embedding(ROWS, DIM, _weight=weight.clone()),
    )


def sgd(model: nn.Module, reference: nn.Module) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Both with an optimizer."""
    return [
        (model, optim.SGD(model.parameters(), lr=0.1)),
        (reference, torch.optim.SGD(reference.parameters(), lr=0.1)),
    ]


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    """Both have the same table, to rounding."""
    torch.testing.assert_close(model.weight, reference.weight)


def pickled(x):
    """As in another process."""
    return pickle.loads(pickle.dumps(x))


def saved(x):
    """As after a round trip through a file."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_threads_that_meet_at_a_new_anchor_give_it_one_hook() -> None:
    """A second one would drop the rows that wait, or count them twice."""
    anchors = [new_anchor([torch.zeros(1, 1)]) for _ in range(200)]
    start, found = threading.Barrier(4), []

    def look() -> None:
        start.wait()
        found.append([gradient_of_anchor(anchor) for anchor in anchors])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 4 and all(gradients == found[0] for gradients in found)


# ---- Clipping --------------------------------------------------------------------------------------------------------


def with_gradient(module: nn.Module) -> list[Tensor]:
    """What many training loops clip."""
    return [parameter for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("both", [False, True])
def test_an_anchor_in_the_list_stands_for_its_tables(both: bool) -> None:
    model, reference = pair()
    for step in range(2):
        norms = []
        for (side, optimizer), tools in zip(sgd(model, reference), (optim, nn.utils), strict=True):
            (4 * side(torch.tensor([1, 1, 2]))).sum().backward()
            chosen = with_gradient(side)
            if both and side is model:
                chosen = list(side.parameters())  # counted once all the same
            if step:
                tools.clip_grad_value_(chosen, 5.0)
            else:
                norms.append(tools.clip_grad_norm_(chosen, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        if norms:
            torch.testing.assert_close(norms[0], norms[1])
    assert_same(model, reference)


def two_modules() -> tuple[list[nn.Module], list[nn.Module], list[tuple[list[nn.Module], torch.optim.Optimizer]]]:
    """Two modules that share a table, and torch's, with optimizers."""
    model, reference = pair()
    other, shared = pair()
    other.weight, shared.weight = model._parameters["weight"], reference.weight
    mine = optim.SGD([*model.parameters(), other.fused_anchor], lr=0.1)
    sides = [([model, other], mine), ([reference, shared], torch.optim.SGD(reference.parameters(), lr=0.1))]
    return [model, other], [reference, shared], sides


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_norm_of_a_shared_table_is_that_of_the_sum(norm_type: float) -> None:
    mine, theirs, sides = two_modules()
    for step in range(2):
        norms = []
        for (modules, optimizer), tools in zip(sides, (optim, nn.utils), strict=True):
            optimizer.zero_grad()
            loss = (3 * modules[0](torch.tensor([1, 2]))).sum() + (4 * modules[1](torch.tensor([2, 5]))).sum()
            (loss - modules[0](torch.tensor([1]))[0, 0] / 2).backward()
            parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
            if step:
                tools.clip_grad_value_(parameters, 5.0)
            norms.append(tools.clip_grad_norm_(parameters, 2.0, norm_type))
            optimizer.step()
        torch.testing.assert_close(norms[0], norms[1])
    assert_same(mine[0], theirs[0])


def test_what_is_multiplied_after_a_clip_of_a_shared_table_multiplies_the_sum() -> None:
    mine, theirs, sides = two_modules()
    for (modules, optimizer), tools in zip(sides, (optim, nn.utils), strict=True):
        for _ in range(2):
            (modules[0](torch.tensor([1, 2])).sum() + modules[1](torch.tensor([2, 5])).sum()).backward()
            tools.clip_grad_value_([p for module in modules for p in module.parameters()], 1.5)
        for parameter in {id(p): p for module in modules for p in module.parameters()}.values():
            if parameter.grad is not None:
                parameter.grad *= 0.5
        optimizer.step()
    assert_same(mine[0], theirs[0])


# ---- Backwards that raise --------------------------------------------------------------------------------------------


class Raising(torch.autograd.Function):
    """A node whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("on purpose")


def raising_backward(module: nn.Module) -> None:
    """A backward that ends between those of two lookups."""
    late = module(torch.tensor([1, 2]))
    between = Raising.apply(torch.ones(1, requires_grad=True))
    early = module(torch.tensor([4, 5]))
    with pytest.raises(RuntimeError, match="on purpose"):
        (late.sum() + between.sum() + early.sum()).backward()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("then", ["model.zero_grad", "optimizer.zero_grad", "none", "step"])
def test_rows_of_a_backward_that_raised_do_not_count(then: str, before: bool) -> None:
    model, reference = pair()
    for side, optimizer in sgd(model, reference):
        if before:
            side(torch.tensor([2, 3])).sum().backward()
            nn.utils.clip_grad_norm_(side.parameters(), 1.0)
        raising_backward(side)
        if then == "model.zero_grad":
            side.zero_grad()
        elif then == "optimizer.zero_grad":
            optimizer.zero_grad()
        elif then == "step":
            optimizer.step()
        side(torch.tensor([3])).sum().backward()
        nn.utils.clip_grad_norm_(side.parameters(), 1.0)
        optimizer.step()
    assert_same(model, reference)


def test_after_a_backward_that_raised_zero_grad_of_the_optimizer_lets_go() -> None:
    model, reference = pair("backward")
    for side, optimizer in sgd(model, reference):
        raising_backward(side)
        optimizer.zero_grad()
        side(torch.tensor([3])).sum().backward()
        optimizer.step()
    assert_same(model, reference)


def test_a_backward_within_a_backward() -> None:
    """Lookups of a reentrant checkpoint, whose backward comes between those of two others."""
    model, reference = pair()
    for side, optimizer in sgd(model, reference):
        late = side(torch.tensor([1, 2]))
        within = torch.utils.checkpoint.checkpoint(
            lambda x, its=side: (its(torch.tensor([2, 3])) * x).sum(),
            torch.ones(1, requires_grad=True),
            use_reentrant=True,
        )
        early = side(torch.tensor([3, 5]))
        (late.sum() + within + early.sum()).backward()
        optimizer.step()
    assert_same(model, reference)


# ---- Copies and files ------------------------------------------------------------------------------------------------


def trained() -> tuple[ours.Embedding, optim.SGD]:
    """After a step, with a gradient that waits."""
    model, _ = pair()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.step()
        model(torch.tensor([1, 2])).sum().backward()
    return model, optimizer


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled, saved])
def test_copies_of_an_anchor_are_anchors_that_stand_for_nothing(copied) -> None:
    model, _ = trained()
    norm = model.fused_anchor.grad.clone()
    anchor = copied(model.fused_anchor)
    assert isinstance(anchor, nn.Parameter) and is_anchor(anchor)
    assert anchor.dtype == torch.float32 and anchor.requires_grad and anchor.grad is None
    optim.clip_grad_value_([anchor], 0.25)
    assert torch.equal(model.fused_anchor.grad, norm)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copied_optimizer_saves_no_anchors(copied) -> None:
    _, optimizer = trained()
    state = copied(optimizer).state_dict()
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(state)


def test_a_copy_of_what_comes_from_a_file_saves_no_anchors() -> None:
    model, optimizer = pickled(trained())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer).state_dict()
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]


def test_the_state_of_adagrad_is_shared_without_anchors() -> None:
    model, _ = pair()
    optimizer = optim.Adagrad(model.parameters(), lr=0.1)
    optimizer.share_memory()
    assert optimizer.state[model._parameters["weight"]]["sum"].is_shared()
    assert model.fused_anchor not in optimizer.state
