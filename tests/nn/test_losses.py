"""``nn.table_cross_entropy``: fused beside dense, tied and not, and beside torch's formula."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchsparse_rec import JaggedTensor, nn, optim

pytestmark = pytest.mark.usefixtures("kernels")

ROWS, DIM, SAMPLES = 301, 12, 24

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **more: optim.SGD(p, lr=0.5, **more),
    "momentum": lambda p, **more: optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01, **more),
    "Adagrad": lambda p, **more: optim.Adagrad(p, lr=0.1, **more),
    "RowWiseAdagrad": lambda p, **more: optim.RowWiseAdagrad(p, lr=0.1, **more),
    "Adam": lambda p, **more: optim.Adam(p, lr=0.01, **more),
    "Adam-decay": lambda p, **more: optim.Adam(p, lr=0.01, weight_decay=0.1, **more),
    "AdamW": lambda p, **more: optim.AdamW(p, lr=0.01, weight_decay=0.1, **more),
    "amsgrad": lambda p, **more: optim.Adam(p, lr=0.01, amsgrad=True, **more),
    "lazy": lambda p, **more: optim.Adam(p, lr=0.01, lazy=True, **more),
    "PartialRowWiseAdam": lambda p, **more: optim.PartialRowWiseAdam(p, lr=0.01, **more),
    "seen": lambda p, **more: optim.Adam(p, lr=0.01, weight_decay=0.1, decay="seen", **more),
    "RMSprop": lambda p, **more: optim.RMSprop(p, lr=0.01, momentum=0.5, **more),
    "Adadelta": lambda p, **more: optim.Adadelta(p, **more),
    "Adamax": lambda p, **more: optim.Adamax(p, **more),
    "Ftrl": lambda p, **more: optim.Ftrl(p, lr=0.1, l1=0.001, **more),
    "LAMB": lambda p, **more: optim.LAMB(p, lr=0.01, **more),
    "Lion": lambda p, **more: optim.Lion(p, lr=0.001, weight_decay=0.1, **more),
}
# What a step reads of the table: ids that are looked up before the loss, how many losses, ids that are after it.
PROGRAMS = ("untied", "tied", "lookups alone", "after the loss", "two losses", "bags")


class _Model(torch.nn.Module):
    def __init__(self, grad_mode: str | None, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        rows = torch.randn(ROWS, DIM, generator=generator).mul_(0.5)
        self.items = nn.Embedding.from_pretrained(rows.to(dtype), freeze=False, grad_mode=grad_mode, **options)
        self.lone = torch.nn.Parameter(torch.randn(SAMPLES, DIM, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(ROWS, generator=generator))

    def losses(self, program: str, step: int, ids: Tensor, target: Tensor, **options: Any) -> Tensor:
        own = self.lone if program == "untied" else self.lone + self.items(ids).mean(1).to(self.lone.dtype)
        if program == "lookups alone" and step % 3 == 2:
            return own.square().mean()
        loss = nn.table_cross_entropy(own, self.items, target, bias=self.bias, **options)
        if program == "after the loss":
            loss = loss + self.items(ids.flip(0)).square().mean()
        if program == "two losses":
            loss = loss + 0.5 * nn.table_cross_entropy(own[:5] * 2, self.items, target[:5].flip(0), block=37)
        return loss


def _batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randint(0, ROWS, shape, generator=generator)  # noqa: E731
    return [(draw(SAMPLES, 3), draw(SAMPLES)) for _ in range(steps)]


def _train(model: Any, optimizer: torch.optim.Optimizer, program: str, steps: int = 6, **options: Any) -> list[float]:
    losses = []
    for step, (ids, target) in enumerate(_batches(steps)):
        optimizer.zero_grad()
        loss = model.losses(program, step, ids, target, **options)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _assert_close(actual: Tensor, wanted: Tensor, most: float = 3e-6) -> None:
    assert (actual.detach() - wanted.detach()).abs().max() <= most * max(wanted.detach().abs().max(), 1)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p != "bags"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:.*updates all rows of a table:UserWarning")
def test_fused_is_dense(name: str, program: str) -> None:
    fused, dense = _Model("fused"), _Model("dense")
    losses = _train(fused, OPTIMIZERS[name](fused.parameters(), in_backward=True), program, block=64)
    wanted = _train(dense, OPTIMIZERS[name](dense.parameters()), program, block=64)
    _assert_close(torch.tensor(losses), torch.tensor(wanted))
    for own, reference in zip(fused.parameters(), dense.parameters(), strict=True):
        _assert_close(own, reference)
    assert fused.items.weight.grad is None
