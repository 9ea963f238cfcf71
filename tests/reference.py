"""
The slow, obvious meaning of every operator in csrc/library.cpp, in plain Python and PyTorch.

Each function takes the arguments of its schema, all valid, and returns the results (for a mutating operator: what the
written arguments must hold). Half types are accumulated in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import reference_embedding_lookup
import torch
from reference_segment_rows import (
    segment_reduce,
    segment_reduce_backward,
    unsorted_segment_reduce,
    unsorted_segment_reduce_backward,
)
from torch import Tensor

SUM, MEAN, SQRTN, MAX = range(4)


def _accumulator(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# ---- segment --------------------------------------------------------------------------------------------------------


def _segment_scale(count: int, reduction: int) -> float:
    return {SUM: 1.0, MEAN: 1.0 / count, SQRTN: 1.0 / math.sqrt(count)}[reduction]


def sparse_segment_reduce(
    data: Tensor, indices: Tensor, segment_ids: Tensor, num_segments: int | None, reduction: int
) -> Tensor:
    ids = segment_ids.tolist()
    if num_segments is None:
        num_segments = ids[-1] + 1 if ids else 0
    values = _accumulator(data)
    out = values.new_zeros(num_segments, *data.shape[1:])
    for index, segment in zip(indices.tolist(), ids, strict=True):
        out[segment] += values[index]
    for segment in set(ids):
        out[segment] *= _segment_scale(ids.count(segment), reduction)
    return out.to(data.dtype)


def sparse_segment_reduce_grad(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, reduction: int
) -> Tensor:
    ids = segment_ids.tolist()
    values = _accumulator(grad)
    out = values.new_zeros(output_dim0, *grad.shape[1:])
    for index, segment in zip(indices.tolist(), ids, strict=True):
        out[index] += _segment_scale(ids.count(segment), reduction) * values[segment]
    return out.to(grad.dtype)


def sparse_segment_reduce_grad_out(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, reduction: int, out: Tensor
) -> Tensor:
    return sparse_segment_reduce_grad(grad, indices, segment_ids, output_dim0, reduction)


def sparse_segment_reduce_grad_v2(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, dense_output_dim0: int, reduction: int
) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(sorted(set(indices.tolist())), dtype=indices.dtype, device=indices.device)
    dense = sparse_segment_reduce_grad(grad, indices, segment_ids, dense_output_dim0, reduction)
    return dense[rows.long()], rows


def sparse_segment_reduce_grad_v2_out(
    grad: Tensor,
    indices: Tensor,
    segment_ids: Tensor,
    dense_output_dim0: int,
    reduction: int,
    values: Tensor,
    rows: Tensor,
) -> tuple[Tensor, Tensor]:
    return sparse_segment_reduce_grad_v2(grad, indices, segment_ids, dense_output_dim0, reduction)


# ---- unique ---------------------------------------------------------------------------------------------------------


def unique(x: Tensor) -> tuple[Tensor, Tensor]:
    values, inverse, _ = unique_with_counts(x)
    return values, inverse


def unique_with_counts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positions: dict[int, int] = {}
    inverse = [positions.setdefault(value, len(positions)) for value in x.tolist()]
    counts = [inverse.count(u) for u in range(len(positions))]
    return (
        torch.tensor(list(positions), dtype=x.dtype, device=x.device),
        torch.tensor(inverse, dtype=torch.int64, device=x.device),
        torch.tensor(counts, dtype=torch.int64, device=x.device),
    )


def unique_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = [tuple(row.reshape(-1).tolist()) for row in x]
    first: dict[tuple, int] = {}
    for position, row in enumerate(rows):
        first.setdefault(row, position)
    inverse = [list(first).index(row) for row in rows]
    counts = [inverse.count(u) for u in range(len(first))]
    return tuple(
        torch.tensor(part, dtype=torch.int64, device=x.device) for part in (list(first.values()), inverse, counts)
    )


# ---- hash -----------------------------------------------------------------------------------------------------------

_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_WORD = 2**64 - 1


def _rotate(x: int, bits: int) -> int:
    x &= _WORD
    return ((x >> bits) | (x << (64 - bits))) & _WORD


def _shift_mix(x: int) -> int:
    x &= _WORD
    return x ^ (x >> 47)


def _mix(u: int, v: int, factor: int) -> int:
    a = _shift_mix((u ^ v) * factor)
    return _shift_mix((v ^ a) * factor) * factor & _WORD


def _word(text: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(text[at : at + size], "little")


def _short_hash(text: bytes) -> int:
    """Texts of 0 to 16 bytes."""
    n = len(text)
    factor = _K2 + 2 * n
    if n >= 8:
        a, b = _word(text, 0) + _K2, _word(text, n - 8)
        return _mix((_rotate(b, 37) * factor + a) & _WORD, (_rotate(a, 25) + b) * factor & _WORD, factor)
    if n >= 4:
        return _mix(n + (_word(text, 0, 4) << 3), _word(text, n - 4, 4), factor)
    if n > 0:
        y, z = text[0] + (text[n // 2] << 8), n + (text[-1] << 2)
        return _shift_mix((y * _K2 ^ z * _K0) & _WORD) * _K2 & _WORD
    return _K2


def _middle_hash(text: bytes) -> int:
    """Texts of 17 to 64 bytes."""
    n = len(text)
    factor = _K2 + 2 * n
    a = _word(text, 0) * (_K1 if n <= 32 else _K2)
    b, c, d = _word(text, 8), _word(text, n - 8) * factor, _word(text, n - 16) * _K2
    y = (_rotate(a + b, 43) + _rotate(c, 30) + d) & _WORD
    z = _mix(y, (a + _rotate(b + _K2, 18) + c) & _WORD, factor)
    if n <= 32:
        return z
    e, f = _word(text, 16) * factor, _word(text, 24)
    g, h = (y + _word(text, n - 32)) * factor, (z + _word(text, n - 24)) * factor
    return _mix((_rotate(e + f, 43) + _rotate(g, 30) + h) & _WORD, (e + _rotate(f + a, 18) + g) & _WORD, factor & _WORD)


def _weak(text: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = (_word(text, at + 8 * k) for k in range(4))
    a += w
    b = _rotate(b + a + z, 21)
    c = a
    a += x + y
    b += _rotate(a, 44)
    return (a + z) & _WORD, (b + c) & _WORD


def fingerprint64(text: bytes) -> int:
    """FarmHash Fingerprint64, as an unsigned number."""
    n = len(text)
    if n <= 16:
        return _short_hash(text)
    if n <= 64:
        return _middle_hash(text)
    x, y = 81, (81 * _K1 + 113) & _WORD
    z = _shift_mix(y * _K2 + 113) * _K2 & _WORD
    v, w = (0, 0), (0, 0)
    x = (x * _K2 + _word(text, 0)) & _WORD

    def rounds(at: int, factor: int, nine: int) -> None:
        nonlocal x, y, z, v, w
        x = _rotate(x + y + v[0] + _word(text, at + 8), 37) * factor & _WORD
        y = _rotate(y + v[1] + _word(text, at + 48), 42) * factor & _WORD
        x ^= w[1] * nine & _WORD
        y = (y + v[0] * nine + _word(text, at + 40)) & _WORD
        z = _rotate(z + w[0], 33) * factor & _WORD
        v = _weak(text, at, v[1] * factor, x + w[0])
        w = _weak(text, at + 32, z + w[1], y + _word(text, at + 16))
        x, z = z, x

    for block in range((n - 1) // 64):
        rounds(64 * block, _K1, 1)
    factor = _K1 + ((z & 0xFF) << 1)
    w = (w[0] + ((n - 1) & 63), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    rounds(n - 64, factor, 9)
    first = _mix(v[0], w[0], factor) + _shift_mix(y) * _K0 + z
    return _mix(first & _WORD, (_mix(v[1], w[1], factor) + x) & _WORD, factor)


def to_hash_bucket_fast(x: Tensor, num_buckets: int) -> Tensor:
    buckets = [fingerprint64(str(value).encode()) % num_buckets for value in x.flatten().tolist()]
    return torch.tensor(buckets, dtype=torch.int64, device=x.device).reshape(x.shape)


def string_to_hash_bucket_fast(bytes_: Tensor, offsets: Tensor, num_buckets: int) -> Tensor:
    text, bounds = bytes(bytes_.tolist()), offsets.tolist()
    buckets = [fingerprint64(text[a:b]) % num_buckets for a, b in zip(bounds, bounds[1:], strict=False)]
    return torch.tensor(buckets, dtype=torch.int64, device=bytes_.device)


# ---- embedding ------------------------------------------------------------------------------------------------------


def embedding(weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, sparse: bool) -> Tensor:
    rows = [weight[index] for index in indices.flatten().tolist()]
    picked = torch.stack(rows) if rows else weight.new_zeros(0, weight.shape[1])
    return picked.reshape(*indices.shape, weight.shape[1])


def _bags(indices: Tensor, offsets: Tensor | None, padding_idx: int) -> Iterator[list[int]]:
    """The positions of each bag, without those of ``padding_idx``."""
    bounds = list(range(indices.shape[0] + 1)) if offsets is None else offsets.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        yield [i for i in range(begin, end) if padding_idx < 0 or int(indices[i]) != padding_idx]


def _denominator(weights: list[Tensor], mode: int) -> Tensor | float:
    """What a bag's weighted sum is divided by."""
    if mode == SUM:
        return 1.0
    total: Tensor | float = 0.0
    for w in weights:
        total = total + (w if mode == MEAN else w * w)
    return total if mode == MEAN else total**0.5


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> tuple[Tensor, Tensor]:
    table = _accumulator(weight)
    weights = torch.ones_like(indices, dtype=table.dtype) if per_sample_weights is None else per_sample_weights
    weights = _accumulator(weights)
    output = table.new_zeros(offsets.shape[0] - 1, weight.shape[1])
    argmax = torch.full(output.shape, -1, dtype=torch.int64, device=weight.device)
    for bag, positions in enumerate(_bags(indices, offsets, padding_idx)):
        if mode == MAX:
            for i in positions:
                row, best = table[int(indices[i])], output[bag]
                wins = (argmax[bag] < 0) | (row > best) | (row.isnan() & ~best.isnan())
                output[bag] = torch.where(wins, row, best)
                argmax[bag] = torch.where(wins, i, argmax[bag])
            continue
        for i in positions:
            output[bag] += weights[i] * table[int(indices[i])]
        denominator = _denominator([weights[i] for i in positions], mode)
        output[bag] = output[bag] / denominator if denominator != 0 else torch.zeros_like(output[bag])
    return output.to(weight.dtype), argmax if mode == MAX else argmax.new_empty(0)


