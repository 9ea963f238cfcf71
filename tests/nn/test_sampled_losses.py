"""Sampled softmax and NCE beside plain formulas in float64: gradient modes, padding, compilation, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from torchsparse_rec import nn, ops, optim

V, D, N = 12, 5, 6
LOSSES: dict[str, Callable[..., Tensor]] = {"softmax": nn.sampled_softmax_loss, "nce": nn.nce_loss}
assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
each = pytest.mark.parametrize("kind", LOSSES)


def reference(
    kind: str,
    input: Tensor,
    rows: Tensor,
    target: Tensor,
    drawn: Any,
    bias: Tensor | None,
    hits: bool,
    padding: int = -1,
) -> list[Tensor]:
    """Return each sample's loss by the formula; targets are [N, T]."""
    ids, target_count, count = (x.tolist() for x in drawn)
    losses = []
    for n, own in enumerate(target.tolist()):
        left_out = {len(ids) - 1 - ids[::-1].index(x) for x in own if x in ids} if hits else set()
        classes = [(x, c, 1.0) for x, c in zip(own, target_count[n], strict=True) if x != padding]
        classes = [(x, c, 1 / len(classes)) for x, c, _ in classes]
        others = [(x, count[i], 0.0) for i, x in enumerate(ids) if i not in left_out and x != padding]
        if not classes:
            losses.append((input * 0).sum())
            continue
        z = [
            rows[x] @ input[n] + (0 if bias is None else bias[x]) - torch.tensor(c, dtype=torch.float64).log()
            for x, c, _ in classes + others
        ]
        logits, labels = torch.stack(z), torch.tensor([label for *_, label in classes + others], dtype=torch.float64)
        if kind == "softmax":
            losses.append(-(labels * logits.log_softmax(0)).sum())
        else:
            terms = labels * logits.sigmoid().log() + (1 - labels) * (-logits).sigmoid().log()
            losses.append(-terms.sum())
    return losses


def inputs(num_true: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, ops.Candidates]:
    """Return input, rows, bias, targets and candidates, of which some repeat and some are targets."""
    generator = torch.Generator().manual_seed(num_true)
    input, rows, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, D), (V, D), (V,)))
    target = torch.randint(V, (N, num_true), generator=generator)
    drawn = nn.LogUniformSampler(V, 9, unique=False, seed=4)(target)
    assert len(set(drawn.ids.tolist())) < 9 and ops.compute_accidental_hits(target, drawn.ids)[0].numel() > 0
    return input, rows, bias, target, drawn


@each
@pytest.mark.parametrize("num_true", [1, 3])
@pytest.mark.parametrize("hits", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_losses_and_gradients_are_those_of_the_formula(kind: str, num_true: int, hits: bool, with_bias: bool) -> None:
    input, rows, bias, target, drawn = inputs(num_true)
    leaves = [x.requires_grad_() for x in ((input, rows, bias) if with_bias else (input, rows))]
    given = bias if with_bias else None
    wanted = torch.stack(reference(kind, input, rows, target, drawn, given, hits))
    for shape in ((N,), (2, 3)):
        targets = target.view(*shape, num_true)
        counts = ops.Candidates(drawn.ids, drawn.target_count.view_as(targets), drawn.count)
        arguments = (input.view(*shape, D), rows, targets, counts)
        loss = LOSSES[kind](*arguments, bias=given, remove_accidental_hits=hits, reduction="none")
        assert_close(loss, wanted.view(shape))
        for reduction in ("sum", "mean"):
            loss = LOSSES[kind](*arguments, bias=given, remove_accidental_hits=hits, reduction=reduction)
            assert_close(loss, getattr(wanted, reduction)())
    for x, y in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted.mean(), leaves), strict=True):
        assert_close(x, y)


