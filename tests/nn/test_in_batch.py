"""``nn.in_batch_softmax_loss`` beside the formula over all scores; tests/distributed has it over ranks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import assert_same_bits
from devices import HARDWARE
from torch import Tensor

from torchsparse_rec import JaggedTensor, nn

N, M, D = 11, 17, 5
DUPLICATES = torch.randint(-3, 5, (M,), generator=torch.Generator().manual_seed(2))


def _problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, candidates, logarithms of probabilities, and ids that are excluded."""
    generator = torch.Generator().manual_seed(0)
    query, candidate = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((N, D), (M, D)))
    log_q = torch.rand(M, generator=generator, dtype=torch.float64).log()
    excluded = torch.randint(-1, 8, (N, 3), generator=generator)
    return query.to(dtype), candidate.to(dtype), log_q.to(dtype), excluded


def _of_all_scores(
    query: Tensor,
    candidate: Tensor,
    *,
    ids: Tensor | None = None,
    log_q: Tensor | None = None,
    excluded: Tensor | None = None,
    temperature: float = 1.0,
    remove_accidental_hits: bool = True,
    hard_negatives: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the loss in the order of TensorFlow Recommenders."""
    own = torch.arange(query.shape[0])
    scores = query @ candidate.T / temperature
    scores = scores if log_q is None else scores - log_q
    names = torch.arange(candidate.shape[0]) if ids is None else ids
    hits = names[own, None] == names if remove_accidental_hits else torch.zeros_like(scores, dtype=torch.bool)
    if excluded is not None:
        hits = hits | ((excluded[:, :, None] == names) & (excluded != -1)[:, :, None]).any(1)
    hits[own, own] = False
    scores = scores.masked_fill(hits, -torch.inf)
    if hard_negatives is not None:
        others = scores.scatter(1, own[:, None], -torch.inf)
        best = others.topk(min(hard_negatives, candidate.shape[0] - 1)).values
        scores, own = torch.cat([scores.gather(1, own[:, None]), best], 1), torch.zeros_like(own)
    return F.cross_entropy(scores, own, reduction=reduction)


def _with_gradients(function: Callable[..., Tensor], *leaves: Tensor, **options: Any) -> list[Tensor]:
    """Return a loss and its gradients with respect to queries, candidates, and ``log_q`` if there are three leaves."""
    made = [x.detach().clone().requires_grad_() for x in leaves]
    log_q = {"log_q": made[2]} if len(made) == 3 else {}
    loss = function(made[0], made[1], **log_q, **options)
    factors = torch.linspace(2, 0.5, loss.numel(), dtype=loss.dtype, device=loss.device).reshape(loss.shape) / 2
    return [loss.detach(), *torch.autograd.grad((loss * factors).sum(), made)]


def _assert_near(actual: list[Tensor], wanted: list[Tensor], tolerance: float = 3e-6) -> None:
    """Compare within a part of the largest entry."""
    for x, y in zip(actual, wanted, strict=True):
        assert float((x.double().cpu() - y).abs().max()) <= tolerance * max(float(y.abs().max()), 1e-30)


# ---- Beside all scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", HARDWARE, indirect=True)
@pytest.mark.parametrize("hard_negatives", [None, 1, 4, M])
def test_loss_and_gradients_are_those_of_all_scores(hard_negatives: int | None, device: str) -> None:
    """Go through all combinations of the options."""
    *leaves, excluded = _problem(torch.float64)
    for dtype, ids, corrected, excludes, removed, reduction in itertools.product(
        (torch.float32, torch.float64),
        (None, DUPLICATES, torch.zeros(M, dtype=torch.int32)),
        *((False, True),) * 3,
        ("mean", "none"),
    ):
        options = {"temperature": 0.5, "remove_accidental_hits": removed, "hard_negatives": hard_negatives}
        options["reduction"] = reduction
        tensors = {"ids": ids, "excluded": excluded if excludes else None}
        given = leaves[: 2 + corrected]
        wanted = _with_gradients(_of_all_scores, *given, **options, **tensors)
        there = {name: x if x is None else x.to(device) for name, x in tensors.items()}
        given = [x.to(device, dtype) for x in given]
        actual = _with_gradients(nn.in_batch_softmax_loss, *given, **options, **there)
        assert actual[0].dtype == dtype
        _assert_near(actual, wanted, 3e-6 if dtype == torch.float32 else 1e-12)


def test_blocks_and_samples_of_which_few_share_a_block() -> None:
    """Take more candidates than a block has, in groups of all sizes up to half of them."""
    generator = torch.Generator().manual_seed(1)
    query, candidate = (torch.randn(n, D, generator=generator) for n in (1100, 1300))
    ids = (torch.rand(1300, generator=generator) ** 8 * 2000).long()
    for k in (None, 7):
        wide = [query.double(), candidate.double()]
        wanted = _with_gradients(_of_all_scores, *wide, ids=ids, hard_negatives=k, reduction="none")
        actual = _with_gradients(
            nn.in_batch_softmax_loss, query, candidate, ids=ids, hard_negatives=k, reduction="none"
        )
        _assert_near(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_have_scores_in_float32(dtype: torch.dtype) -> None:
    query, candidate, log_q, _ = _problem(dtype)
    for k in (None, 3):
        options = {"ids": DUPLICATES, "hard_negatives": k}
        wide = [x.double() for x in (query, candidate, log_q)]
        wanted = _with_gradients(_of_all_scores, *wide, **options)
        loss, *gradients = _with_gradients(nn.in_batch_softmax_loss, query, candidate, log_q, **options)
        assert loss.dtype == torch.float32 and [x.dtype for x in gradients] == [dtype] * 3
        _assert_near([loss], wanted[:1])
        _assert_near(gradients, wanted[1:], 2**-10 if dtype == torch.float16 else 2**-7)


@pytest.mark.parametrize("ids", [None, DUPLICATES], ids=["places", "ids"])
def test_rows_of_what_is_excluded(ids: Tensor | None) -> None:
    query, candidate, log_q, excluded = _problem()
    rows = [row[row >= 0] for row in excluded]
    jagged = JaggedTensor(torch.cat(rows).int(), lengths=torch.tensor([len(row) for row in rows]))
    results = [
        _with_gradients(nn.in_batch_softmax_loss, query, candidate, log_q, ids=ids, excluded=given)
        for given in (excluded, jagged)
    ]
    for x, y in zip(*results, strict=True):
        assert_same_bits(x, y)


def test_the_own_candidate_alone_counts_where_all_else_is_left_out() -> None:
    query, candidate, *_ = _problem()
    everything = torch.arange(M).repeat(N, 1)
    for options in (
        {"ids": torch.full((M,), 7)},
        {"excluded": everything},
        {"excluded": everything, "ids": everything[0]},
    ):
        for k in (None, 2):
            loss, *gradients = _with_gradients(
                nn.in_batch_softmax_loss, query, candidate, **options, hard_negatives=k, reduction="none"
            )
            assert not any(x.any() for x in (loss, *gradients))


def test_hard_negatives_have_gradients_alone() -> None:
    """Of a query that meets 16 others, three have a gradient, and its own one."""
    query, candidate, *_ = _problem()
    _, of_query, of_candidate = _with_gradients(nn.in_batch_softmax_loss, query[:1], candidate, hard_negatives=3)
    others = (query[0] @ candidate[1:].T).topk(3).indices + 1
    assert of_query.any() and of_candidate.any(1).nonzero().flatten().tolist() == sorted([0, *others.tolist()])


@pytest.mark.parametrize("hard_negatives", [None, 40])
def test_same_bits_again(hard_negatives: int | None, restore_threads: None) -> None:
    torch.set_num_threads(3)
    given = torch.randn(1200, 6), torch.randn(1200, 6).abs(), torch.rand(1200).log()
    options = {"hard_negatives": hard_negatives}
    first, *others = (_with_gradients(nn.in_batch_softmax_loss, *given, **options) for _ in range(4))
    for again in others:
        for x, y in zip(first, again, strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("options", [{}, {"hard_negatives": 1}, {"ids": True, "excluded": torch.ones(0, 2).long()}])
def test_no_queries(rows: int, options: dict[str, Any]) -> None:
    query, candidate, log_q, _ = _problem()
    if "ids" in options:
        options = options | {"ids": DUPLICATES[:rows]}
    leaves = [query[:0], candidate[:rows], *([log_q[:rows]] if rows else [])]
    for reduction, wanted in (("sum", torch.tensor(0.0)), ("mean", torch.tensor(torch.nan)), ("none", torch.empty(0))):
        loss, *gradients = _with_gradients(nn.in_batch_softmax_loss, *leaves, reduction=reduction, **options)
        torch.testing.assert_close(loss, wanted, equal_nan=True)
        assert not any(x.any() for x in gradients)


def test_a_query_that_is_not_finite_spoils_its_own_loss_alone() -> None:
    query, candidate, *_ = _problem()
    query[1, 0] = torch.nan
    for k in (None, 2):
        options = {"ids": DUPLICATES, "hard_negatives": k, "reduction": "none"}
        losses, of_query, _ = _with_gradients(nn.in_batch_softmax_loss, query, candidate, **options)
        assert losses.isnan().nonzero().tolist() == of_query.isnan().all(1).nonzero().tolist() == [[1]]


# ---- Derivatives, compilers, memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 3])
def test_opcheck(k: int | None) -> None:
    query, candidate, bias, _ = _problem()
    of = (query.requires_grad_(), candidate.requires_grad_(), torch.arange(N), bias.requires_grad_())
    keys = torch.arange(M) // 3
    of = (*of, torch.tensor([-1, 2, 3]), torch.tensor([0, 1, 0]), keys[:N], keys, k)
    forward, backward = (getattr(torch.ops.torchsparse_rec_scores, f"in_batch{x}").default for x in ("", "_backward"))
    torch.library.opcheck(forward, of)
    losses, *saved = (x.detach() for x in forward(*of))
    plain = [x.detach() if isinstance(x, Tensor) else x for x in of]
    for wanted in ([True, False, True], [False, True, False]):
        torch.library.opcheck(backward, (torch.ones_like(losses), *saved, *plain, wanted))


@pytest.mark.parametrize("hard_negatives", [None, 3])
def test_compiles_whole(hard_negatives: int | None) -> None:
    *leaves, excluded = _problem()

    def loss(query: Tensor, candidate: Tensor, log_q: Tensor) -> Tensor:
        options = {"ids": DUPLICATES, "excluded": excluded, "hard_negatives": hard_negatives}
        return nn.in_batch_softmax_loss(query, candidate, log_q=log_q, **options)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = [
        _with_gradients(lambda query, candidate, log_q, f=f: f(query, candidate, log_q), *leaves)
        for f in (compiled, loss)
    ]
    torch.testing.assert_close(*results)


def test_second_derivatives_are_refused() -> None:
    query, candidate, *_ = _problem()
    loss = nn.in_batch_softmax_loss(query.requires_grad_(), candidate, ids=DUPLICATES)
    (gradient,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^in_batch_softmax_loss: its gradients have no second derivatives"):
        gradient.square().sum().backward()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="the peak of a process is read from Linux's /proc"
)
@pytest.mark.parametrize("hard_negatives", [None, 4])
def test_all_scores_are_never_there(hard_negatives: int | None) -> None:
    """Take 8,192 queries and candidates, half of which are one item: all scores were 268 MB, all pairs of it too."""
    count = 8192
    query, candidate = (torch.ones(count, 16, requires_grad=True) for _ in range(2))
    ids = torch.arange(count).clamp_min(count // 2)

    def status(name: str) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    nn.in_batch_softmax_loss(query, candidate, ids=ids, hard_negatives=hard_negatives).backward()
    assert status("VmHWM") - before < 64e6


# ---- Bad input -------------------------------------------------------------------------------------------------------

QUERY, CANDIDATE = torch.ones(3, 2), torch.ones(4, 2)
FLOATS = "torch.float32 or torch.bfloat16 or torch.float16"
REFUSED: dict[str, dict[str, Any]] = {
    "reduction must be 'mean', 'sum' or 'none', got 'max'": {"reduction": "max"},
    "temperature must be finite and above 0, got 0": {"temperature": 0},
    "hard_negatives must be None or at least 1, got 0": {"hard_negatives": 0},
    "query must be [N, D] of floats, got torch.float32 of shape (2,)": {"query": torch.ones(2)},
    f"candidate must be [M, 2] of {FLOATS}, as query is torch.float32, got torch.float32 of shape (4, 3)": {
        "candidate": torch.ones(4, 3)
    },
    "candidate must be [M, 2] of torch.float64, as query is torch.float64, got torch.float32": {
        "query": QUERY.double()
    },
    "candidate must have at least 3 rows, one for each query, got 2": {"candidate": torch.ones(2, 2)},
    "ids must be [4], one for each candidate, got (3,)": {"ids": torch.ones(3).long()},
    "ids must be int32 or int64, got torch.float32": {"ids": torch.ones(4)},
    "log_q must be [4], one for each candidate, got (4, 1)": {"log_q": torch.ones(4, 1)},
    "log_q must be of floats, got torch.int64": {"log_q": torch.ones(4).long()},
    "log_q[2] must be finite, the logarithm of a probability above 0, got -inf": {
        "log_q": torch.tensor([0, -1, -torch.inf, torch.nan])
    },
    "log_q must be on the device of query, cpu, got meta": {"log_q": torch.ones(4, device="meta")},
    "excluded must have a row of int32 or int64 ids for each of 3 queries, on cpu, got torch.int64 of shape (2, 1)": {
        "excluded": torch.ones(2, 1).long()
    },
    "excluded must have a row of int32 or int64 ids for each of 3 queries, on cpu, got torch.int64 of 2 rows": {
        "excluded": JaggedTensor(torch.ones(2).long(), lengths=torch.ones(2).long())
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message: str) -> None:
    with pytest.raises(ValueError) as error:
        nn.in_batch_softmax_loss(**({"query": QUERY, "candidate": CANDIDATE} | REFUSED[message]))
    assert str(error.value).startswith(f"in_batch_softmax_loss: {message}")


@pytest.mark.parametrize("argument", ["query", "candidate", "ids", "log_q", "excluded"])
def test_arguments_are_tensors(argument: str) -> None:
    with pytest.raises(TypeError, match=f"^in_batch_softmax_loss: {argument} must be a tensor, got list"):
        nn.in_batch_softmax_loss(**({"query": QUERY, "candidate": CANDIDATE} | {argument: [1, 2]}))


def test_places_out_of_range() -> None:
    with pytest.raises(IndexError, match=r"excluded\[2\] must be in \[0, 4\) or -1, got 4$"):
        nn.in_batch_softmax_loss(QUERY, CANDIDATE, excluded=torch.tensor([[0], [-1], [4]]))
