"""Ctrl-C ends every command of ours within two seconds: with one line, exit code 130 and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Starts a program with the SIGINT of a terminal: a shell starts background jobs with it ignored.
FOREGROUND = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@dataclass
class End:
    """How a process has ended: its exit code, what it has printed, and the seconds after the signal."""

    code: int
    out: str
    err: str
    seconds: float


def interrupted(*arguments: object, begun: Callable[[], bool] | None = None, signals: int = 1) -> End:
    """
    Send SIGINT to a program that has begun, and wait for its end.

    Args:
        arguments: Python's.
        begun: whether it has; default: once it has printed a line.
        signals: how many are sent, a tenth of a second after one another.
    """
    command = [sys.executable, "-c", FOREGROUND, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        first = "" if begun is not None else process.stdout.readline()
        while begun is not None and not begun() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2)
        at = time.monotonic()
        for number in range(signals):
            time.sleep(0.1 * (number > 0))
            process.send_signal(signal.SIGINT)
        # Not communicate(): a process that is left behind would hold the pipes.
        process.wait(timeout=120)
        seconds = time.monotonic() - at
        rest, err = process.communicate(timeout=20)
    finally:
        process.kill()
    return End(process.returncode, first + rest, err, seconds)


def in_time(run: Callable[[], End]) -> End:
    """Return a run's end within two seconds: a machine that is busy may need several runs for one."""
    ends = [run()]
    while ends[-1].seconds > 2 and len(ends) < 3:
        ends.append(run())
    assert ends[-1].seconds <= 2, [end.seconds for end in ends]
    return ends[-1]


# ---- The way itself, without the library ---------------------------------------------------------------------------

PROGRAM = """
import atexit, ctypes, importlib.util, multiprocessing, os, signal, sys, threading, time
spec = importlib.util.spec_from_file_location("interrupt", {path!r})
interrupt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interrupt)
atexit.register(lambda: print("exit handler"))

def begin():
    print("begun")

{program}

interrupt.run_command(main)
"""

PROGRAMS = {
    "in_python": """
def main():
    begin()
    try:
        while True:
            pass
    finally:
        print("cleaned up")
""",
    "waiting_for_a_thread": """
def main():
    thread = threading.Thread(target=time.sleep, args=[3600])  # for which an interpreter's own end would wait
    thread.start()
    begin()
    try:
        thread.join()
    finally:
        print("cleaned up")
""",
    "with_an_error_afterwards": """
def main():
    begin()
    try:
        time.sleep(3600)
    finally:
        print("cleaned up")
        raise ValueError("a consequence")
""",
    "in_a_destructor": """
class Slow:
    def __del__(self):
        begin()
        time.sleep(3600)

def main():
    Slow()
    print("cleaned up")
    return 0
""",
    "deaf": """
def main():
    begin()
    while True:
        try:
            time.sleep(3600)
        except KeyboardInterrupt:
            pass
""",
    "in_c": """
def main():
    begin()
    mutex = ctypes.create_string_buffer(128)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # for ever; a signal does not end it
""",
    "slow_to_clean_up": """
def main():
    begin()
    try:
        time.sleep(3600)
    finally:
        time.sleep(3600)
""",
}
# Where the command does not come back to Python in time, it is ended as it is.
IS_ENDED = ("deaf", "in_c", "slow_to_clean_up")


def program(body: str) -> str:
    return PROGRAM.format(path=str(ROOT / "torchsparse_rec/_interrupt.py"), program=body)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends(name: str) -> None:
    end = in_time(lambda: interrupted("-c", program(PROGRAMS[name])))
    assert (end.code, end.err) == (130, "-c: interrupted\n")
    assert end.out.split("\n", 1)[1] == ("" if name in IS_ENDED else "cleaned up\nexit handler\n")


def test_the_second_signal_disturbs_nothing() -> None:
    body = """
def main():
    begin()
    try:
        time.sleep(3600)
    finally:
        time.sleep(0.5)
        print("cleaned up")
"""
    end = in_time(lambda: interrupted("-c", program(body), signals=3))
    assert (end.code, end.err) == (130, "-c: interrupted\n")
    assert end.out.endswith("cleaned up\nexit handler\n")


@pytest.mark.parametrize("hears", [True, False])
def test_no_worker_process_is_left(hears: bool) -> None:
    """Whether the command ends its workers or cannot any more, and whether the terminal has signalled them too."""
    body = f"""
def work():
    os.kill(os.getpid(), signal.SIGINT)  # as a terminal does to all processes of a command
    time.sleep(3600)

def main():
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, daemon={hears}) for _ in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(0.2)
    print(*(worker.pid for worker in workers))
    while True:
        try:
            time.sleep(3600)
        except KeyboardInterrupt:
            if {hears}:
                raise
"""
    end = in_time(lambda: interrupted("-c", program(body)))
    assert (end.code, end.err) == (130, "-c: interrupted\n")
    assert are_gone(map(int, end.out.split("\n")[0].split()))


