"""Operators whose sizes are known are captured in CUDA graphs and replayed; the others refuse, and say why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from calls import assert_same_bits, call
from cuda_cases import DEVICE, READ_BACK_CASES, STATIC_CASES, mirrored, overwrite
from samples.large_sizes import Build
from samples.operators import SAMPLES
from samples.read_backs import read_back
from samples.sample import Sample

import torchsparse_rec
from torchsparse_rec import nn, ops, optim
from torchsparse_rec.typing import GradMode

T = TypeVar("T")


def capture(function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a call. Return the graph, and the results that each replay writes anew."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        function()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def test_every_operator_is_captured_or_refuses() -> None:
    cases = {case.name.split("-")[0] for case in STATIC_CASES + READ_BACK_CASES}
    assert cases == set(SAMPLES)


@pytest.mark.cuda
@pytest.mark.parametrize("build", STATIC_CASES, ids=lambda build: build.name)
def test_replay_equals_eager(build: Build) -> None:
    """Compare the bits of replay and eager call, on the inputs of the capture and on others written into them."""
    sample = build()
    assert read_back(sample) is None
    calls = [sample.to(DEVICE), mirrored(sample).to(DEVICE)]
    wanted = [[x.clone() for x in call(each)] for each in calls]
    static = sample.to(DEVICE)
    graph, results = capture(lambda: call(static))
    for n in (1, 0, 1):
        overwrite(static, calls[n])
        for result in results:
            result.fill_(1)
        graph.replay()
        for actual, same in zip(results, wanted[n], strict=True):
            assert_same_bits(actual, same)
    torchsparse_rec.check_errors(DEVICE)


def _reading() -> list[Sample]:
    """Return, for each operator that can read back, one call that does so."""
    return [
        next(x for x in samples if read_back(x) is not None and x.representative and "no_entries" not in x.name)
        for samples in SAMPLES.values()
        if any(read_back(x) is not None for x in samples)
    ]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # for calls that begin with a read-back
@pytest.mark.parametrize("sample", _reading(), ids=str)
def test_read_back_refuses_capture(sample: Sample) -> None:
    given = sample.to(DEVICE)
    wanted = [x.clone() for x in call(given)]
    what = read_back(sample)
    assert what is not None
    text = f"{re.escape(what)} is read back from the device, which must not happen while a CUDA graph is captured"
    with pytest.raises(ValueError, match=text), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(given)
    for actual, same in zip(call(given), wanted, strict=True):
        assert_same_bits(actual, same)


@pytest.mark.cuda
def test_errors_of_a_replay_are_told() -> None:
    table, ids = torch.ones(50, 8, device=DEVICE), torch.arange(40, device=DEVICE)
    graph, rows = capture(lambda: ops.embedding(table, ids))
    ids[7] = 50
    graph.replay()
    with pytest.raises(IndexError, match=r"embedding: indices\[7\] must be in \[0, 50\), got 50"):
        torchsparse_rec.check_errors(DEVICE)
    assert rows[7].tolist() == [0.0] * 8 and bool((rows[8] == 1).all())
    ids[7] = 49
    graph.replay()
    torchsparse_rec.check_errors(DEVICE)
    assert bool((rows == 1).all())


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", ["torch", "SGD", "Adagrad", "RowWiseAdagrad"])
def test_training_step_is_captured(name: str, mode: str) -> None:
    """Capture forward, backward and step in one graph; after four replays the table has eager training's bits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2_000, 16, generator=generator)
    batches = torch.randint(0, 2_000, (5, 256, 8), generator=generator).to(DEVICE)
    target = torch.randn(256, 16, generator=generator).to(DEVICE)

    def training() -> tuple[nn.EmbeddingBag, Callable[[torch.Tensor], None]]:
        fused = name != "torch"
        grad_mode: GradMode = "fused" if fused else "dense"
        module = nn.EmbeddingBag(2_000, 16, mode=mode, _weight=weight.to(DEVICE, copy=True), grad_mode=grad_mode)
        if fused:
            optimizer = getattr(optim, name)(module.parameters(), lr=0.5, in_backward=True)
        else:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)

        def step(ids: torch.Tensor) -> None:
            torch.nn.functional.mse_loss(module(ids), target).backward()
            optimizer.step()
            optimizer.zero_grad()

        return module, step

    eager, step = training()
    for ids in batches:
        step(ids)
    captured, step = training()
    static = batches[0].clone()
    graph, _ = capture(lambda: step(static))  # the warm-up trains on the first batch; the capture itself does not run
    for ids in batches[1:]:
        static.copy_(ids)
        graph.replay()
    torchsparse_rec.check_errors(DEVICE)
    assert_same_bits(captured.weight.detach(), eager.weight.detach())


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("grad_mode", ["fused", "sparse"])
def test_a_step_that_depends_on_its_number_refuses_capture(grad_mode: GradMode) -> None:
    def training() -> tuple[nn.Embedding, Callable[[], None]]:
        table = nn.Embedding.from_pretrained(torch.ones(9, 4, device=DEVICE), freeze=False, grad_mode=grad_mode)
        optimizer = optim.Adam(table.parameters(), lr=0.5, in_backward=True)

        def step() -> None:
            table(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return table, step

    ids = torch.tensor([1, 2, 2], device=DEVICE)
    (eager, alone), (table, step) = training(), training()
    step()
    with pytest.raises(RuntimeError, match="a CUDA graph must not capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        table(ids)
    for each in (step, alone, alone):
        each()
    assert_same_bits(table.weight.detach(), eager.weight.detach())
