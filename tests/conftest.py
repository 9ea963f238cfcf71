"""What all tests share: the folder of samples on the path, the devices, and TensorFlow if it is installed."""

import importlib
import importlib.util
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Set before torch is imported, so that a thread that waits for others sleeps. With several processes on a machine's
# cores, threads that wait in a loop would take half of all time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402

# The repository's root stays off the path: the compat folder must only be importable as torchsparse_rec.compat.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiers  # noqa: E402
from devices import DEVICES, KERNELS  # noqa: E402

if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    # A slow machine is no reason for a test to fail.
    hypothesis.settings.register_profile(
        "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("patient")


@pytest.fixture
def emulated() -> Iterator[Callable[[], int]]:
    """Run the operators' CUDA kernels, emulated, on CPU tensors. Yield a function that counts kernel launches."""
    from emulation import fixture

    with fixture.stand_in() as launches:
        yield launches


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    """Run a test of CPU tensors on the CPU's kernels, and then on the emulated CUDA kernels in their place."""
    if request.param == "emulated":
        request.getfixturevalue("emulated")
    return request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Return the device of a test's tensors, for each device present; for emulated CUDA kernels it is the CPU."""
    if request.param == "emulated":
        request.getfixturevalue("emulated")
        return "cpu"
    return request.param


@pytest.fixture
def restore_threads():
    """Restore torch's number of threads after a test that changes it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_thread():
    """
    Run the module that asks for this fixture with one torch thread.

    On small tables a second thread only waits, on a busy machine for long; a measured time would be the time of
    that wait.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def benchmarks():
    """Return a function that imports a module of the benchmarks; the repository's root stays off the path."""
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = package
    spec.loader.exec_module(package)
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def tensorflow():
    """Return TensorFlow, the oracle, or skip the test. Tests with this fixture carry the marker ``tensorflow``."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("tensorflow")


# The test files of each process, where each has a part.
_PARTS = pytest.StashKey[list[list[str]]]()
# The seed of the random cases of parity tests: new in every run, the same in all of the run's processes.
_PARITY_SEED = int(os.environ.setdefault("TORCHSPARSE_REC_PARITY_SEED", str(secrets.randbelow(2**31))))


@pytest.fixture(scope="session")
def parity_seed() -> int:
    """Return the seed of the parity check's random cases; pytest prints it at the top of its report."""
    return _PARITY_SEED


def pytest_report_header() -> list[str]:
    """Return the seed that repeats a failure, and which tests are left out."""
    lines = [f"parity seed: {_PARITY_SEED}"]
    return lines if torch.cuda.is_available() else [*lines, "no NVIDIA GPU: the tests marked cuda are left out"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tests/tiers.py."""
    parser.addoption("--costs", type=Path, help="write the processor's seconds of each test to this file")
    parser.addoption(
        "--touched", default="", help='test files that get the mark "touched", separated by commas, or "everything"'
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure each test's cost if ``--costs`` is given."""
    if config.option.costs:
        config.pluginmanager.register(tiers.Costs(), "costs")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """With ``-n N --dist each``, give each process its part of the files: one process divides them, for all."""
    options = node.config.option
    if options.dist == "each":
        if _PARTS not in node.config.stash:
            node.config.stash[_PARTS] = tiers.parts_of_files(len(options.tx), options.touched)
        parts = node.config.stash[_PARTS]
        node.workerinput["files"] = parts[int(node.workerinput["workerid"].removeprefix("gw")) % len(parts)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files to the other processes that are not in this one's part."""
    files = getattr(config, "workerinput", {}).get("files")
    if files is None or not collection_path.match("test_*.py"):
        return None
    return str(collection_path.relative_to(tiers.FOLDER)) not in files or None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a process knows of daily tests."""
    node.config.stash.setdefault(tiers.DAILY, {}).update(getattr(node, "workeroutput", {}).get("daily", {}))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if daily tests cost too much. Write the measured costs once: in the process that has the others' reports."""
    config = session.config
    daily = config.stash.get(tiers.DAILY, {})
    if hasattr(config, "workerinput"):
        config.workeroutput["daily"] = daily
        return
    if (told := tiers.over_budget(daily)) is not None:
        config.get_terminal_writer().line(f"\n{told[0]}", red=told[1])
        session.exitstatus = session.exitstatus or int(told[1])
    if config.option.costs:
        config.pluginmanager.get_plugin("costs").write(config.option.costs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add to a failed test's report the command that runs this test alone."""
    report = yield
    if report.failed:
        seed = f"TORCHSPARSE_REC_PARITY_SEED={_PARITY_SEED} " if "parity_seed" in item.fixturenames else ""
        report.sections.append(("To see it alone", f"{seed}.venv/bin/pytest '{item.nodeid}'"))
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out GPU tests on a machine without a GPU; mark those that are not daily, and those that are touched."""
    if not torch.cuda.is_available():
        _leave_out(config, items, lambda item: item.get_closest_marker("cuda") is not None)
    tiers.mark(config, items, config.option.touched)
    if importlib.util.find_spec("tensorflow") is None:
        skip = pytest.mark.skip(reason="TensorFlow is not installed")
        for item in items:
            if item.get_closest_marker("tensorflow"):
                item.add_marker(skip)


def _leave_out(config: pytest.Config, items: list[pytest.Item], leave: Callable[[pytest.Item], bool]) -> None:
    out = [item for item in items if leave(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        kept = set(items) - set(out)
        items[:] = [item for item in items if item in kept]
