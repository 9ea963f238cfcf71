"""
Random training programs against dense torch: every optimizer, gradient mode and module, in float64 to 1e-10.

A failure names its seed, prints the program, and the command that runs it alone. Every day has other seeds.
"""

from __future__ import annotations

from collections import Counter

import pytest
from nn.program_runs import run
from nn.programs import CHOICES, KINDS, MODES, draw

A_DAY, ALL = 200, 10_000
pytestmark = pytest.mark.usefixtures("one_thread")


def run_all(first: int, count: int, extreme: bool) -> None:
    """Run programs, and check that nearly all come to their end."""
    ended = sum(run(seed, extreme) for seed in range(first, first + count))
    assert ended >= 0.95 * count


@pytest.mark.always("random training programs, others every day")
def test_programs(parity_seed: int) -> None:
    run_all(parity_seed, A_DAY * 3 // 4, extreme=False)


@pytest.mark.always("random training programs, others every day")
def test_programs_of_extreme_values(parity_seed: int) -> None:
    """Find no infinity or NaN where dense torch is finite, and no NaN where dense torch is infinite."""
    run_all(parity_seed, A_DAY // 4, extreme=True)


@pytest.mark.full
@pytest.mark.parametrize("block", range(ALL // 250))
def test_all_programs(block: int) -> None:
    run_all(250 * block, 250, extreme=block % 5 == 4)


def test_programs_meet_every_choice() -> None:
    """Check that 300 programs have every optimizer, kind and mode, and each step often: fewer would test little."""
    drawn = [draw(seed) for seed in range(300)]
    steps = Counter(name for program in drawn for name, _ in program.steps)
    assert {program.optimizer for program in drawn} == set(CHOICES)
    assert {(program.kind, program.grad_mode) for program in drawn} == {(k, m) for k in KINDS for m in MODES}
    assert min(steps.values()) > 30 and len(steps) == 17


def test_one_seed_draws_one_program() -> None:
    assert str(draw(7)) == str(draw(7)) != str(draw(8))
