"""On CUDA nothing waits for the device, and nothing is copied to or from the host, except documented read-backs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calls import call
from cuda_cases import DEVICE, sync_debug_mode
from device_trace import Step, read_step
from samples.operators import REPRESENTATIVE, TWENTIES
from samples.read_backs import READ_BACKS, read_back
from samples.sample import Sample

import torchsparse_rec
from torchsparse_rec import nn

SOURCES = sorted((Path(__file__).resolve().parents[2] / "csrc/cuda").glob("*.cu*"))
# These are read only by calls that fail, for the error.
FAILING = {"a row out of range", "an id out of range"}
QUIET = [sample for sample in REPRESENTATIVE if read_back(sample) is None]
# Samples that surely read something back.
READING = [x for x in REPRESENTATIVE if x not in QUIET and not re.search("no_entries|only_empty", x.name)]


def test_every_read_back_is_documented() -> None:
    """Compare the read-backs in the kernels' sources with those that the samples' files name."""
    calls = re.findall(r"\bread_back(?:<\w+>)?\([^;]*?\"([^\"]+)\"", "".join(path.read_text() for path in SOURCES))
    assert set(calls) - FAILING == {known.what for known in READ_BACKS.values()}
    assert {sample.operator for sample in READING} == set(READ_BACKS)


@pytest.mark.cuda
@pytest.mark.parametrize("sample", QUIET, ids=str)
def test_operator_does_not_wait(sample: Sample) -> None:
    _check_it_does_not_wait(sample)


@pytest.mark.cuda
@pytest.mark.parametrize("run", TWENTIES.values(), ids=TWENTIES)
def test_operator_does_not_wait_either(run: list[Sample]) -> None:
    for sample in run:
        if read_back(sample) is None:
            print(sample)  # pytest shows the last one if the test fails
            _check_it_does_not_wait(sample)


def _check_it_does_not_wait(sample: Sample) -> None:
    given = sample.to(DEVICE)
    torch.cuda.synchronize()
    with sync_debug_mode("error"):
        call(given)
    torchsparse_rec.check_errors(DEVICE)


@pytest.mark.cuda
@pytest.mark.parametrize("sample", READING, ids=str)
def test_read_back_is_no_secret(sample: Sample) -> None:
    """Raise in torch's debug mode for each read-back that is documented."""
    given = sample.to(DEVICE)
    torch.cuda.synchronize()
    with sync_debug_mode("error"), pytest.raises(RuntimeError):
        call(given)
    assert len(call(given)) > 0


# ---- Whole training steps -------------------------------------------------------------------------------------------

ROWS, DIM, BAGS, IDS = 1_000, 16, 512, 8

# Module, gradient mode, optimizer.
STEPS = [
    (kind, mode, optimizer)
    for kind in ("Embedding", "EmbeddingBag")
    for mode in ("dense", "auto")
    for optimizer in ("SGD", "Adam")
]
SPARSE_STEPS = [(kind, "sparse", "SGD") for kind in ("Embedding", "EmbeddingBag")]


def training_step(kind: str, mode: str, optimizer: str, device: str) -> tuple[Callable[[], None], torch.Tensor]:
    """Return a training step on inputs that are already on the device, and the table that it trains."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, DIM, generator=generator)
    ids = torch.randint(0, ROWS, (BAGS, IDS), generator=generator).to(device)
    shape = (BAGS, IDS, DIM) if kind == "Embedding" else (BAGS, DIM)
    target = torch.randn(shape, generator=generator).to(device)
    module = getattr(nn, kind)(ROWS, DIM, _weight=weight.to(device), grad_mode=mode)
    updater = getattr(torch.optim, optimizer)(module.parameters(), lr=0.1)
    if mode == "auto":
        module.use_optimizer(updater)

    def step() -> None:
        loss = torch.nn.functional.mse_loss(module(ids), target)
        loss.backward()
        updater.step()
        updater.zero_grad()

    return step, module.weight


@pytest.mark.parametrize(("kind", "mode", "optimizer"), STEPS + SPARSE_STEPS)
def test_steps_are_what_they_should_be(kind: str, mode: str, optimizer: str) -> None:
    """Train on the CPU the steps that the tests below profile: their gradients have the right layout."""
    step, weight = training_step(kind, mode, optimizer, "cpu")
    before, layouts = weight.detach().clone(), []
    weight.register_hook(lambda grad: layouts.append(grad.layout))
    step()
    assert layouts == [torch.sparse_coo if mode == "sparse" else torch.strided]
    assert not torch.equal(weight, before)


@pytest.mark.cuda
@pytest.mark.parametrize(("kind", "mode", "optimizer"), STEPS)
def test_training_step_does_not_wait(kind: str, mode: str, optimizer: str) -> None:
    step, weight = training_step(kind, mode, optimizer, DEVICE)
    step()  # the optimizer makes its state
    torch.cuda.synchronize()
    with sync_debug_mode("error"):
        for _ in range(3):
            step()
    on_cpu, expected = training_step(kind, mode, optimizer, "cpu")
    for _ in range(4):
        on_cpu()
    # Adam divides by the root of squares, of which some are tiny.
    torch.testing.assert_close(weight.detach().cpu(), expected.detach(), rtol=1e-3, atol=2e-3)


def profiled(step: Callable[[], None], path: Path) -> Step:
    """Return what torch's profiler sees of a step that has run before."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("step"):
            step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    seen = read_step(json.loads(path.read_text()))
    if seen.launches == 0:
        pytest.skip("the profiler sees no CUDA calls on this machine")
    return seen


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:(?s).*[Pp]rofiler")
@pytest.mark.parametrize(("kind", "mode", "optimizer"), STEPS)
def test_training_step_copies_nothing(kind: str, mode: str, optimizer: str, tmp_path: Path) -> None:
    step, _ = training_step(kind, mode, optimizer, DEVICE)
    seen = profiled(step, tmp_path / "trace.json")
    assert (seen.copies, seen.waits) == ([], [])


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:(?s).*[Pp]rofiler")
@pytest.mark.parametrize(("kind", "mode", "optimizer"), SPARSE_STEPS)
def test_sparse_training_step_reads_one_number_back(kind: str, mode: str, optimizer: str, tmp_path: Path) -> None:
    step, _ = training_step(kind, mode, optimizer, DEVICE)
    seen = profiled(step, tmp_path / "trace.json")
    assert len(seen.copies) == 1 and "DtoH" in seen.copies[0]
    assert len(seen.waits) <= 1  # none where the copy itself waits
