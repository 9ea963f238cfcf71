"""
What a step's time on a GPU is made of: ``python -m benchmarks.gpu.measure STAGE --json FILE``.

The file is written anew after each figure, so that a stage that is ended keeps what it has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchsparse_rec
from torchsparse_rec import distributed, nn, ops, optim
from torchsparse_rec.files import whole_file

from ..__main__ import choose
from ..interrupt import run_command
from ..machine import machine
from ..rows import Call, Options
from ..timing import copy_gb_per_second

# Rows whose steps are taken apart: small ones, of collections, and of tables that grow.
PROFILED = ["keras_report/fused", "adam/step-fused", "ncf/fused", "wide_deep/sgd", "sok", "dlrm/sparse"]
PROFILED += ["embedding_variable/step", "overhead/collection-step"]
STEPS = 5
# Steps before a capture: the first ones prepare what later ones use.
WARM_UP = 3

Figures = Iterator[tuple[str, Any]]


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def us_of_call(call: Call, device: str, calls: int, waits: bool = False) -> float:
    """Return the microseconds of the host for a call, in a row of calls; with ``waits`` the device's too."""
    times = []
    for _ in range(5):
        wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if waits:
            wait(device)
        times.append((time.perf_counter() - began) / calls * 1e6)
    wait(device)
    return statistics.median(times)


def trace_of(call: Call, device: str) -> list[dict[str, Any]]:
    """Return the events of some calls by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        with torch.profiler.record_function("calls"):
            for _ in range(STEPS):
                call()
        wait(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return json.loads(Path(file.name).read_text())["traceEvents"]  # type: ignore[no-any-return]


def split(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return of one of :func:`trace_of`'s calls: works of the device, their milliseconds, its busy ones, and waits."""
    calls = next(x for x in events if x.get("cat") == "user_annotation" and x["name"] == "calls")
    works = [(x["ts"], x["ts"] + x["dur"]) for x in events if x.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    busy, end = 0.0, float("-inf")
    for begin, stop in sorted(works):
        busy, end = busy + max(0.0, stop - max(begin, end)), max(end, stop)
    asked = [x for x in events if x.get("cat") in ("cuda_runtime", "cuda_driver") and "Synchronize" in x["name"]]
    waits = sum(0 <= x["ts"] - calls["ts"] <= calls["dur"] for x in asked)
    found = {"works": len(works), "work_ms": sum(b - a for a, b in works) / 1e3, "busy_ms": busy / 1e3, "waits": waits}
    return {name: value / STEPS for name, value in found.items()}


# ---- The stages -----------------------------------------------------------------------------------------------------


def about(options: Options) -> Figures:
    """Tell the machine and the versions, if the library has kernels for the device."""
    if options.device == "cuda" and torchsparse_rec.config()["CUDA library"] != "loaded":
        raise RuntimeError(f"the CUDA kernels are not loaded: {torchsparse_rec.config()['CUDA library']}")
    yield from machine(options.device, torch.get_num_threads()).items()


def ceilings(options: Options) -> Figures:
    """Measure what no step can beat: copies, zeros, and calls of operators that do next to nothing."""
    device, small = options.device, torch.zeros(1, device=options.device)
    yield "copy GB/s", copy_gb_per_second(device, options.quick)
    large = torch.empty(1 << (22 if options.quick else 30), device=device)
    yield "zeros GB/s", large.nbytes / us_of_call(large.zero_, device, 5, waits=True) / 1e3
    yield "torch.empty us", us_of_call(lambda: torch.empty(1, device=device), device, 1000)
    yield "add_ us", us_of_call(lambda: small.add_(1), device, 1000)
    yield "add_ us with the device", us_of_call(lambda: small.add_(1), device, 1000, waits=True)


def prices(options: Options) -> Figures:
    """Measure what a launch, a wait and autograd's device thread cost the host."""
    device = options.device
    ids, table = torch.arange(64, device=device) % 9, torch.ones(9, 16, device=device)
    ends = torch.arange(0, 65, 8, device=device)
    calls: dict[str, Call] = {
        "bucketize": lambda: ops.bucketize(table[0], [0.5, 2.0]),
        "embedding": lambda: ops.embedding(table, ids),
        "segment_sum": lambda: ops.segment_sum(table, ids[:9]),
        "embedding_bag": lambda: ops.embedding_bag(table, ids, ends),
    }
    points = []
    for name, call in calls.items():
        points.append((split(trace_of(call, device))["works"], us_of_call(call, device, 200)))
        yield f"{name}: works, us", points[-1]
    if len({works for works, _ in points}) > 1:
        line = statistics.linear_regression(*zip(*points, strict=True))
        yield "a launch us, a call without us", [line.slope, line.intercept]
    number = torch.zeros((), device=device)

    def launches() -> None:
        for _ in range(10):
            number.add_(1)

    yield "a wait us", us_of_call(number.item, device, 50)

    def wait_behind() -> None:
        launches()
        number.item()

    both = us_of_call(wait_behind, device, 50)
    yield "a wait behind 10 launches us", both - us_of_call(launches, device, 50)
    for threads, (name, kind) in itertools.product((True, False), (("torch", torch.nn), ("ours", nn))):
        bag: Any = kind.EmbeddingBag.from_pretrained(table.clone(), freeze=False, mode="sum")  # type: ignore[attr-defined]
        step = partial(_forward_and_backward, bag, ids, ends[:-1])
        with torch.autograd.grad_mode.set_multithreading_enabled(threads):
            step()
            thread = "its own thread" if threads else "the caller's thread"
            yield f"{name}: forward, backward in {thread} us", us_of_call(step, device, 100)


def _forward_and_backward(bag: Any, ids: torch.Tensor, offsets: torch.Tensor) -> None:
    bag(ids, offsets).sum().backward()


def profile(options: Options) -> Figures:
    """Split steps into the host's and the device's part."""
    for name in PROFILED:
        for row in choose([name], options.device):
            try:
                call = row.build(options).ours()
                for _ in range(STEPS):
                    call()
                ms = us_of_call(call, options.device, STEPS, waits=True) / 1e3
                found = split(trace_of(call, options.device))
                yield row.name, {"ms": ms, **found, "idle_ms": ms - found["busy_ms"]}
            except Exception as error:  # an error of one row must not stop the others
                yield row.name, f"{type(error).__name__}: {error}"


def capture(options: Options) -> Figures:
    """Replay fused steps from a CUDA graph, beside eager ones, and compare the bits of the tables."""
    rows, batch = options.size(100_000, 100, cuda=1_000_000), options.size(1_000, 16, cuda=8_192)
    batches = [torch.randint(0, rows, (batch, 4), device=options.device) for _ in range(STEPS + 1)]
    for name in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam"):
        sides = [_training(name, rows, options.device) for _ in range(2)]
        for ids in (*[batches[0]] * WARM_UP, *batches[1:]):
            sides[0][1](ids)
        static = batches[0].clone()
        try:
            replay = _captured(partial(sides[1][1], static), options.device)
        except RuntimeError as error:
            if "must not capture" not in str(error):
                raise
            yield name, str(error).splitlines()[0]
            continue
        for ids in batches[1:]:
            static.copy_(ids)
            replay()
        wait(options.device)
        same = torch.equal(sides[0][0].weight, sides[1][0].weight)
        calls: list[Call] = [partial(sides[0][1], batches[0]), replay]
        eager, replayed = (us_of_call(call, options.device, 20, waits=True) for call in calls)
        yield name, {"same bits": same, "eager us": eager, "replay us": replayed}
        if not same:
            raise AssertionError(f"{name}: {STEPS} replays differ from {STEPS} eager steps")


def _training(name: str, rows: int, device: str) -> tuple[nn.EmbeddingBag, Callable[[torch.Tensor], None]]:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(rows, 16, mode="sum", device=device, grad_mode="fused")
    optimizer = getattr(optim, name)(bag.parameters(), lr=0.1, in_backward=True)

    def step(ids: torch.Tensor) -> None:
        bag(ids).square().sum().backward()
        optimizer.step()

    return bag, step


def _captured(step: Call, device: str) -> Call:
    """Take some steps, and capture another one, which is not taken; return what replays it. A CPU has no graphs."""
    stream = torch.cuda.Stream() if device == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    wait(device)
    if device == "cpu":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def ranks(options: Options) -> Figures:
    """Train tables over two ranks that share the device, by gloo, and over one by NCCL; compare them with no ranks."""
    with tempfile.TemporaryDirectory() as folder:
        _over_ranks(0, 0, "", options, folder)
        wanted = torch.load(Path(folder, "0"))
        for count, backend in ((2, "gloo"), (1, "nccl" if options.device == "cuda" else "gloo")):
            torch.multiprocessing.spawn(_over_ranks, (count, backend, options, folder), nprocs=count)
            made = torch.load(Path(folder, str(count)))
            torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)
            same = all(torch.equal(made[name], x) for name, x in wanted.items())
            yield f"{count} over {backend}", "equal bits" if same else "equal to 1e-5"


