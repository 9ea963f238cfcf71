"""What the tests share that restate torch's own tests of its modules for ours, and those of bags beside formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from torchsparse_rec import optim

MODES = ("dense", "sparse", "fused", "auto")
IDS = (torch.int32, torch.int64)
POOLINGS = ("sum", "mean", "max")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALVES)
# The absolute tolerances of torch's tests.
PRECISION = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


def gradient(module: torch.nn.Module, run: Callable[[], Tensor], cotangent: Tensor | None = None) -> Tensor:
    """Return the gradient that a backward of ``run()`` gives the table, or how far a step with lr=1 moves it back."""
    optimizer = optim.SGD(module.parameters(), lr=1.0, in_backward=module.grad_mode in ("fused", "auto"))
    before = module.weight.detach().clone()
    output = run()
    output.backward(torch.ones_like(output) if cotangent is None else cotangent)
    grad = module.weight.grad
    assert (grad is None) == (module.grad_mode == "fused") and (grad is None or grad.dtype == before.dtype)
    optimizer.step()
    optimizer.zero_grad()
    moved = before.double() - module.weight.detach().double()
    with torch.no_grad():
        module.weight.copy_(before)
    return moved if grad is None else grad.to_dense().double() if grad.is_sparse else grad.double()


def close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1) -> None:
    """Compare within torch's tolerance."""
    relative = 0.02 if dtype in HALVES else 0
    torch.testing.assert_close(got.double(), want.double(), rtol=relative, atol=factor * PRECISION[dtype])


def pooled(
    weight: Tensor, ids: Tensor, offsets: Tensor, mode: str, factors: Tensor | None = None, padding: int | None = None
) -> Tensor:
    """Pool the rows of each bag by itself; ``offsets`` end with the number of ids. What is divided by 0 is zeros."""
    rows = []
    for start, end in itertools.pairwise(offsets.tolist()):
        kept = [i for i in range(start, end) if ids[i] != padding]
        x = weight[ids[kept].long()]
        if mode in ("max", "min"):
            # Of equal extremes the first has all of the gradient.
            rows.append(getattr(x, mode)(0).values if kept else x.sum(0))
            continue
        w = torch.ones(len(kept), dtype=weight.dtype) if factors is None else factors[kept]
        total = (w[:, None] * x).sum(0)
        divisor = {"sum": torch.ones(()), "mean": w.sum(), "sqrtn": w.square().sum().sqrt()}[mode]
        rows.append(total * 0 if divisor == 0 else total / divisor)
    return torch.stack(rows)