@each
def test_derivatives_twice(kind: str) -> None:
    input, rows, bias, target, drawn = inputs(2)

    def losses(input: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        return LOSSES[kind](input, rows, target, drawn, bias=bias, reduction="none")

    leaves = [x.requires_grad_() for x in (input, rows, bias)]
    assert torch.autograd.gradcheck(losses, leaves) and torch.autograd.gradgradcheck(losses, leaves)


@each
@pytest.mark.parametrize("make", [optim.Adam, optim.Adagrad])
def test_training_is_the_same_in_every_mode(kind: str, make: Any) -> None:
    input, rows, bias, _, _ = inputs(1, torch.float32)
    results = []
    for grad_mode in ("dense", "sparse", "fused", "auto"):
        table, own_bias = nn.Embedding(V, D, grad_mode=grad_mode, _weight=rows.clone()), bias.clone().requires_grad_()
        optimizer = make(table.parameters(), lr=0.1, in_backward=grad_mode == "fused")
        sampler, generator = nn.UniformSampler(V, 4, seed=0), torch.Generator().manual_seed(1)
        for _ in range(4):
            target = torch.randint(V, (N,), generator=generator)
            optimizer.zero_grad()
            LOSSES[kind](input, table, target, sampler(target), bias=own_bias).backward()
            if grad_mode == "sparse":
                assert table.weight.grad is not None and table.weight.grad.is_sparse
            optimizer.step()
        optimizer.flush()
        results.append((table.weight.detach(), own_bias.grad))
    for weight, gradient in results[1:]:
        torch.testing.assert_close(weight, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


def test_only_the_rows_drawn_have_a_gradient() -> None:
    input, rows, _, target, drawn = inputs(1)
    table = nn.Embedding(V, D, grad_mode="sparse", _weight=rows)
    nn.sampled_softmax_loss(input, table, target, drawn).backward()
    assert table.weight.grad is not None
    assert table.weight.grad._indices()[0].tolist() == sorted({*target.flatten().tolist(), *drawn.ids.tolist()})


@each
def test_other_tables(kind: str) -> None:
    input, rows, bias, target, drawn = inputs(1)
    wanted = LOSSES[kind](input, rows, target, drawn)
    bag = nn.EmbeddingBag.from_pretrained(rows, mode="sqrtn")
    keys = nn.EmbeddingVariable(D, dtype=torch.float64)
    keys.insert(torch.arange(V) + 2**40, rows)
    torch.testing.assert_close(LOSSES[kind](input, bag, target, drawn), wanted)
    torch.testing.assert_close(LOSSES[kind](input, torch.nn.Embedding.from_pretrained(rows), target, drawn), wanted)
    shifted = ops.Candidates(drawn.ids + 2**40, *drawn[1:])
    torch.testing.assert_close(LOSSES[kind](input, keys, target + 2**40, shifted), wanted)
    LOSSES[kind](input, keys, target, shifted).backward()
    assert keys.total_count() == V + len(target.unique())
    with pytest.raises(ValueError, match=r"bias must be None for a table of keys, got shape \(12,\)"):
        LOSSES[kind](input, keys, target, drawn, bias=bias)


@each
@pytest.mark.parametrize("hits", [False, True])
def test_padding_is_no_class(kind: str, hits: bool) -> None:
    input, rows, bias, target, drawn = inputs(3)
    table = nn.Embedding(V, D, padding_idx=0, _weight=rows.clone())
    target[0], target[1, 1:], target[2, 0], target[3:] = 0, 0, 0, target[3:].clamp_min(1)
    drawn.target_count[target == 0] = 0  # as of a sampler that reserves the id
    assert 0 in drawn.ids and (target == 0).sum() == 6
    leaves = [input.requires_grad_(), bias.requires_grad_(), table.weight]
    loss = LOSSES[kind](input, table, target, drawn, bias=bias, remove_accidental_hits=hits)
    wanted = sum(reference(kind, input, table.weight, target, drawn, bias, hits, padding=0)) / (N - 1)
    assert_close(loss, wanted)
    for x, y in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert_close(x, y)


@each
def test_no_samples_and_only_padding(kind: str) -> None:
    input, rows, bias, target, drawn = inputs(2, torch.float32)
    for count in (0, N):
        table = nn.Embedding(V, D, padding_idx=0, _weight=rows.clone(), grad_mode="dense")
        bias, batch = bias.detach().requires_grad_(), input[:count].detach().requires_grad_()
        counts = ops.Candidates(drawn.ids, drawn.target_count[:count], drawn.count)
        for given in (table, table.weight) if count == 0 else (table,):
            arguments = (batch, given, target[:count] * 0, counts)
            assert LOSSES[kind](*arguments, bias=bias, reduction="sum") == 0
            assert LOSSES[kind](*arguments, bias=bias, reduction="none").tolist() == [0] * count
            mean = LOSSES[kind](*arguments, bias=bias)
            assert mean.isnan()
            assert all((x == 0).all() for x in torch.autograd.grad(mean, [batch, bias, table.weight]))


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(kind: str, dtype: torch.dtype) -> None:
    input, rows, bias, target, drawn = inputs(1)
    halves = [x.to(dtype) for x in (input, rows, bias)]
    wanted = LOSSES[kind](*(x.float() for x in halves[:2]), target, drawn, bias=halves[2].float())
    for enabled in (False, True):
        with torch.autocast("cpu", dtype, enabled=enabled):
            loss = LOSSES[kind](*halves[:2], target, drawn, bias=halves[2])
            assert loss.dtype == torch.float32 and torch.equal(loss, wanted)


@each
def test_compiled(kind: str) -> None:
    input, rows, bias, target, drawn = inputs(2, torch.float32)
    table = nn.Embedding(V, D, padding_idx=1, _weight=rows)

    def loss(input: Tensor, target: Tensor, drawn: ops.Candidates) -> Tensor:
        return LOSSES[kind](input, table, target, drawn, bias=bias, remove_accidental_hits=True)

    wanted = loss(input.requires_grad_(), target, drawn)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(input, target, drawn)
    torch.testing.assert_close(compiled, wanted)
    for x, y in zip(*(torch.autograd.grad(x, [input, table.weight]) for x in (compiled, wanted)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.cuda
@each
def test_candidates_of_the_host_for_samples_on_cuda(kind: str) -> None:
    input, rows, bias, target, drawn = inputs(2)
    wanted = LOSSES[kind](input, rows, target, drawn, bias=bias)
    loss = LOSSES[kind](input.cuda(), rows.cuda(), target.cuda(), drawn, bias=bias.cuda())
    torch.testing.assert_close(loss.cpu(), wanted)


# ---- What is refused ------------------------------------------------------------------------------------------------


@each
def test_ids_without_a_row_are_named(kind: str) -> None:
    input, rows, bias, target, drawn = inputs(2)
    for table in (rows, nn.Embedding.from_pretrained(rows), nn.EmbeddingBag.from_pretrained(rows)):
        for bad in (-1, V):
            wrong = target.clone()
            wrong[3, 1] = bad
            with pytest.raises(IndexError, match=rf"_loss: target\[3, 1\] must be in \[0, {V}\), got {bad}$"):
                LOSSES[kind](input, table, wrong, drawn, bias=bias)
            ids = drawn.ids.clone()
            ids[2] = bad
            with pytest.raises(IndexError, match=rf"_loss: candidates.ids\[2\] must be in \[0, {V}\), got {bad}$"):
                LOSSES[kind](input, table, target, drawn._replace(ids=ids), bias=bias)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reduction": "average"}, ValueError, "reduction must be 'mean', 'sum' or 'none', got 'average'"),
    ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
    ({"input": torch.zeros(N, D).long()}, ValueError, r"input must be \[..., D\] of floats, got torch.int64 of shape"),
    (
        {"table": torch.zeros(V, 4)},
        ValueError,
        r"table must have rows of 5 floats, .* got torch.float32 of shape \(12, 4",
    ),
    ({"table": nn.Embedding(V, 4)}, ValueError, "table must have rows of 5 floats, as input has, got rows of 4"),
    ({"table": torch.nn.Linear(D, V)}, TypeError, "table must be a tensor or an embedding module, got Linear"),
    ({"target": torch.zeros(N, 2)}, ValueError, r"target must be int32 or int64 of shape \(6,\), .* got torch.float32"),
    ({"target": torch.zeros(N, 0).long()}, ValueError, r"target must be .* got torch.int64 of shape \(6, 0\)"),
    ({"target": torch.zeros(N - 1).long()}, ValueError, r"target must be .* got torch.int64 of shape \(5,\)"),
    ({"target": torch.zeros(N, 2, 1).long()}, ValueError, r"target must be .* got torch.int64 of shape \(6, 2, 1\)"),
    (
        {"target": torch.zeros(N, 2, device="meta").long()},
        ValueError,
        "target must be on the device of input, cpu, got",
    ),
    ({"candidates": torch.zeros(3)}, TypeError, "candidates must be what a sampler returns, got Tensor"),
    ({"ids": torch.zeros(3)}, ValueError, "candidates.ids must be int32 or int64 of rank 1, got torch.float32"),
    ({"count": torch.zeros(3)}, ValueError, r"candidates.count must be floats of shape \(9,\), got .* \(3,\)"),
    ({"target_count": torch.zeros(N)}, ValueError, r"candidates.target_count must be floats of shape \(6, 2\), got"),
    ({"bias": torch.zeros(V, 1)}, ValueError, r"bias must be \[12\] of floats, a number for each row of table, got"),
    ({"bias": torch.zeros(V).long()}, ValueError, r"bias must be \[12\] of floats, .* got torch.int64 of shape"),
]


@pytest.mark.parametrize(("changed", "error", "match"), WRONG)
def test_wrong_arguments(changed: dict[str, Any], error: type[Exception], match: str) -> None:
    input, rows, _, target, drawn = inputs(2)
    parts = {name: x for name, x in changed.items() if name in drawn._fields}
    arguments = {"input": input, "table": rows, "target": target, "candidates": drawn._replace(**parts)}
    arguments |= {name: x for name, x in changed.items() if name not in parts}
    for loss in LOSSES.values():
        with pytest.raises(error, match=f"{loss.__name__}: {match}"):
            loss(**arguments)