def _over_ranks(rank: int, count: int, backend: str, options: Options, folder: str) -> None:
    """Train a collection for some steps, as one of so many ranks, each with its part of the batch; 0: without ranks."""
    parts, rows = max(count, 1), options.size(100_000, 100)
    if count:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(f"{folder}/store {count}", count)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    torch.manual_seed(0)
    features = {"users": rows, "items": rows // 10}
    tables = [nn.EmbeddingBagConfig(n, 16, name, feature_names=[name]) for name, n in features.items()]
    model = nn.EmbeddingBagCollection(tables, device=torch.device(options.device), grad_mode="fused")
    if count:
        distributed.shard(model, dist.init_device_mesh(options.device, (count,)))
    optimizer = optim.Adagrad(model.parameters(), lr=0.1, in_backward=True)
    for _ in range(STEPS):
        ids = {name: torch.randint(0, n, (64, 5))[rank::parts].to(options.device) for name, n in features.items()}
        losses = model(ids).values().square().sum(1)
        (distributed.global_mean(losses) if count else losses.mean()).backward()
        optimizer.step()
    whole = distributed.full_state_dict(model) if count else model.state_dict()
    if rank == 0:
        torch.save({name: x.cpu() for name, x in whole.items()}, Path(folder, str(count)))
    if count:
        dist.barrier()  # no rank ends its groups while another uses them
        dist.destroy_process_group()


_ALL = (about, ceilings, prices, profile, capture, ranks)
STAGES: dict[str, Callable[[Options], Figures]] = {function.__name__: function for function in _ALL}


def main(arguments: list[str] | None = None) -> int:
    """Run a stage, and write its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.measure", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    figures = {}
    for name, value in STAGES[given.stage](Options(given.device, given.quick)):
        figures[name] = value
        print(f"{name}: {value}", flush=True)
        with whole_file(given.json) as file:
            file.write((json.dumps(figures, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    run_command(main)
