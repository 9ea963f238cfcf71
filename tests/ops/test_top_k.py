"""``ops.top_k_rows`` beside a stable sort of all scores, and what its kernel refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import assert_same_bits
from devices import cpu_only
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.jagged import JaggedTensor

N, V, D = 7, 300, 6
Best = tuple[Tensor, Tensor]


def _problem(n: int = N, rows: int = V, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return queries and rows of small integers: their products are exact in all blocks, and many are equal."""
    generator = torch.Generator().manual_seed(0)
    query, table = (torch.randint(-3, 4, (count, D), generator=generator) for count in (n, rows))
    return query.to(dtype), table.to(dtype)


def _of_all_scores(scores: Tensor, k: int) -> Best:
    values, rows = (x[..., :k] for x in scores.sort(dim=-1, descending=True, stable=True))
    return values, rows.where(values != -torch.inf, -1)


def _assert_equal(actual: Best, wanted: Best) -> None:
    for x, y in zip(actual, wanted, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x.cpu(), y, rtol=0, atol=0, equal_nan=True)


# ---- Beside all scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [1, 5, 100, V])
def test_values_and_rows_are_those_of_all_scores(k: int, dtype: torch.dtype, device: str) -> None:
    query, table = _problem(dtype=dtype)
    wanted = _of_all_scores(query @ table.T, k)
    for block in (None, 1, 7, 32, 299):
        _assert_equal(ops.top_k_rows(query.to(device), table.to(device), k, block=block), wanted)


@pytest.mark.parametrize("k", [1, 100])
def test_scores_that_only_rise_or_fall(k: int, device: str) -> None:
    """Take rows each of which is better than all before, and rows of which the first are the best."""
    rising = torch.arange(3000.0, device=device)[:, None]
    query = torch.tensor([[1.0], [-1.0]], device=device)
    values, rows = ops.top_k_rows(query, rising, k)
    assert rows.tolist() == [list(range(2999, 2999 - k, -1)), list(range(k))]
    assert torch.equal(values, query * rows)


@pytest.mark.parametrize("form", ["matrix", "jagged", "int32"])
def test_excluded_rows_do_not_count(form: str, device: str) -> None:
    query, table = _problem()
    excluded = torch.randint(-1, V, (N, 200), generator=torch.Generator().manual_seed(1))
    excluded[3] = -1
    mask = torch.zeros(N, V + 1, dtype=torch.bool).scatter_(1, excluded.where(excluded >= 0, V), True)[:, :V]
    wanted = _of_all_scores((query @ table.T).masked_fill(mask, -torch.inf), 60)
    given: Any = excluded.to(device)
    if form == "int32":
        given = given.int()
    if form == "jagged":
        rows = [row[row >= 0] for row in excluded]
        given = JaggedTensor(
            torch.cat(rows).to(device), lengths=torch.tensor([len(row) for row in rows], device=device)
        )
    _assert_equal(ops.top_k_rows(query.to(device), table.to(device), 60, excluded=given, block=64), wanted)


def test_places_without_a_row(device: str) -> None:
    """Leave one row, and none."""
    query, table = _problem(n=2)
    excluded = torch.arange(V).repeat(2, 1)
    excluded[0, 211] = -1
    values, rows = ops.top_k_rows(query.to(device), table.to(device), 3, excluded=excluded.to(device), block=100)
    assert rows.tolist() == [[211, -1, -1], [-1] * 3]
    assert values.tolist() == [[float(query[0] @ table[211]), -torch.inf, -torch.inf], [-torch.inf] * 3]


def test_scores_that_are_not_finite(device: str) -> None:
    query, table = torch.ones(1, 1), torch.zeros(90, 1)
    table[80], table[3], table[40], table[41], table[:2] = torch.nan, torch.inf, torch.nan, -torch.inf, -torch.inf
    for k in (1, 2, 4, 90):
        wanted = _of_all_scores(query @ table.T, k)
        _assert_equal(ops.top_k_rows(query.to(device), table.to(device), k, block=50), wanted)
    assert wanted[1][0, :3].tolist() == [40, 80, 3] and wanted[1][0, -3:].tolist() == [-1] * 3


