"""``nn.in_batch_softmax_loss`` over ranks, beside one process that has all candidates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchsparse_rec import nn

# Queries and candidates of each rank.
SIZES = {"alike": [(4, 4), (4, 4)], "different": [(3, 5), (6, 7)], "none on rank 0": [(0, 0), (2, 3)]}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "corrected": {"log_q": True, "temperature": 0.5},
    "hits": {"ids": True, "excluded": True, "log_q": True},
    "hard": {"ids": True, "hard_negatives": 2},
}


def _batch(sizes: list[tuple[int, int]], options: dict[str, Any], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the arguments of each rank."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for queries, candidates in sizes:
        given: dict[str, Any] = {
            "query": torch.randn(queries, 4, generator=generator).to(dtype).requires_grad_(),
            "candidate": torch.randn(candidates, 4, generator=generator).to(dtype).requires_grad_(),
            "ids": torch.randint(4, (candidates,), generator=generator),
            "log_q": torch.rand(candidates, generator=generator).log().to(dtype),
            "excluded": torch.randint(-1, 4, (queries, 2), generator=generator),
        }
        tensors = {name: given[name] for name in ("query", "candidate", *(x for x in options if x in given))}
        batches.append({**{name: x for name, x in options.items() if name not in given}, **tensors})
    return batches


def on_ranks(sizes: list[tuple[int, int]], options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Return a rank's losses, and the gradients of its queries and candidates with respect to all ranks' losses."""
    given = _batch(sizes, options, dtype)[dist.get_rank()]
    losses = nn.in_batch_softmax_loss(**given, reduction="none", group=dist.group.WORLD)
    losses.sum().backward()
    return [losses.detach(), given["query"].grad, given["candidate"].grad]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_two_ranks_are_as_one_process(two, sizes: str, options: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        actual = two.run(on_ranks, SIZES[sizes], OPTIONS[options], dtype)
        batches = _batch(SIZES[sizes], OPTIONS[options], dtype)
        wanted = []
        for rank, given in enumerate(batches):
            others = batches[1 - rank]
            # A rank's own candidates first: which others come when makes no difference.
            all_of = {
                name: torch.cat([given[name], others[name]]) for name in ("candidate", "ids", "log_q") if name in given
            }
            wanted.append(nn.in_batch_softmax_loss(**given | all_of, reduction="none"))
        torch.cat(wanted).sum().backward()
        for rank, given in enumerate(batches):
            one = [wanted[rank].detach(), given["query"].grad, given["candidate"].grad]
            rounding = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(actual[rank], one, **rounding)


def with_an_error(argument: str, value: Any, rank: int) -> None:
    """Give one rank something that does not fit."""
    given = {"query": torch.ones(2, 4), "candidate": torch.ones(2, 4)}
    if dist.get_rank() == rank:
        given[argument] = value
    nn.in_batch_softmax_loss(**given, group=dist.group.WORLD)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_errors_are_those_of_all_ranks(two) -> None:
    kind = "all ranks must give candidates of the same kind, got on rank 0: candidate: torch.float32 ['M', 4]"
    for argument, value, rank, message in (
        ("log_q", torch.tensor([0, -torch.inf]), 1, "rank 1: in_batch_softmax_loss: log_q[1] must be finite"),
        ("excluded", torch.zeros(2, 1).long(), 0, "rank 0: in_batch_softmax_loss: ids must be given where excluded"),
        ("candidate", torch.ones(2, 4).bfloat16(), 1, f"in_batch_softmax_loss: {kind}; on rank 1"),
        ("candidate", torch.ones(2, 4, requires_grad=True), 1, f"in_batch_softmax_loss: {kind}; on rank 1"),
    ):
        for error in two.errors(with_an_error, argument, value, rank):
            assert isinstance(error, ValueError) and str(error).startswith(message)