def embedding_dense_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: int,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    values = _accumulator(grad)
    weights = torch.ones_like(indices, dtype=values.dtype) if per_sample_weights is None else per_sample_weights
    weights = _accumulator(weights)
    out = values.new_zeros(num_embeddings, grad.shape[1])
    entries = [0] * num_embeddings
    for bag, positions in enumerate(_bags(indices, offsets, padding_idx)):
        denominator = 1.0 if mode == MAX else _denominator([weights[i] for i in positions], mode)
        for i in positions:
            row = int(indices[i])
            entries[row] += 1
            if mode == MAX:
                out[row] += torch.where(argmax[bag] == i, values[bag], 0.0)
            elif denominator != 0:
                out[row] += weights[i] / denominator * values[bag]
    if scale_grad_by_freq:
        for row, count in enumerate(entries):
            out[row] /= max(count, 1)
    return out.to(grad.dtype)


def embedding_sparse_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: int,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> tuple[Tensor, Tensor]:
    entries = sorted({int(i) for i in indices.tolist() if padding_idx < 0 or i != padding_idx})
    rows = torch.tensor(entries, dtype=torch.int64, device=grad.device)
    dense = embedding_dense_backward(
        grad, indices, offsets, per_sample_weights, argmax, num_embeddings, mode, padding_idx, scale_grad_by_freq
    )
    return dense[rows], rows


