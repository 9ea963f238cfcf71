"""What all tests share: the folder of samples on the path, the devices, and TensorFlow if present."""

import importlib.util
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# The repository's root stays off the path: the compat folder must only be importable as torchsparse_rec.compat.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from devices import DEVICES, KERNELS  # noqa: E402


@pytest.fixture
def emulated() -> Iterator[Callable[[], int]]:
    """Run the operators' CUDA kernels, emulated, on tensors of the CPU. Gives the number of kernels launched so far."""
    from emulation import fixture

    with fixture.stand_in() as launches:
        yield launches


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    """The CPU's kernels, then the emulated CUDA kernels in their place: for tests whose tensors are on the CPU."""
    if request.param == "emulated":
        request.getfixturevalue("emulated")
    return request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors are, for each device present; for the emulated CUDA kernels too they are on the CPU."""
    if request.param == "emulated":
        request.getfixturevalue("emulated")
        return "cpu"
    return request.param


@pytest.fixture
def restore_threads():
    """Give torch its number of threads back after a test that changed it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_thread():
    """
    Torch with one thread, for the module that asks for it.

    On small tables a second thread only waits, on a busy machine for long; where times are measured, it would be that
    wait that is measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tensorflow():
    """The oracle. Tests that use it carry the marker ``tensorflow`` and are skipped where it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("tensorflow")


# Of the random cases of tests/test_parity.py: others in every run, the same in all of its processes.
_PARITY_SEED = int(os.environ.setdefault("TORCHSPARSE_REC_PARITY_SEED", str(secrets.randbelow(2**31))))


@pytest.fixture(scope="session")
def parity_seed() -> int:
    """The seed of the parity check's random cases, which the report begins with."""
    return _PARITY_SEED


def pytest_report_header() -> str:
    """What a failure needs to be repeated."""
    return f"parity seed: {_PARITY_SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU or TensorFlow where there is none, and say so."""
    skip_cuda = pytest.mark.skip(reason="no NVIDIA GPU")
    skip_tensorflow = pytest.mark.skip(reason="TensorFlow is not installed")
    has_tensorflow = importlib.util.find_spec("tensorflow") is not None
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(skip_cuda)
        if item.get_closest_marker("tensorflow") and not has_tensorflow:
            item.add_marker(skip_tensorflow)