def test_more_nan_than_places(device: str) -> None:
    table = torch.full((100, 1), torch.nan, device=device)
    table[10] = torch.inf
    _, rows = ops.top_k_rows(torch.ones(1, 1, device=device), table, 5, block=30)
    assert rows.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("of_rows", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_have_scores_in_float32(dtype: torch.dtype, of_rows: torch.dtype, device: str) -> None:
    query, table = _problem()
    query[0] += 1 / 64  # a score that a half type does not hold beside the others
    wanted = _of_all_scores(query.to(dtype).float() @ table.T, 40)
    _assert_equal(ops.top_k_rows(query.to(device, dtype), table.to(device, of_rows), 40), wanted)


def test_autocast_changes_nothing() -> None:
    query, table = torch.randn(3, D), torch.randn(V, D)
    wanted = ops.top_k_rows(query, table, 5)
    with torch.autocast("cpu", torch.bfloat16):
        actual = ops.top_k_rows(query, table, 5)
    for x, y in zip(actual, wanted, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("shape", [(), (7,), (7, 1), (0,), (2, 0)])
def test_queries_may_have_any_shape(shape: tuple[int, ...], device: str) -> None:
    query = _problem()[0].flatten()[: torch.Size(shape).numel() * D].reshape(*shape, D)
    table = _problem()[1]
    _assert_equal(ops.top_k_rows(query.to(device), table.to(device), 4), _of_all_scores(query @ table.T, 4))


def test_any_layout(device: str) -> None:
    query, table = _problem()
    wanted = ops.top_k_rows(query.to(device), table.to(device), 9)
    wide = torch.zeros(2 * V, D + 3, device=device)
    wide[::2, 1:-2] = table.to(device)
    excluded = torch.full((5, N), -1, device=device).T
    turned = query.T.contiguous().T.to(device)
    for x, y in zip(ops.top_k_rows(turned, wide[::2, 1:-2], 9, excluded=excluded), wanted, strict=True):
        assert_same_bits(x, y)


def test_without_columns() -> None:
    values, rows = ops.top_k_rows(torch.ones(2, 0), torch.ones(5, 0), 3)
    assert values.tolist() == [[0.0] * 3] * 2 and rows.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("threads", [1, 2])
@cpu_only
def test_same_bits_on_any_number_of_threads(threads: int, kernels: str, restore_threads: None) -> None:
    """Take enough scores for two threads: integers, whose products torch finds the same on both."""
    query, table = _problem(n=300, rows=3000)
    wanted = _of_all_scores(query @ table.T, 50)
    torch.set_num_threads(threads)
    _assert_equal(ops.top_k_rows(query, table, 50), wanted)


# ---- Derivatives and compilers ---------------------------------------------------------------------------------------


def test_is_not_differentiable() -> None:
    query, table = (x.requires_grad_() for x in _problem())
    values, rows = ops.top_k_rows(query, table, 3)
    assert not values.requires_grad and not rows.requires_grad


@pytest.mark.slow
def test_opcheck() -> None:
    query, table = _problem()
    targets, pairs = torch.full((N,), -1), (torch.tensor([3, 70]), torch.tensor([1, 0]))
    for given in ((targets, None, None, 3, None, -1), (targets, *pairs, 3, 16, 5)):
        torch.library.opcheck(torch.ops.torchsparse_rec_scores.top_k.default, (query, table, *given))
        trained = (query.clone().requires_grad_(), table.clone().requires_grad_())
        torch.library.opcheck(torch.ops.torchsparse_rec_scores.top_k.default, (*trained, *given))


def test_compiles_whole() -> None:
    query, table = (x.requires_grad_() for x in _problem())
    excluded = torch.tensor([[1, -1]] * N)

    def best(query: Tensor, table: Tensor) -> Best:
        return ops.top_k_rows(query, table, 5, excluded=excluded, block=16)

    compiled = torch.compile(best, fullgraph=True, backend="aot_eager")
    _assert_equal(compiled(query, table), best(query, table))


@pytest.mark.slow
def test_can_be_exported() -> None:
    query, table = _problem()

    class Best(torch.nn.Module):
        def forward(self, query: Tensor, excluded: Tensor) -> Any:
            return ops.top_k_rows(query, table, 5, excluded=excluded)

    excluded, count = torch.tensor([[1, -1]] * N), torch.export.Dim("count", min=1)
    program = torch.export.export(Best(), (query, excluded), dynamic_shapes=[{0: count}] * 2)
    for n in (N, 2):
        _assert_equal(program.module()(query[:n], excluded[:n]), Best()(query[:n], excluded[:n]))


def test_functional_transforms() -> None:
    query, table = _problem()
    wanted = ops.top_k_rows(query, table, 4)
    _assert_equal(torch.func.vmap(lambda x: ops.top_k_rows(x, table, 4))(query), wanted)

    def first(query: Tensor) -> tuple[Tensor, Tensor]:
        values, rows = ops.top_k_rows(query, table, 4)
        return (values + query.sum()).sum(), rows

    gradient, rows = torch.func.grad(first, has_aux=True)(query)
    assert torch.equal(gradient, torch.full_like(query, 4.0 * N)) and torch.equal(rows, wanted[1])


# ---- Bad input -------------------------------------------------------------------------------------------------------

QUERY, TABLE = torch.ones(3, 2), torch.ones(5, 2)
FLOATS = "torch.float32 or torch.bfloat16 or torch.float16"
REFUSED: dict[str, dict[str, Any]] = {
    "k must be in [1, 5], got 0": {"k": 0},
    "k must be in [1, 5], got 6": {"k": 6},
    "block must be at least 1 row, got 0": {"block": 0},
    "query must be [..., D] of floats, got torch.int64": {"query": torch.ones(3, 2, dtype=torch.int64)},
    f"weight must be [V, 2] of {FLOATS}, as query is torch.float32, got torch.float32 of shape (5, 3)": {
        "weight": torch.ones(5, 3)
    },
    "weight must be [V, 2] of torch.float64, as query is torch.float64, got torch.float32": {"query": QUERY.double()},
    "weight must have at least one row, got shape (0, 2)": {"weight": torch.ones(0, 2)},
    "weight must be on the device of query, cpu, got meta": {"weight": TABLE.to("meta")},
    "excluded must have a row of int32 or int64 ids for each of 3 queries, on cpu, got torch.int64 of shape (2, 1)": {
        "excluded": torch.zeros(2, 1, dtype=torch.int64)
    },
    "excluded must have a row of int32 or int64 ids for each of 3 queries, on cpu, got torch.int64 of 2 rows": {
        "excluded": JaggedTensor(torch.zeros(2).long(), lengths=torch.ones(2).long())
    },
    "excluded must have a row of int32 or int64 ids for each of 3 queries, on cpu, got torch.float32": {
        "excluded": torch.ones(3, 1)
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message: str) -> None:
    with pytest.raises(ValueError) as error:
        ops.top_k_rows(**({"query": QUERY, "weight": TABLE, "k": 2} | REFUSED[message]))
    assert str(error.value).startswith(f"top_k_rows: {message}")


@pytest.mark.parametrize("bad", [-2, 5, 2**40])
def test_excluded_rows_out_of_range(bad: int, device: str) -> None:
    excluded = torch.tensor([[0, -1], [1, bad], [2, 2]], device=device)
    message = rf"^scores_targets: excluded\[3\] must be in \[0, 5\) or -1, got {bad}$"
    with pytest.raises(IndexError, match=message):
        ops.top_k_rows(QUERY.to(device), TABLE.to(device), 2, excluded=excluded)
        torch.ops.torchsparse_rec.check_errors.default(excluded)


@pytest.mark.parametrize("argument", ["query", "weight", "excluded"])
def test_arguments_are_tensors(argument: str) -> None:
    with pytest.raises(TypeError, match=f"^top_k_rows: {argument} must be a tensor, got list"):
        ops.top_k_rows(**({"query": QUERY, "weight": TABLE, "k": 2} | {argument: [1, 2, 3]}))


def test_the_kernel_checks_what_it_is_given(kernels: str) -> None:
    top_k = torch.ops.torchsparse_rec.scores_top_k_.default
    scores, values, rows = torch.ones(3, 4), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64)
    calls: dict[str, Callable[[], None]] = {
        "scores must have rank 2": lambda: top_k(scores[0], 0, values, rows),
        "scores must be float32 or float64, got Half": lambda: top_k(scores.half(), 0, values.half(), rows),
        "first_row and the number of columns must be in [0, 2^63)": lambda: top_k(scores, -1, values, rows),
        "values must be Float of shape [3, k], as scores, got Double of shape [3, 2]": lambda: top_k(
            scores, 0, values.double(), rows
        ),
        "values must be Float of shape [3, k], as scores, got Float of shape [2, 2]": lambda: top_k(
            scores, 0, values[:2], rows
        ),
        "rows must be Long of shape [3, 2], as values, got Int of shape [3, 2]": lambda: top_k(
            scores, 0, values, rows.int()
        ),
        "rows must be Long of shape [3, 2], as values, got Long of shape [3, 1]": lambda: top_k(
            scores, 0, values, rows[:, :1]
        ),
        "values must be contiguous, as it is written in place": lambda: top_k(scores, 0, values.T.contiguous().T, rows),
        "rows must be contiguous, as it is written in place": lambda: top_k(scores, 0, values, rows.T.contiguous().T),
        "scores must not share memory with values": lambda: top_k(scores, 0, scores.view(-1)[:6].view(3, 2), rows),
    }
    for message, refused in calls.items():
        with pytest.raises(ValueError) as error:
            refused()
        assert str(error.value).startswith(f"scores_top_k_: {message}")
