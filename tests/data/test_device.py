"""DeviceLoader: order, errors, room, threads that end, and states of the batches handed out."""

import gc
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader

from torchsparse_rec import JaggedTensor, KeyedJaggedTensor
from torchsparse_rec.data import DeviceLoader, PrebatchedDataset, device, write_prebatched


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "DeviceLoader"]


def wait_for(condition):
    """Wait until the condition holds; pytest's time limit ends an endless wait, with a traceback."""
    while not condition():
        time.sleep(0.002)


def test_batches_come_in_order_and_again():
    loader = DeviceLoader([{"x": torch.tensor(i)} for i in range(20)], "cpu")
    for _ in range(2):
        assert [int(batch["x"]) for batch in loader] == list(range(20))
    assert len(loader) == 20
    wait_for(lambda: not threads())


def test_no_more_than_depth_batches_are_taken_ahead():
    taken = []

    def batches():
        for i in range(100):
            taken.append(i)
            yield i

    loader = iter(DeviceLoader(batches(), "cpu", depth=3))
    assert next(loader) == 0
    # Three batches are ready, and the thread holds one more.
    wait_for(lambda: len(taken) == 5)
    time.sleep(0.05)
    assert len(taken) == 5
    assert next(loader) == 1
    wait_for(lambda: len(taken) == 6)
    loader.close()


def test_errors_come_after_the_batches_before_them():
    def batches():
        yield 0
        yield 1
        raise KeyError("column")

    loader = iter(DeviceLoader(batches(), "cpu", depth=5))
    assert [next(loader), next(loader)] == [0, 1]
    with pytest.raises(KeyError, match="column"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)


def test_a_loader_that_cannot_begin_raises():
    with pytest.raises(TypeError, match="not iterable"):
        list(DeviceLoader(5, "cpu"))


@pytest.mark.parametrize("how", ["close", "forget"])
def test_giving_up_an_iteration_waits_for_the_thread(how):
    """Wait for the thread to end, so that two threads never iterate over one loader at once."""
    source = (torch.zeros(3) for _ in range(10**9))
    loader = iter(DeviceLoader(source, "cpu", depth=1))
    next(loader)
    assert threads()
    if how == "close":
        loader.close()
    del loader
    gc.collect()
    assert not threads()


def test_an_iteration_that_never_begins_has_no_thread():
    loader = iter(DeviceLoader([1], "cpu"))
    assert not threads()
    del loader


class Slow:
    """A loader that yields 0 and then waits; it counts the iterations that are waiting."""

    def __init__(self):
        self.go, self.inside, self.most = threading.Event(), 0, 0

    def __iter__(self):
        yield 0
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.go.wait()
        self.inside -= 1
        yield 1

    def state_dict(self):
        return self.inside

    def load_state_dict(self, state):
        assert self.inside == 0


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(device, "_PATIENCE", 0.1)
    slow = Slow()
    yield slow
    slow.go.set()
    wait_for(lambda: not threads())


def interrupt():
    """Send SIGINT to the main thread soon, with Python's handler: a shell starts background jobs with it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()


def test_ctrl_c_does_not_wait_for_the_batch(slow):
    loader = DeviceLoader(slow, "cpu", depth=1)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        for _ in loader:
            wait_for(lambda: slow.inside)
            interrupt()
    assert 0.1 <= time.monotonic() - begun < 10 and slow.inside == 1
    # The next iteration waits for the thread, and Ctrl-C interrupts it as well.
    with pytest.raises(KeyboardInterrupt):
        interrupt()
        iter(loader)
    assert slow.inside == 1
    slow.go.set()
    assert list(loader) == [0, 1] and slow.most == 1
    wait_for(lambda: not threads())


@pytest.mark.parametrize("next_use", ["iterate", "load_state_dict"])
def test_what_needs_the_loader_waits_for_an_iteration_that_was_given_up(slow, next_use):
    loader = DeviceLoader(slow, "cpu", depth=1)
    begun = time.monotonic()
    for _ in loader:
        wait_for(lambda: slow.inside)
        break
    gc.collect()
    assert time.monotonic() - begun < 10 and threads()
    threading.Timer(0.1, slow.go.set).start()
    if next_use == "iterate":
        assert list(loader) == [0, 1]
    else:
        loader.load_state_dict(0)
        assert not threads()
    assert slow.most == 1


CTRL_C = """
import os, signal, threading, time
from torchsparse_rec.data import DeviceLoader

signal.signal(signal.SIGINT, signal.default_int_handler)

def batches():
    yield 0
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(3600)

for _ in DeviceLoader(batches(), "cpu"):
    pass
"""


def test_a_program_that_ctrl_c_ends_does_not_wait_for_the_batch():
    done = subprocess.run([sys.executable, "-c", CTRL_C], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGINT and done.stderr.endswith("KeyboardInterrupt\n"), done.stderr


EXIT = """
import atexit, sys, threading
# What is registered first is called last.
atexit.register(lambda: print([thread.name for thread in threading.enumerate()], flush=True))
import torch
from torchsparse_rec.data import DeviceLoader, PrebatchedDataset

