"""The reader of traces: of a CPU's as torch.profiler records it, and of a GPU's as recorded events."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from torchsparse_rec.profiling import diagnose
from torchsparse_rec.profiling._trace import DENSE, LOADER, LOOKUP, STEP, read_profile

NODE = "autograd::engine::evaluate_function: "


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **arguments: Any) -> dict[str, Any]:
    """Return one event of a trace, with times in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": arguments}


def mark(name: str, ts: float, dur: float) -> dict[str, Any]:
    return event(name, ts, dur, "user_annotation")


def copy_of(count: int, type_: str = "float") -> dict[str, Any]:
    return {"Input Dims": [[count], []], "Input type": [type_, "Scalar"]}


# A loader of 1 ms, then a step of 10 ms.
CPU = [
    {"ph": "M", "name": "process_name"},
    mark(LOADER, 0, 1000),
    event("aten::clone", 100, 400, **copy_of(1000)),
    event("aten::copy_", 150, 300, **copy_of(1000)),
    mark(STEP, 1000, 10_000),
    event("aten::_to_copy", 1100, 500, **copy_of(4000, "long int")),
    event("aten::copy_", 1150, 300, **copy_of(4000, "long int")),
    event("aten::_to_copy", 1700, 5, **copy_of(1)),  # a scalar: no copy to speak of
    mark(LOOKUP, 2000, 1000),
    event("torchsparse_rec::embedding_collection", 2100, 800),
    event("aten::clone", 2200, 100, **copy_of(5000)),  # the lookup's own business
    mark(DENSE, 3000, 1500),
    event("aten::addmm", 3100, 1200),
    event("aten::item", 4600, 50),
    event("aten::_local_scalar_dense", 4610, 30),
    event(NODE + "AddmmBackward0", 5000, 2000),
    event("aten::mm", 5100, 1500),
    event(NODE + "ToCopyBackward0", 7000, 400),
    event("aten::_to_copy", 7050, 300, **copy_of(2000)),
    event(NODE + "_FusedBackward", 7500, 1000),
    event("torchsparse_rec::embedding_collection_backward", 7600, 800),
    mark("Optimizer.step#SGD.step", 9000, 1500),
    event("aten::item", 9100, 10),
    event("aten::add_", 20_000, 100),  # after the step
]


def test_where_the_time_of_a_step_goes():
    profile = read_profile({"traceEvents": CPU})
    assert (profile.steps, profile.step_ms) == (1, 10.0)
    expected = {"loader": 1.0, "lookup": 1.0, "dense": 1.5, "lookup backward": 1.0, "other backward": 2.4}
    expected |= {"optimizer": 1.5, "other": 2.6}
    assert profile.host_ms == pytest.approx(expected)
    assert profile.product_ms == pytest.approx(2.7)
    assert profile.lookups == 1
    assert profile.share("lookup") == pytest.approx(0.1)
    assert profile.step_products == [pytest.approx(2.7)] and profile.product_share() == pytest.approx(0.27)
    assert profile.step_copies == [pytest.approx(0.8)] and profile.copy_share() == pytest.approx(0.08)
    assert profile.device_ms == {} and profile.waits == {}
    assert profile.reads == {"aten::item": 1}  # but not what the optimizer reads back
    assert profile.spans[0] == ("loader", 0.0, 1.0)
    assert ("lookup backward", 7.5, 8.5) in profile.spans and ("optimizer", 9.0, 10.5) in profile.spans


def test_copies_are_counted_once_and_only_where_they_are_needless():
    copies = read_profile({"traceEvents": CPU}).copies
    assert set(copies) == {"loader", "step"}
    assert (copies["loader"].count, copies["loader"].bytes, copies["loader"].ms) == (1, 4000, pytest.approx(0.4))
    assert (copies["step"].count, copies["step"].bytes) == (2, 8 * 4000 + 4 * 2000)
    assert copies["step"].ms == pytest.approx(0.8)


