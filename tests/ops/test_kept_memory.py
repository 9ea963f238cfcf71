"""Large results lie in memory that is kept when they are gone (csrc/memory.h), and are tensors like others."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchsparse_rec import ops

ROWS, DIM = 70_000, 64  # 17 MB


def lookup(value: float) -> Tensor:
    """Return a large result, all of whose elements are ``value``."""
    return ops.embedding(torch.full((3, DIM), value), torch.zeros(ROWS, dtype=torch.long))


def is_kept(result: Tensor) -> bool:
    return not result.untyped_storage().resizable()


needs_kept = pytest.mark.skipif(
    "sanitized" in os.environ.get("TORCHSPARSE_REC_LIBRARY", "")
    or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11),
    reason="nothing is kept under sanitizers, and results only since torch 2.11",
)


def _run(code: str, megabytes: int | None = None) -> str:
    """Return what a fresh process prints that may keep so much."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHSPARSE_REC_KEPT_MB"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if megabytes is not None:
        environment["TORCHSPARSE_REC_KEPT_MB"] = str(megabytes)
    start = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_kept_memory import *\n"
    done = subprocess.run([sys.executable, "-c", start + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_kept
def test_memory_is_used_again_when_its_tensors_are_gone() -> None:
    first, second = lookup(1.0), lookup(2.0)
    assert is_kept(first) and is_kept(second)
    assert first.data_ptr() % 64 == 0
    view, address = first[1:], first.data_ptr()
    del first
    third = lookup(3.0)
    assert third.data_ptr() != address
    assert torch.equal(view, torch.ones(ROWS - 1, DIM))
    assert torch.equal(second, torch.full((ROWS, DIM), 2.0))
    del view
    # What earlier tests have left is as good, and used first; of this size not more than 16 are kept.
    held = [lookup(4.0)]
    while held[-1].data_ptr() != address and len(held) <= 16:
        held.append(lookup(4.0))
    assert held[-1].data_ptr() == address


@needs_kept
def test_results_begin_at_different_places_of_a_page() -> None:
    # More than are kept of this size: most are fresh, and of 64 lines of a page no two in a row are the same.
    results = [lookup(float(k)) for k in range(24)]
    assert all(is_kept(result) and result.data_ptr() % 64 == 0 for result in results)
    assert len({result.data_ptr() % 4096 for result in results}) >= 12
    for k, result in enumerate(results):
        assert bool((result[[0, -1]] == k).all())


@needs_kept
@pytest.mark.parametrize(("megabytes", "kept"), [(None, True), (0, False), (16, False), (40, True)])
def test_the_bound(megabytes: int | None, kept: bool) -> None:
    assert _run("print(is_kept(lookup(1.0)))", megabytes) == str(kept)


@needs_kept
def test_small_results_are_torchs_own() -> None:
    result = ops.embedding(torch.ones(3, 4), torch.zeros(100, dtype=torch.long))
    assert not is_kept(result)


@needs_kept
def test_a_result_cannot_be_made_larger_in_place() -> None:
    result = lookup(1.0)
    assert result.resize_(3, 4).shape == (3, 4)
    with pytest.raises(RuntimeError, match="not resizable"):
        result.resize_(ROWS * 2, DIM)


def test_results_are_tensors_like_others() -> None:
    result, expected = lookup(5.0), torch.full((ROWS, DIM), 5.0)
    array = result.numpy()
    saved = io.BytesIO()
    torch.save(result, saved)
    saved.seek(0)
    taken = torch.empty(0).set_(result)
    copies = [
        torch.load(saved),
        copy.deepcopy(result),
        pickle.loads(pickle.dumps(result)),
        torch.from_dlpack(result),
        taken,
        torch.from_numpy(array),
    ]
    del result, array
    others = [lookup(float(k)) for k in range(3)]
    assert all(torch.equal(each, expected) for each in copies)
    assert all(torch.equal(each, torch.full((ROWS, DIM), float(k))) for k, each in enumerate(others))


def test_a_result_can_be_moved_to_shared_memory() -> None:
    result = lookup(6.0).share_memory_()
    assert result.is_shared()
    assert torch.equal(lookup(7.0), torch.full((ROWS, DIM), 7.0))
    assert torch.equal(result, torch.full((ROWS, DIM), 6.0))


def test_inference_mode() -> None:
    with torch.inference_mode():
        result = lookup(1.0)
    assert result.is_inference()
    assert not lookup(1.0).is_inference()


def test_gradients_flow_and_accumulate() -> None:
    weight = torch.ones(ROWS, DIM, requires_grad=True)
    for _ in range(2):
        ops.embedding(weight, torch.arange(ROWS)).mul(2.0).sum().backward()
    assert torch.equal(weight.grad, torch.full((ROWS, DIM), 4.0))


def test_threads() -> None:
    def work(thread: int) -> bool:
        return all(bool((lookup(float(thread)) == thread).all()) for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


class Looked(Dataset[Tensor]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        return lookup(float(index))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_processes() -> None:
    code = """
from torch.utils.data import DataLoader
lookup(8.0)
loader = DataLoader(Looked(), batch_size=None, num_workers=2, multiprocessing_context="fork")
mine = lookup(9.0)
print([float(x.unique()) for x in loader], float(mine.unique()), float(lookup(3.0).unique()))
"""
    assert _run(code) == "[0.0, 1.0, 2.0] 9.0 3.0"


def test_the_end_of_the_process() -> None:
    """Let results live until the modules are taken apart."""
    assert _run("import builtins; builtins.kept = [lookup(1.0), lookup(2.0)]; print('done')") == "done"
