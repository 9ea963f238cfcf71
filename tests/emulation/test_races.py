"""
The race detector (emulation/races.h): it must find the races planted in emulation/races.cu, and no others.

``make races`` runs these tests and the operators' samples, with a build of the emulated kernels for this alone.
"""

from __future__ import annotations

import linecache
import re

import pytest
import torch

from emulation import fixture
from emulation.build import racing
from emulation.test_emulation import ORDERS, _run_case

pytestmark = pytest.mark.skipif(not racing(), reason="`make races` builds what finds races")

# Kernels without races, some of them from emulation/faults.cu.
SOUND = ("reverse", "lanes", "warps", "bytes", "hand_over", "volatile", "release", "lock", "block_count", "atomic_read")
# Each race's memory, and parts of the source lines that the detector must name.
VALUES, TAKEN = "values[threadIdx.x] = ", "= values["
OUT, FROM_OUT, OUT_AGAIN = "out[threadIdx.x] = 1;", "const float taken = ", "out[threadIdx.x] = taken + 1;"
VALUE = {"*value = 3;", "*value += 1;"}
RACES = {
    "missing_barrier": ("shared", {VALUES, TAKEN}),
    "lanes_apart": ("shared", {VALUES, TAKEN}),
    "lanes_after_shuffle": ("shared", {VALUES, TAKEN}),
    "warps_apart": ("global", {OUT, FROM_OUT}),
    "warps_apart_later": ("global", {FROM_OUT, OUT_AGAIN}),
    "block_race": ("global", {"out[0] = out[0] * 2"}),
    "hand_over_without_first_fence": ("global", VALUE),
    "hand_over_without_last_fence": ("global", VALUE),
    "volatile_without_fences": ("global", VALUE),
    "relaxed_release": ("global", VALUE),
    "relaxed_acquire": ("global", VALUE),
    "lock_without_fences": ("global", {"*sum += 1;"}),
    "plain_read": ("global", {"atomicAdd(count, 1u);", "load(cuda::memory_order_relaxed) : *count;"}),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SOUND)
def test_sound_kernel_has_no_race(name: str, order: str) -> None:
    assert _run_case(name, order)[1] == ""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RACES)
def test_planted_race_is_found(name: str, order: str) -> None:
    memory, wanted = RACES[name]
    refused = _run_case(name, order)[1]
    races = re.findall(r"(\w+) memory: .* at (.*):(\d+) by .*, .* at (.*):(\d+) by thread \d+ of block \d+", refused)
    assert races, refused
    lines = [linecache.getline(*site) for race in races for site in ((race[1], int(race[2])), (race[3], int(race[4])))]
    assert {race[0] for race in races} == {memory}
    assert {text for line in lines for text in wanted if text in line} == wanted
    assert all(any(text in line for text in wanted) for line in lines), refused


def test_shared_memory_is_free_before_a_block_sums_again() -> None:
    """Add up one sum more than blocks are launched."""
    n = 7 * 4096
    _, rest = fixture.run_in_every_order("sparse_fill_empty_rows_grad", torch.tensor([5]), torch.ones(n))
    assert rest == n - 1