# The same step on a GPU: the host launches, a thread of autograd's runs the backward, the device runs later.
CUDA = [
    mark(LOADER, 0, 500),
    mark(STEP, 500, 4000),
    event("aten::_to_copy", 600, 300, **copy_of(4000)),
    event("cudaMemcpyAsync", 650, 200, "cuda_runtime", correlation=1),
    event("cudaStreamSynchronize", 860, 30, "cuda_runtime", correlation=2),
    mark(LOOKUP, 1000, 200),
    event("cudaLaunchKernel", 1050, 10, "cuda_runtime", correlation=3),
    mark(DENSE, 1300, 200),
    event("aten::addmm", 1310, 100),
    event("cudaLaunchKernel", 1320, 10, "cuda_runtime", correlation=4),
    event(NODE + "AddmmBackward0", 1600, 300, tid=2),
    event("aten::mm", 1610, 200, tid=2),
    event("cuLaunchKernelEx", 1620, 10, "cuda_driver", tid=2, correlation=5),
    mark("Optimizer.step#Adam.step", 2000, 200),
    event("cudaLaunchKernel", 2050, 10, "cuda_runtime", correlation=6),
    event("aten::item", 2500, 1900),
    event("aten::_local_scalar_dense", 2510, 1880),
    event("cudaMemcpyAsync", 2520, 10, "cuda_runtime", correlation=7),
    event("cudaStreamSynchronize", 2540, 1800, "cuda_runtime", correlation=8),
    event("cudaLaunchKernel", 9000, 10, "cuda_runtime", correlation=99),  # after the step
    event("Memcpy HtoD (Pageable -> Device)", 700, 150, "gpu_memcpy", 7, correlation=1, bytes=16_000),
    event("void tsr::pool_kernel", 1100, 300, "kernel", 7, correlation=3),
    event("sm90_gemm", 1400, 500, "kernel", 7, correlation=4),
    event("sm90_gemm", 1900, 700, "kernel", 7, correlation=5),
    event("multi_tensor_apply", 2600, 400, "kernel", 7, correlation=6),
    event("Memcpy DtoH (Device -> Pageable)", 4000, 10, "gpu_memcpy", 7, correlation=7, bytes=4),
    event("late", 9100, 1000, "kernel", 7, correlation=99),
]


def test_the_time_of_a_gpu_goes_to_whoever_launched():
    profile = read_profile({"traceEvents": CUDA})
    expected = {"other": 0.16, "lookup": 0.3, "dense": 0.5, "other backward": 0.7, "optimizer": 0.4}
    assert profile.device_ms == pytest.approx(expected)
    assert profile.product_ms == pytest.approx(1.2)
    assert profile.share("dense") == pytest.approx(0.5 / 2.06)
    assert profile.product_share() == pytest.approx(1.2 / 2.06)


def test_copies_between_host_and_device_and_what_waited_for_them():
    profile = read_profile({"traceEvents": CUDA})
    assert (profile.copies["HtoD"].count, profile.copies["HtoD"].bytes) == (1, 16_000)
    assert (profile.copies["DtoH"].count, profile.copies["DtoH"].bytes) == (1, 4)
    assert profile.pageable == 2
    assert profile.waits == {"aten::_to_copy": 1, "aten::_local_scalar_dense": 1}
    assert profile.wait_ms == pytest.approx(1.83)


def test_the_backward_of_another_thread_is_the_steps():
    profile = read_profile({"traceEvents": CUDA})
    assert profile.host_ms["other backward"] == pytest.approx(0.3)
    assert sum(ms for phase, ms in profile.host_ms.items() if phase != "loader") == pytest.approx(4.0)


def test_a_trace_of_nothing():
    profile = read_profile({"traceEvents": []})
    assert profile.steps == 0 and profile.share("lookup") == 0.0


def test_a_trace_of_this_torch(tmp_path, restore_threads):
    torch.set_num_threads(1)
    model = nn.Sequential(nn.EmbeddingBag(100, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(ids.to(torch.int32).to(torch.int64)).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    found = diagnose(step, [torch.randint(100, (512, 4)) for _ in range(8)], model, optimizer, steps=4, out=tmp_path)
    assert all(found.phases_ms[name] > 0 for name in ("lookup", "dense", "lookup backward", "optimizer"))
    assert (found.copies["step"].count, found.copies["step"].bytes) == (2, 512 * 4 * (8 + 4))
    assert found.reads == {"aten::item": 1.0}
    assert found.bandwidth["lookup"] > 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {STEP, LOADER, LOOKUP, DENSE} <= {e["name"] for e in trace["traceEvents"]}


def test_products_within_products_count_once_and_where_they_are():
    events = [
        mark(STEP, 0, 10_000),
        event("aten::mkldnn_rnn_layer", 100, 3000),
        event("aten::mm", 200, 1000),
        mark(DENSE, 4000, 2000),
        event("aten::addmm", 4100, 1000),
        event(NODE + "ScaledDotProductFlashAttentionForCpuBackward0", 7000, 2000),
        event("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 7100, 1500),
    ]
    profile = read_profile({"traceEvents": events})
    assert profile.product_ms == pytest.approx(3.0 + 1.0 + 1.5)
    assert profile.products_elsewhere() == pytest.approx(0.75)
    assert read_profile({"traceEvents": CUDA}).products_elsewhere() == 0.0


def test_kernels_within_a_fused_product_are_its_own():
    events = [
        mark(STEP, 0, 1000),
        event("aten::_scaled_dot_product_flash_attention", 100, 500),
        event("aten::_flash_attention_forward", 150, 400),
        event("cudaLaunchKernel", 200, 10, "cuda_runtime", correlation=1),
        event("cudaLaunchKernel", 800, 10, "cuda_runtime", correlation=2),
        event("flash_fwd_kernel", 300, 300, "kernel", 7, correlation=1),
        event("add", 900, 100, "kernel", 7, correlation=2),
    ]
    profile = read_profile({"traceEvents": events})
    assert profile.product_share() == pytest.approx(0.75) and profile.products_elsewhere() == 1.0
