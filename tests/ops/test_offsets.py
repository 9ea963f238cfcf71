"""Offsets that are empty beside items: every function and module that takes offsets says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchsparse_rec import nn, ops, optim

IDS = torch.arange(4_096) % 20
ROWS, WEIGHT = torch.rand(4_096, 4), torch.rand(20, 4)
PLAN: dict[str, Any] = {"tables": [0], "keys": [0], "modes": ["sum"], "bags": [0]}

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "embedding_bag": lambda offsets: ops.embedding_bag(WEIGHT, IDS, offsets),
    "embedding_collection": lambda offsets: ops.embedding_collection([WEIGHT], IDS, offsets, **PLAN),
    "embedding_lookup_sparse": lambda offsets: ops.embedding_lookup_sparse(WEIGHT, IDS, offsets=offsets),
    "safe_embedding_lookup_sparse": lambda offsets: ops.safe_embedding_lookup_sparse(WEIGHT, IDS, offsets=offsets),
    "quantized_embedding_bag": lambda offsets: ops.quantized_embedding_bag(
        ops.quantize_rows(WEIGHT, rows="float16"), IDS, offsets, rows="float16"
    ),
    "jagged_to_nested": lambda offsets: ops.jagged_to_nested(IDS, offsets),
    "jagged_to_padded": lambda offsets: ops.jagged_to_padded(IDS, offsets),
    "jagged_to_sparse": lambda offsets: ops.jagged_to_sparse(IDS, offsets),
}
for name in ("sum", "mean", "sqrt_n"):
    CALLS[f"sparse_segment_{name}"] = lambda offsets, name=name: getattr(ops, f"sparse_segment_{name}")(
        WEIGHT, IDS, offsets=offsets
    )
for name in ("sum", "mean", "sqrt_n", "max", "min", "prod"):
    CALLS[f"segment_{name}"] = lambda offsets, name=name: getattr(ops, f"segment_{name}")(ROWS, offsets=offsets)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", CALLS)
def test_functions(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"^{name}: offsets is empty, but there are 4,096 (indices|ids|rows|values)$"):
        CALLS[name](torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("grad_mode", [None, "dense", "sparse", "fused", "auto", "quantized"])
def test_bags(grad_mode: str | None, last: bool, weighted: bool) -> None:
    table: Any
    if grad_mode == "quantized":
        table = nn.quantize(nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=last).eval(), rows="int8")
    else:
        table = nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=last, grad_mode=grad_mode)
        _optimizer = optim.SGD(table.parameters(), lr=0.1, in_backward=True)
    weights = torch.rand(4_096) if weighted else None
    with pytest.raises(ValueError, match="^EmbeddingBag: offsets is empty, but there are 4,096 indices$"):
        table(IDS, torch.empty(0, dtype=torch.int64), weights)
    if not last:
        assert table(IDS[:0], torch.empty(0, dtype=torch.int64)).shape == (0, 4)