def embedding_weights_backward(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor,
    output: Tensor,
    mode: int,
    padding_idx: int,
) -> Tensor:
    grad, table, weights, output = map(_accumulator, (grad, weight, per_sample_weights, output))
    result = torch.zeros_like(weights)
    for bag, positions in enumerate(_bags(indices, offsets, padding_idx)):
        q = _denominator([weights[i] for i in positions], mode)
        if q == 0:
            continue
        for i in positions:
            x = table[int(indices[i])]
            if mode == SUM:
                result[i] = grad[bag] @ x
            elif mode == MEAN:
                result[i] = grad[bag] @ (x - output[bag]) / q
            else:
                result[i] = (grad[bag] @ x - grad[bag] @ output[bag] * weights[i] / q) / q
    return result.to(weight.dtype)


REFERENCES: dict[str, Callable] = {
    function.__name__: function
    for function in (
        sparse_segment_reduce,
        sparse_segment_reduce_grad,
        sparse_segment_reduce_grad_out,
        sparse_segment_reduce_grad_v2,
        sparse_segment_reduce_grad_v2_out,
        segment_reduce,
        segment_reduce_backward,
        unsorted_segment_reduce,
        unsorted_segment_reduce_backward,
        unique,
        unique_with_counts,
        unique_rows,
        to_hash_bucket_fast,
        string_to_hash_bucket_fast,
        embedding,
        embedding_bag,
        embedding_dense_backward,
        embedding_sparse_backward,
        embedding_weights_backward,
        *reference_embedding_lookup.FUNCTIONS,
    )
}
