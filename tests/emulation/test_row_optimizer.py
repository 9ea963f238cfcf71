"""The CUDA kernels of the family ``row_optimizer``, without a GPU: many tables, wide rows, sums in parts, bad rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import assert_same_bits
from calls import call as call_cpu
from samples.row_optimizer import IDLE_RULES, RULES, by_name, changing, states_for, update_sample
from samples.sample import FLOATS, Random, Sample, map_tensors
from torch import Tensor

from emulation import fixture
from emulation.test_emulation import ORDERS
from torchsparse_rec import ops

Launches = Callable[[], int]
# Rules that need sums over a row: their bits depend on the order of additions.
SUMMED = {"rowwise_adagrad", "seen_rowwise_adagrad", "partial_rowwise_adam", "lamb"}


def _emulated(sample: Sample) -> tuple[Tensor, ...]:
    """Return what the kernels write, after running them in every order of threads."""
    arguments = [map_tensors(torch.clone, x) for x in sample.arguments]
    fixture.run_in_every_order(sample.operator, *arguments)
    return tuple(x for places in arguments[:3] for x in places)


def _close(sample: Sample, tolerance: float = 2e-6) -> None:
    for actual, wanted in zip(_emulated(sample), call_cpu(sample), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


# ---- Tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["adamw", "lamb", "momentum"])
def test_many_tables_of_all_widths(rule: str) -> None:
    """Update more tables than one kernel's arguments hold, and more blocks than a launch has; some have no rows."""
    shapes = tuple((rows, dim) for dim in (1, 2, 5, 16, 33, 64, 130, 200) for rows in (3, 0, 1, 40, 7))
    _close(update_sample("many", rule, shapes, steps=3))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in SUMMED])
