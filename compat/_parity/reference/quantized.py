"""Slow, obvious references of lookups in tables of fewer bytes: rows are decoded, then looked up as others are."""

from __future__ import annotations

import torch
from torch import Tensor

from .embedding import embedding_bag


def decoded(weight: Tensor, bits: int) -> Tensor:
    """Return a table in float32: each number times its row's scale, rounded, plus the bias, rounded."""
    if bits == 16:
        return weight.float()
    size, dtype = (8, torch.float32) if bits == 8 else (4, torch.float16)
    numbers, ends = weight[:, :-size], weight[:, -size:].clone(memory_format=torch.contiguous_format)
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], 2).flatten(1)
    scale, bias = ends.view(dtype).float().split(1, 1)
    return numbers.float() * scale + bias


def quantized_embedding(weight: Tensor, indices: Tensor, bits: int) -> Tensor:
    return decoded(weight, bits)[indices.long()]


def quantized_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    bits: int,
    mode: int,
    padding_idx: int,
    include_last_offset: bool = True,
    first_bag: int = 0,
    bags: int | None = None,
) -> Tensor:
    rest = (indices, offsets, per_sample_weights, mode, padding_idx, False, False, include_last_offset)
    pooled: Tensor = embedding_bag(decoded(weight, bits), *rest)[0]
    return pooled[first_bag : None if bags is None else first_bag + bags]


FUNCTIONS = (quantized_embedding, quantized_embedding_bag)