loader = DeviceLoader(PrebatchedDataset(sys.argv[1], verify="always", threads=2), "cpu", depth=2)
batches = iter(loader)
next(batches)
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("how", "compression"), [("end", None), ("raise", "zstd")])
def test_the_interpreter_waits_for_the_thread(how, compression, tmp_path):
    """Wait for the loader's thread at exit: ending it within torch or Arrow would abort the process."""
    write_prebatched(tmp_path / "f", ({"x": torch.rand(1000)} for _ in range(50)), compression=compression)
    done = subprocess.run([sys.executable, "-c", EXIT, tmp_path / "f", how], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3 if how == "raise" else 0, "['MainThread']\n", "")


def test_depth_is_checked():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        DeviceLoader([], "cpu", depth=0)


Pair = namedtuple("Pair", "first second")


def test_everything_with_tensors_travels():
    """Move everything with tensors to a device that is neither the CPU nor CUDA, and that has no streams."""
    keyed = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 0, 1, 1]))
    text = pytest.importorskip("pyarrow").array(["x"])
    batch = {
        "t": torch.ones(2),
        "j": JaggedTensor(torch.ones(2), lengths=torch.tensor([2])),
        "p": Pair(torch.ones(1), [keyed, 7, text]),
    }
    (moved,) = DeviceLoader([batch], "meta")
    assert moved["t"].device.type == moved["j"].values().device.type == "meta"
    assert isinstance(moved["p"], Pair) and moved["p"].first.device.type == "meta"
    keyed, seven, same = moved["p"].second
    assert keyed.values().device.type == "meta" and keyed.keys() == ["a", "b"] and seven == 7 and same is text
    (untouched,) = DeviceLoader([batch], "cpu")
    assert untouched is batch


# ---- States ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("device") / "f.arrow"
    write_prebatched(path, ({"x": torch.full((3,), i)} for i in range(12)))
    return path


def numbers(batches):
    return [int(batch["x"][0]) for batch in batches]


@pytest.mark.parametrize("kind", ["dataset", "DataLoader", "two workers"])
@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_a_state_is_that_of_the_last_batch_handed_out(kind, cut, path):
    def make():
        dataset = PrebatchedDataset(path, shuffle=True)
        if kind == "dataset":
            return DeviceLoader(dataset, "cpu", depth=3)
        workers = 2 if kind == "two workers" else 0
        return DeviceLoader(DataLoader(dataset, batch_size=None, num_workers=workers), "cpu", depth=3)

    loader = make()
    loader.set_epoch(2)
    expected = numbers(loader)
    batches = iter(loader)
    begun = numbers(next(batches) for _ in range(cut))
    state = loader.state_dict()
    batches.close()
    again = make()
    again.load_state_dict(state)
    rest = again.state_dict()
    assert rest["position"] == state["position"] == cut
    assert begun + numbers(again) == expected
    assert again.state_dict()["position"] == 12


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_state_of_a_complete_epoch_does_not_repeat_it(workers, path):
    def make():
        dataset = PrebatchedDataset(path, shuffle=True)
        loader = dataset if workers is None else DataLoader(dataset, batch_size=None, num_workers=workers)
        return DeviceLoader(loader, "cpu")

    loader = make()
    expected = numbers(loader)
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    assert numbers(again) == [] and again.state_dict()["position"] == 12
    again.set_epoch(0 if workers is None else 1)
    # set_epoch starts an epoch anew, whatever was handed out before.
    assert again.state_dict()["position"] == 0
    assert sorted(numbers(again)) == sorted(expected)


def test_loaders_without_states_say_so():
    loader = DeviceLoader([1, 2], "cpu")
    assert list(loader) == [1, 2]
    with pytest.raises(TypeError, match="loader must have state_dict, and list has none"):
        loader.state_dict()
    with pytest.raises(TypeError, match="loader must have set_epoch, and list has none"):
        loader.set_epoch(1)


# ---- CUDA -----------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_cuda_batches_are_whole_though_the_stream_is_busy():
    batches = [
        {"x": torch.full((1 << 20,), i), "j": JaggedTensor(torch.full((5,), i), lengths=torch.tensor([5]))}
        for i in range(16)
    ]
    busy = torch.rand(2048, 2048, device="cuda")
    sums = []
    for batch in DeviceLoader(batches, "cuda"):
        assert batch["x"].device.type == batch["j"].values().device.type == "cuda"
        busy = busy @ busy / 2048
        sums.append((batch["x"].sum(), batch["j"].values().sum()))
    assert [(int(a), int(b)) for a, b in sums] == [(i << 20, 5 * i) for i in range(16)]


@pytest.mark.cuda
def test_cuda_pinned_batches_are_not_copied_twice():
    batch = torch.ones(1000).pin_memory()
    (moved,) = DeviceLoader([batch], "cuda")
    assert moved.sum() == 1000 and batch.is_pinned()
