"""Bad values on CUDA: reported by the next call without a wait, or by check_errors; no crash, no wrong row trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cuda_cases import DEVICE, sync_debug_mode
from torch import Tensor

import torchsparse_rec
from torchsparse_rec import nn, ops

_ops = torch.ops.torchsparse_rec
ROWS, IDS, SEGMENTS, BAD = 50, 1_000, 100, 777
# Long enough for the host to queue a step, in cycles of a GPU's clock: a second.
LONG = 2_000_000_000


def ids(bad: int | None, device: str) -> Tensor:
    x = torch.arange(IDS, device=device) * 7 % ROWS
    if bad is not None:
        x[BAD] = bad
    return x


def sorted_ids(device: str) -> Tensor:
    return torch.arange(IDS, device=device) * SEGMENTS // IDS


def offsets(device: str) -> Tensor:
    return torch.arange(0, IDS + 1, 10, device=device)


def changed(x: Tensor, position: int, value: int) -> Tensor:
    x[position] = value
    return x


@dataclass(frozen=True)
class Bad:
    """A call with one bad value, and the error that reports it."""

    name: str
    call: Callable[[str], object]
    kind: type[Exception]
    text: str


def _index(name: str, op: str, call: Callable[[Tensor, str], object]) -> list[Bad]:
    """Return calls with an id just beyond the last row, and with one far below the first."""
    return [
        Bad(
            f"{name}_{value}",
            lambda device, value=value: call(ids(value, device), device),
            IndexError,
            rf"{op}: indices\[{BAD}\] must be in \[0, {ROWS}\), got {value}$",
        )
        for value in (ROWS, -(2**40))
    ]


def _backward(operator: str, x: Tensor, device: str) -> object:
    grad = torch.ones(IDS, 3, device=device)
    return getattr(_ops, operator).default(grad, x, None, None, None, ROWS, 0, -1, False)


def _table(device: str) -> Tensor:
    return torch.ones(ROWS, 3, device=device)


def _segments(segment_ids: Callable[[str], Tensor]) -> Callable[[str], object]:
    return lambda device: ops.sparse_segment_sum(_table(device), ids(None, device), segment_ids(device), SEGMENTS)


def _strings(values: list[int], device: str) -> object:
    text = torch.zeros(8, dtype=torch.uint8, device=device)
    return ops.string_to_hash_bucket_fast(text, torch.tensor(values, device=device), 10)


CASES = [
    *_index("embedding", "embedding", lambda x, device: ops.embedding(_table(device), x)),
    *_index("bag", "embedding_bag", lambda x, device: ops.embedding_bag(_table(device), x, offsets(device))),
    *_index(
        "max", "embedding_bag", lambda x, device: ops.embedding_bag(_table(device), x, offsets(device), mode="max")
    ),
    *_index("dense", "embedding_backward", lambda x, device: _backward("embedding_dense_backward", x, device)),
    *_index("sparse", "embedding_backward", lambda x, device: _backward("embedding_sparse_backward", x, device)),
    *_index(
        "segment",
        "sparse_segment_reduce",
        lambda x, device: ops.sparse_segment_mean(_table(device), x, sorted_ids(device), SEGMENTS),
    ),
    *_index(
        "segment_grad",
        "sparse_segment_reduce_grad",
        lambda x, device: ops.sparse_segment_sum_grad(
            torch.ones(SEGMENTS, 3, device=device), x, sorted_ids(device), ROWS
        ),
    ),
    Bad(
        "unsorted",
        _segments(lambda device: changed(sorted_ids(device), BAD, 3)),
        ValueError,
        f"sparse_segment_reduce: segment_ids must be sorted, got 77 followed by 3 at position {BAD}$",
    ),
    Bad(
        "too_large",
        _segments(lambda device: changed(sorted_ids(device), IDS - 1, SEGMENTS)),
        ValueError,
        rf"sparse_segment_reduce: segment_ids\[{IDS - 1}\] must be below num_segments = {SEGMENTS}, got {SEGMENTS}$",
    ),
    Bad(
        "offsets",
        lambda device: ops.embedding_bag(_table(device), ids(None, device), changed(offsets(device), 5, 30)),
        ValueError,
        "embedding_bag: offsets must not decrease, got 40 followed by 30 at position 5$",
    ),
    Bad(
        "strings",
        lambda device: _strings([0, 5, 3, 8], device),
        ValueError,
        "string_to_hash_bucket_fast: offsets must not decrease, got 3 at position 2 after 5$",
    ),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_cpu_says_the_same(case: Bad) -> None:
    """Raise the same error at once on the CPU; this needs no GPU."""
    with pytest.raises(case.kind, match=case.text):
        case.call("cpu")


@pytest.mark.cuda
@each_case
def test_next_call_tells_without_waiting(case: Bad) -> None:
    good = torch.arange(10, device=DEVICE)
    torchsparse_rec.check_errors(DEVICE)
    case.call(DEVICE)
    torch.cuda.synchronize()
    with sync_debug_mode("error"), pytest.raises(case.kind, match=case.text):
        ops.to_hash_bucket_fast(good, 10)
    ops.to_hash_bucket_fast(good, 10)
    torchsparse_rec.check_errors(DEVICE)


@pytest.mark.cuda
@each_case
def test_check_errors_waits_and_tells(case: Bad) -> None:
    torchsparse_rec.check_errors(DEVICE)
    case.call(DEVICE)
    with pytest.raises(case.kind, match=case.text):
        torchsparse_rec.check_errors(DEVICE)
    torchsparse_rec.check_errors(DEVICE)


@pytest.mark.cuda
def test_the_first_of_several_bad_ids_is_told() -> None:
    for _ in range(5):
        x = torch.zeros(1_000_000, dtype=torch.int64, device=DEVICE)
        x[123_456:] = -1
        ops.embedding(_table(DEVICE), x)
        with pytest.raises(IndexError, match=r"indices\[123456\] must be in \[0, 50\), got -1"):
            torchsparse_rec.check_errors(DEVICE)


@pytest.mark.cuda
@pytest.mark.parametrize("operator", ["embedding", "embedding_bag", "embedding_dense_backward"])
def test_a_batch_of_nothing_but_bad_ids_ends(operator: str) -> None:
    """Let all threads of the device report an error at the same time: none may wait for another."""
    x = torch.full((1_000_000,), ROWS + 5, device=DEVICE)
    bags = torch.arange(0, 1_000_001, 10, device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "embedding": lambda: _ops.embedding.default(_table(DEVICE), x, -1, False, False),
        "embedding_bag": lambda: _ops.embedding_bag.default(_table(DEVICE), x, bags, None, 0, -1, False, False),
        "embedding_dense_backward": lambda: _ops.embedding_dense_backward.default(
            torch.ones(len(x), 3, device=DEVICE), x, None, None, None, ROWS, 0, -1, False
        ),
    }
    calls[operator]()
    with pytest.raises(IndexError, match=rf"indices\[0\] must be in \[0, {ROWS}\), got {ROWS + 5}"):
        torchsparse_rec.check_errors(DEVICE)
    torchsparse_rec.check_errors(DEVICE)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_device_that_is_not_the_current_one() -> None:
    """Run, read back and report on the device of the arguments, although another device is the current one."""
    other = torch.device("cuda", 1)
    x = torch.arange(1000, device=other) % ROWS
    with torch.cuda.device(0):
        values, rows = _ops.embedding_sparse_backward.default(
            torch.ones(1000, 4, device=other), x, None, None, None, ROWS, 0, -1, False
        )
        assert rows.device == other and rows.tolist() == list(range(ROWS))
        assert torch.equal(values.cpu(), torch.full((ROWS, 4), 1000.0 / ROWS))
        _ops.embedding.default(_table("cuda:1"), x + 1, -1, False, False)
        torchsparse_rec.check_errors("cuda:0")
        with pytest.raises(IndexError, match=r"indices\[49\]"):
            torchsparse_rec.check_errors()


# ---- Training -------------------------------------------------------------------------------------------------------


def trained(x: Tensor, target: Tensor, mode: str, grad_mode: str, device: str) -> Tensor:
    """Return a table after a step of SGD on the sum of what a lookup of ``x`` gives, times ``target``."""
    weight = torch.arange(3.0 * ROWS, device=device).reshape(ROWS, 3)
    if mode == "rows":
        module: nn.Embedding | nn.EmbeddingBag = nn.Embedding(ROWS, 3, _weight=weight, grad_mode=grad_mode)
    else:
        module = nn.EmbeddingBag(ROWS, 3, _weight=weight, mode=mode, grad_mode=grad_mode)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    (module(x.reshape(-1, 10)) * target).sum().backward()
    optimizer.step()
    return module.weight.detach()


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [ROWS, -1, 2**40])
@pytest.mark.parametrize("mode", ["rows", "sum", "max"])
def test_no_wrong_row_is_trained(mode: str, bad: int) -> None:
    """
    Train as if the bad id were not in the batch, and then report it.

    A long kernel before the step keeps the error record empty until the whole step is queued.
    """
    target = torch.ones((), device=DEVICE)
    with_bad, without = ids(bad, DEVICE), torch.cat([ids(None, DEVICE)[:BAD], ids(None, DEVICE)[BAD + 1 :]])
    trained(ids(None, DEVICE), target, mode, "dense", DEVICE)  # loads every kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    weight = trained(with_bad, target, mode, "dense", DEVICE)
    with pytest.raises(IndexError, match=rf"indices\[{BAD}\] must be in \[0, {ROWS}\), got {bad}"):
        torchsparse_rec.check_errors(DEVICE)
    start = torch.arange(3.0 * ROWS, device=DEVICE).reshape(ROWS, 3)
    if mode == "max":
        expected = start - expected_of_max(with_bad)
    else:
        expected = start - torch.bincount(without, minlength=ROWS).float().unsqueeze(1)
    assert torch.equal(weight, expected)


def expected_of_max(x: Tensor) -> Tensor:
    """Count the bags whose largest good id is r, for each row r: weights grow with r, so that id wins the maximum."""
    good = torch.where((x >= 0) & (x < ROWS), x, -1).reshape(-1, 10)
    return torch.bincount(good.amax(1), minlength=ROWS).float().unsqueeze(1).expand(ROWS, 3)


def test_training_without_a_bad_id_is_as_computed() -> None:
    """Compare a batch without bad ids on the CPU with the values that the tests above expect."""
    start = torch.arange(3.0 * ROWS).reshape(ROWS, 3)
    x, target = ids(None, "cpu"), torch.ones(())
    for grad_mode in ("dense", "sparse"):
        counted = torch.bincount(x, minlength=ROWS).float().unsqueeze(1)
        assert torch.equal(trained(x, target, "rows", grad_mode, "cpu"), start - counted)
        assert torch.equal(trained(x, target, "sum", grad_mode, "cpu"), start - counted)
        assert torch.equal(trained(x, target, "max", grad_mode, "cpu"), start - expected_of_max(x))


@pytest.mark.cuda
def test_sparse_gradient_has_no_bad_row() -> None:
    values, rows = _backward("embedding_sparse_backward", ids(ROWS, DEVICE), DEVICE)  # type: ignore[misc]
    with pytest.raises(IndexError, match=rf"indices\[{BAD}\]"):
        torchsparse_rec.check_errors(DEVICE)
    assert rows.tolist() == list(range(ROWS))
    counts = torch.bincount(torch.cat([ids(None, "cpu")[:BAD], ids(None, "cpu")[BAD + 1 :]]), minlength=ROWS)
    assert torch.equal(values.cpu(), counts.float().unsqueeze(1).expand(ROWS, 3))
