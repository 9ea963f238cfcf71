"""The reader of profiler traces, on a trace made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from device_trace import Step, read_step


def event(cat: str, name: str, ts: float, correlation: int | None = None, dur: float = 1.0) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


# A step from 100 to 200, with others before and after; the device runs later than the host.
STEP = event("user_annotation", "step", 100.0, dur=100.0)
TRACE = [
    {"ph": "M", "name": "process_name"},
    event("cuda_runtime", "cudaMemcpyAsync", 50.0, 1),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 120.0, 1),
    event("cuda_runtime", "cudaDeviceSynchronize", 99.9, 2),
    STEP,
    event("gpu_user_annotation", "step", 150.0, dur=300.0),
    event("cuda_runtime", "cudaLaunchKernel", 110.0, 3),
    event("kernel", "void tsr::pool_kernel", 140.0, 3),
    event("cuda_driver", "cuLaunchKernelEx", 111.0, 4),
    event("cuda_runtime", "cudaMemcpyAsync", 120.0, 5),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 160.0, 5),
    event("cpu_op", "aten::copy_", 130.0),
    event("cuda_runtime", "cudaStreamIsCapturing", 131.0, 6),
    event("cuda_runtime", "cudaMemcpyAsync", 210.0, 9),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 220.0, 9),
    event("cuda_runtime", "cudaDeviceSynchronize", 200.0, 10),
]

TO_HOST, TO_DEVICE = "Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pinned -> Device)"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")


@pytest.mark.parametrize(
    ("more", "copies", "waits"),
    [
        ([], [], []),
        # The device copies long after the step.
        ([event("cuda_runtime", "cudaMemcpyAsync", 150.0, 7), event("gpu_memcpy", TO_HOST, 900.0, 7)], [TO_HOST], []),
        ([event("cuda_runtime", "cudaMemcpy", 150.0, 7), event("gpu_memcpy", TO_DEVICE, 151.0, 7)], [TO_DEVICE], []),
        *(([event("cuda_driver" if x[2] == "S" else "cuda_runtime", x, 199.0, 20)], [], [x]) for x in WAITS),
    ],
)
def test_copies_and_waits_within_the_step(more: list[dict[str, Any]], copies: list[str], waits: list[str]) -> None:
    assert read_step({"traceEvents": [*TRACE, *more]}) == Step(2, copies, waits)


def test_the_range_must_be_there_once() -> None:
    with pytest.raises(ValueError, match="one range 'step', got 0"):
        read_step({"traceEvents": []})
    with pytest.raises(ValueError, match="one range 'step', got 2"):
        read_step({"traceEvents": [STEP, STEP]})
