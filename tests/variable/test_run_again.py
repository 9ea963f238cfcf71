"""Activation checkpointing runs forwards again within backward: nothing is counted, admitted or evicted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pairs import in_pairs
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from variable.cases import on_disk

from torchsparse_rec import nn, optim
from torchsparse_rec.variable import (
    CBFFilter,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    LRUEvict,
    StorageOption,
)

DIM, STEPS = 2, 12
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "counts": {"filter_option": CounterFilter(filter_freq=4)},
    "bloom": {"filter_option": CBFFilter(3, max_element_size=100, false_positive_probability=0.01)},
    "steps": {"evict_option": GlobalStepEvict(steps_to_live=2, every=3)},
    "least recent": {"evict_option": LRUEvict(8)},
    "tiers": {},
}


def made(kind: str, mode: str, option: str, folder: Path) -> torch.nn.Module:
    """Return a table that grows, alone or in a collection beside another."""
    storage = on_disk(folder, 10) if option == "tiers" else StorageOption()
    options = EmbeddingVariableOption(storage_option=storage, **OPTIONS[option])
    if kind == "variable":
        return nn.EmbeddingVariable(DIM, initializer=1.0, ev_option=options, grad_mode=mode)
    grows = nn.EmbeddingBagConfig(4, DIM, "grows", feature_names=["f"], ev_option=options, initializer=1.0)
    fixed = nn.EmbeddingBagConfig(9, DIM, "fixed", feature_names=["g"], init_fn=torch.nn.init.ones_)
    return nn.EmbeddingBagCollection([grows, fixed], grad_mode=mode)


def looked_up(table: torch.nn.Module, ids: Tensor) -> Tensor:
    """Look up ids ``[N]``, and return a sum of rows for each."""
    if isinstance(table, nn.EmbeddingVariable):
        return table(ids).sum(1)
    return table({"f": ids[:, None], "g": ids[:, None] % 9}).values().sum(1)  # type: ignore[no-any-return]


def trained(table: torch.nn.Module, again: bool | None) -> tuple[list[float], dict[str, Tensor]]:
    """Train with checkpoints, reentrant or not, or without; return losses, and what the table that grows holds."""
    optimizer = optim.Adagrad(table.parameters(), lr=0.1, in_backward=True)
    losses = []
    for step in range(STEPS):
        ids = (torch.rand(6, generator=torch.Generator().manual_seed(step)) ** 2 * 15).long()
        scale = torch.ones(6, requires_grad=True)

        def forward(scale: Tensor, ids: Tensor = ids) -> Tensor:
            return looked_up(table, ids) * scale

        result = forward(scale) if again is None else checkpoint(forward, scale, use_reentrant=again)
        optimizer.zero_grad()
        result.square().sum().backward()
        optimizer.step()
        losses.append(result.sum().item())
    grows = table if isinstance(table, nn.EmbeddingVariable) else table.embedding_bags["grows"]
    return losses, grows.export()._asdict()


@in_pairs(kind=["variable", "collection"], mode=["sparse", "fused"], option=OPTIONS, again=[False, True])
def test_a_forward_that_runs_again_counts_once(kind: str, mode: str, option: str, again: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    (losses, held), (wanted, of_wanted) = (
        trained(made(kind, mode, option, tmp_path / str(how)), how) for how in (again, None)
    )
    assert losses == wanted
    assert held.keys() == of_wanted.keys()
    for name, values in held.items():
        assert torch.equal(values, of_wanted[name]), name