def test_a_step_has_the_bits_of_the_cpu(rule: str, dtype: torch.dtype) -> None:
    """Compare the bits if no row is stale and none is a sum: the emulation does not fuse products with additions."""
    sample = update_sample("bits", rule, ((9, 21), (4, 8)), dtype=dtype, catch_up=False, narrow=True)
    for actual, wanted in zip(_emulated(sample), call_cpu(sample), strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chance_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    sample = update_sample("by_chance", "adagrad", ((30, 70),), dtype=dtype, seeds=[77])
    for actual, wanted in zip(_emulated(sample), call_cpu(sample), strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("dim", [127, 128, 129, 300, 520])
@pytest.mark.parametrize("rule", sorted(SUMMED))
def test_sums_over_rows_wider_than_a_team(rule: str, dim: int) -> None:
    """Read a row twice that is too wide for a team of threads; its last columns may be less than a vector."""
    _close(update_sample("wide", rule, ((6, dim),), steps=5))
    _close(update_sample("wide", rule, ((6, dim),), steps=5, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("rule", ["lamb", "adam", "amsgrad", "partial_rowwise_adam"])
def test_columns_beyond_the_last_do_not_count(rule: str) -> None:
    """Ignore the zeros there, which give 0 / 0 if eps is zero."""
    sample = update_sample("no_eps", rule, ((5, 3),), steps=4)
    h = [*(by_name(*sample.arguments[7:9]) | {"eps": 0.0}).values()]
    arguments = (*sample.arguments[:8], h, *sample.arguments[9:])
    _close(Sample(sample.operator, sample.name, arguments))


# ---- Idle steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["adam", "amsgrad", "partial_rowwise_adam"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99), (0.99, 0.9), (0.5, 0.5)])
def test_sums_in_parts(betas: tuple[float, float], rule: str, dtype: torch.dtype) -> None:
    """
    Flush rows whose second moments change much while stale: S is added up in other parts than on the CPU.

    Steps from 1 on, and gaps of all lengths up to 100: whole, in blocks, and step by step.
    """
    steps, rows = 100, 101
    random, number = Random(3), RULES[rule][0]
    values = {"lr": 0.1, "beta1": betas[0], "beta2": betas[1], "eps": 1e-8, "decoupled": 1.0, "weight_decay": 0.0}
    h = [values.get(name, 0.0) for name in by_name(*RULES[rule])]
    history = ops.new_history(steps)
    for i, x in enumerate(changing(h, steps)):
        ops.row_optimizer_advance_(history, rule=number, hyperparameters=x, step=i + 1)
    weight = random.floats(rows, 5, dtype=dtype)
    states = states_for(random, number, h, rows, 5, dtype)
    arguments = (weight, states, torch.arange(rows).int(), history, torch.arange(rows), number, h, steps, 0)
    actual = fixture.run_in_every_order("row_optimizer_current", *arguments)
    wanted = torch.ops.torchsparse_rec.row_optimizer_current.default(*arguments)
    assert not torch.equal(wanted[:50], weight[:50])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", IDLE_RULES)
def test_rows_that_are_current_keep_their_bits(rule: str) -> None:
    """Keep the bits of rows that are up to date: the kernels do not write them."""
    number, h = RULES[rule]
    random = Random(1)
    weight = random.floats(6, 9, dtype=torch.float32)
    states = states_for(random, number, h, 6, 9, torch.float32)
    last = torch.tensor([4, 9, 4, 0, 4, 3], dtype=torch.int32)
    history = ops.new_history(4)
    for i, x in enumerate(changing(h, 4)):
        ops.row_optimizer_advance_(history, rule=number, hyperparameters=x, step=i + 1)
    written = [weight.clone()], [x.clone() for x in states], [last.clone()]
    fixture.run_in_every_order("row_optimizer_make_current_", *written, history, number, h, 4, 0, [])
    for x, before in zip([*written[0], *written[1]], [weight, *states], strict=True):
        assert torch.equal(x[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert written[2][0].tolist() == [4, 9, 4, 4, 4, 4]


# ---- Bad rows -------------------------------------------------------------------------------------------------------


def _tables(rows: list[list[int]], dim: int = 3) -> list:
    """Return an update of three tables of 4 rows by plain SGD: updated rows become 1 - 0.5 = 0.5."""
    weights = [torch.ones(4, dim) for _ in rows]
    values = [torch.ones(len(x), dim) for x in rows]
    ids = [torch.tensor(x, dtype=torch.int64) for x in rows]
    return [weights, [], [], None, ids, values, None, 0, [0.5, 0.0, 0.0, 0.0, 0.0], 1, 0, False, []]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("rows", "stepped", "text"),
    [
        ([[0, 1], [2, 4], [3]], [[0, 1], [2], [3]], r"rows\[1\]\[1\] must be in \[0, 4\), got 4"),
        ([[0, 1], [], [-3, 3]], [[0, 1], [], [3]], r"rows\[2\]\[0\] must be in \[0, 4\), got -3"),
        ([[1], [0, 2, 1, 3], [9]], [[1], [0, 2, 3], []], r"rows\[1\] must increase.*, got 1 after 2 at position 2"),
        ([[1, 1], [3, 3], [9]], [[1], [3], []], r"rows\[0\] must increase strictly, got 1 after 1 at position 1"),
    ],
)
def test_bad_rows_are_skipped_and_the_first_is_told(
    rows: list[list[int]], stepped: list[list[int]], text: str, order: str
) -> None:
    arguments = _tables(rows)
    fixture.set_order(order)
    fixture.operator("row_optimizer_update_")(*arguments)
    fixture.set_order("ascending")
    with pytest.raises((IndexError, ValueError), match="^row_optimizer_update_: " + text):
        fixture.check_errors()
    for weight, mine in zip(arguments[0], stepped, strict=True):
        assert (weight[:, 0] == 0.5).nonzero().flatten().tolist() == mine


def test_errors_count_positions_in_their_own_table() -> None:
    """Update tables of many blocks, although a launch has few."""
    arguments = _tables([list(range(4)) for _ in range(3)], dim=1)
    arguments[0] = [torch.ones(5000, 1) for _ in range(3)]
    arguments[4] = [torch.arange(5000) for _ in range(3)]
    arguments[5] = [torch.ones(5000, 1) for _ in range(3)]
    arguments[4][1][4321:] += 1
    fixture.operator("row_optimizer_update_")(*arguments)
    with pytest.raises(IndexError, match=r"rows\[1\]\[4999\] must be in \[0, 5000\), got 5000"):
        fixture.check_errors()
    assert arguments[0][1][4321] == 1 and (arguments[0][1] == 0.5).sum() == 4999
    assert (arguments[0][2] == 0.5).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_bad_rows_read_as_zeros(dtype: torch.dtype) -> None:
    weight, last = torch.full((4, 9), 2.0, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    rows, h = torch.tensor([3, 4, -1, 0]), [0.5, 0.0, 0.0, 0.0, 1.0]
    history = ops.new_history(1)
    ops.row_optimizer_advance_(history, rule=0, hyperparameters=h, step=1)
    read = fixture.operator("row_optimizer_current")(weight, [], last, history, rows, 0, h, 1, 0)
    with pytest.raises(IndexError, match=r"^row_optimizer_current: rows\[1\] must be in \[0, 4\), got 4"):
        fixture.check_errors()
    assert read[:, 0].tolist() == [1, 0, 0, 1] and (read == read[:, :1]).all()


# ---- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_addresses_do_not_change_the_bits(shift: int) -> None:
    """Update rows at addresses where no vector may be loaded, or only half of one."""
    sample = update_sample("plain", "adamw", ((5, 8),), steps=4)

    def shifted(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x.clone()
        buffer = x.new_full((x.numel() + shift,), torch.nan)
        return buffer[shift:].copy_(x.reshape(-1)).view(x.shape)

    moved = sample.map_tensors(shifted)
    arguments = list(moved.arguments)
    fixture.operator(sample.operator)(*arguments)
    fixture.check_errors()
    for actual, wanted in zip([*arguments[0], *arguments[1]], _emulated(sample), strict=False):
        assert_same_bits(actual.contiguous(), wanted)


def test_one_launch_for_all_tables() -> None:
    before = fixture.library().tsr_emulated_launches()
    fixture.operator("row_optimizer_update_")(*_tables([[0, 1]] * 20))
    after = fixture.library().tsr_emulated_launches()
    assert after - before <= 3  # two lists are uploaded
    fixture.check_errors()