def are_gone(processes) -> bool:
    """Say whether processes end within ten seconds."""
    left, until = list(processes), time.monotonic() + 10
    assert left
    while left and time.monotonic() < until:
        left = [process for process in left if is_running(process)]
        time.sleep(0.02)
    return not left


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # who inherits it may be slow to ask for it


def test_a_program_that_is_not_interrupted_is_as_without() -> None:
    body = """
def is_default():
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler

def main():
    print(is_default())
    return 3

def exit():
    for thread in threading.enumerate()[1:]:
        thread.join(10)
    print(is_default(), threading.active_count())

atexit.register(exit)
"""
    done = subprocess.run(
        [sys.executable, "-c", FOREGROUND, "-c", program(body)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "False\nTrue 1\nexit handler\n", "")
    body = "def main():\n    raise ValueError('no')\n"
    done = subprocess.run([sys.executable, "-c", program(body)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: no\n")


def test_where_the_signal_is_ignored_it_stays_so() -> None:
    body = """
def main():
    os.kill(os.getpid(), signal.SIGINT)
    return 4
"""
    ignored = FOREGROUND.replace("SIG_DFL", "SIG_IGN")
    done = subprocess.run(
        [sys.executable, "-c", ignored, "-c", program(body)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (4, "")


# ---- The commands --------------------------------------------------------------------------------------------------

LOOP = """
import os, time
import torch
from torch.utils.data import DataLoader, Dataset
from torchsparse_rec.data import DeviceLoader

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(model, optimizer, batch):
    model(batch).sum().backward()
    optimizer.step()

def multiply(model, optimizer, batch):
    torch.set_num_threads(1)
    print("begun")
    while True:
        torch.ones(6000, 6000) @ torch.ones(6000, 6000)

def batches():
    for _ in range(20):
        yield torch.ones(8, 4)
    print("begun")
    time.sleep(3600)

class Slow(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, number):
        if number > 2:
            print("begun", os.getpid())
            time.sleep(3600)
        return torch.ones(4)

def device_loader():
    return step, DeviceLoader(batches(), "cpu"), model, optimizer

def workers():
    return step, DataLoader(Slow(), batch_size=1, num_workers=2), model, optimizer

def kernel():
    return multiply, batches(), model, optimizer
"""
EXAMPLES = "torchsparse_rec.examples"
COMMANDS = {
    "ncf": f"-m {EXAMPLES}.ncf --dataset generated --output-dir FOLDER",
    "wide_deep": f"-m {EXAMPLES}.wide_deep --rows 1000 --held-out 4096 --threads 2 --output-dir FOLDER",
    "wide_deep-prebatched": f"-m {EXAMPLES}.wide_deep --rows 1000 --samples 16384 --held-out 4096 --epochs 1000 "
    "--prebatched FOLDER/examples.prebatched --output-dir FOLDER",
    "dlrm": f"-m {EXAMPLES}.dlrm --max-cardinality 1000 --held-out 4096 --threads 2 --checkpoint FOLDER",
    "device_loader": "-m torchsparse_rec.profiling FOLDER/loop.py:device_loader",
    "workers": "-m torchsparse_rec.profiling FOLDER/loop.py:workers",
    "kernel": "-m torchsparse_rec.profiling FOLDER/loop.py:kernel",
    "parity": "-m torchsparse_rec.compat.parity --cases 100000",
    "benchmarks": "-m benchmarks unique",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.tensorflow] if name == "parity" else []) for name in COMMANDS]
)
def test_a_command_ends(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    arguments = COMMANDS[name].replace("FOLDER", str(tmp_path)).split()
    end = in_time(lambda: interrupted(*arguments))
    lines = end.err.splitlines()
    assert (end.code, lines[-1]) == (130, f"python -m {arguments[1]}: interrupted"), end
    if name in ("benchmarks", "parity"):  # it says on stderr how far it is, and TensorFlow what it has found
        assert "Traceback" not in end.err
    else:
        assert len(lines) == 1, end.err
    if name == "workers":
        assert are_gone(int(line.split()[1]) for line in end.out.splitlines() if line.startswith("begun"))


def test_a_conversion_ends_without_a_file(tmp_path: Path) -> None:
    path, target = tmp_path / "ratings.csv", tmp_path / "target"
    path.write_bytes(b"user,item,rating\n" + b"123456,7890,0.5\n" * 10_000_000)
    target.mkdir()
    command = f"-m torchsparse_rec.data convert {path} {target}/ratings.parquet --columns user:int64,item".split()
    end = in_time(lambda: interrupted(*command, begun=lambda: any(target.iterdir())))
    assert (end.code, end.err, end.out) == (130, "python -m torchsparse_rec.data: interrupted\n", "")
    assert list(target.iterdir()) == []
