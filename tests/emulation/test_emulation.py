"""The emulation of CUDA itself: it must run sound kernels, and notice the faults planted in emulation/faults.cu."""

from __future__ import annotations

import ctypes

import pytest

from emulation import fixture
from emulation.build import racing, sanitized

ORDERS = ("ascending", "descending", "random")


def _run_case(name: str, order: str = "ascending", kind: str = "f") -> tuple[list, str]:
    """Return the 256 bytes that the case leaves, as numbers of a ``struct`` kind, and the error that was refused."""
    out = (ctypes.c_uint8 * 256)()
    fixture.set_order(order)
    refused = fixture.library().tsr_emulated_fault(name.encode(), out).decode()
    return list(memoryview(out).cast("B").cast(kind)), refused


SOUND = {
    "write_inside": {63: 1.0},
    "shared_inside": {},
    "reverse": {0: 63.0, 1: 62.0, 63: 0.0},
    "partial_barrier": {0: 1.0, 39: 1.0, 40: 0.0},
    "shuffle": {0: 31.0, 1: 0.0, 31: 30.0},
    # 496 (sum) + 5 (ballot) + 1000 (all) + 2000 (any) + the neighbours' numbers
    "collectives": {0: 3502.0, 1: 3503.0, 30: 3561.0, 31: 3562.0},
    "block_count": {0: 1.0, 3: 1.0},
    "dynamic_shared": {0: 3.0, 63: 3.0},
    "sort_side_by_side": {},
}
REFUSED = {
    "write_behind": "wrote behind the end of a tensor",
    "write_before": "wrote before the start of a tensor",
    "shared_behind": "wrote outside a shared array",
    "diverging_barrier": "wait at different barriers",
    "mixed_wait": "waits for ever",
    "shuffle_outside_mask": "outside the mask",
    "shuffle_from_returned": "takes no part",
    "foreign_mask": "not in its own mask",
    "large_shared": "49156 bytes of shared memory",
    "large_dynamic_shared": "49153 bytes of shared memory",
    "large_block": "1025 threads",
    "large_grid": "a launch of 2147483648 blocks",
    "activemask": "say which lanes take part",
    "shuffle_among_12": "a shuffle among 12 lanes",
    "misaligned_load": "16 bytes at an address that is no multiple of them",
    "misaligned_atomic": "4 bytes at an address that is no multiple of them",
    "sort_by_too_many_bits": "bits [0, 33) of a key of 32",
    "sort_from_bit_minus_one": "bits [-1, 8) of a key of 32",
    "sort_by_no_bits": "bits [8, 8) of a key of 32",
    "sort_with_little_scratch": "bytes of temporary storage",
    "sort_with_scratch_of_fewer": "bytes of temporary storage",
    "sort_with_shifted_scratch": "temporary storage that is not aligned",
    "sort_in_place": "buffers overlap",
    "sort_overlapping": "buffers overlap",
    "scan_overlapping": "buffers overlap",
    "select_over_flags": "buffers overlap",
    "run_lengths_in_place": "buffers overlap",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SOUND)
def test_sound_kernel_runs(name: str, order: str) -> None:
    values, refused = _run_case(name, order)
    assert refused == ""
    assert {at: values[at] for at in SOUND[name]} == SOUND[name]


# A sanitizer would end the process at the fault itself.
needs_guards = pytest.mark.skipif(sanitized(), reason="AddressSanitizer watches the ends of tensors")
CAUGHT_BY_SANITIZER = {"write_behind", "write_before"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=needs_guards if x in CAUGHT_BY_SANITIZER else []) for x in REFUSED]
)
def test_planted_fault_is_refused(name: str, order: str) -> None:
    assert REFUSED[name] in _run_case(name, order)[1]


@pytest.mark.skipif(racing(), reason="races are refused: test_races.py")
@pytest.mark.parametrize("name", ["missing_barrier", "block_race"])
def test_planted_race_gives_other_bits_in_another_order(name: str) -> None:
    results = [_run_case(name, order) for order in ORDERS]
    assert all(refused == "" for _, refused in results)
    assert len({str(values) for values, _ in results}) > 1
