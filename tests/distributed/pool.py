"""Processes that are the ranks of a job: they live for many tests, and run functions of test files by name."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import inspect
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

# A call that has not ended by then hangs; and after a rank's error, which fails the test, the others get a moment.
SECONDS = 120.0
_MOMENT = 2.0
# What a rank is told when all ranks have returned from a call.
_OVER = b"over"
# What the processes have imported before they are forked. The process they are forked from has one thread.
_IMPORTED = ["torch", "torch.distributed", "pytest", "torchsparse_rec"]


class Ended(Exception):
    """The error of a rank that has ended, or did not return, instead of raising an error."""


class FromRank(Exception):
    """The cause of a rank's error that is raised in a test: the traceback there, and what the other ranks did."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass
class Outcome:
    """What a call did on one rank: its value, or an error and the traceback."""

    value: Any = None
    error: Exception | None = None
    text: str = "returned"


class Pool:
    """
    A pool of processes, the ranks of one job; those on the CPU speak by gloo on loopback, with one thread each.

    Args:
        ranks: how many.
        device: ``"cpu"``, or ``"cuda"``: a GPU for each rank, and NCCL.
    """

    def __init__(self, ranks: int, device: str = "cpu") -> None:
        self.ranks, self.alive = ranks, True
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        # As torchrun's agent has it: it outlives each rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            mine, its = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, ranks, device, self._store.port, str(self._dump(rank)), its), daemon=True
            )
            with _one_thread():
                process.start()
            its.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self.alive = False
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self._folder.cleanup()

    # ---- Calls -------------------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
        """
        Call a function on all ranks, and return each rank's result.

        Args:
            function: of the top level of a test file, or of a file beside it.
            arguments: picklable, the same on all ranks.
            seconds: after which a call that has not returned has failed.

        Raises:
            What the first rank that has an error raised, because of :class:`FromRank`. The pool is closed then.
        """
        outcomes = self.outcomes(function, *arguments, seconds=seconds, after_error=_MOMENT)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            self.close()
            # A rank that waits for one with an error does not return: it is not what went wrong.
            raise min(errors, key=lambda error: isinstance(error, Ended)) from FromRank(_told(outcomes))
        return [outcome.value for outcome in outcomes]

    def errors(self, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Exception]:
        """Call a function that must raise on all ranks, and return each rank's error; see :meth:`run`."""
        outcomes = self.outcomes(function, *arguments, seconds=seconds)
        if any(outcome.error is None or isinstance(outcome.error, Ended) for outcome in outcomes):
            self.close()
            raise AssertionError("every rank must raise an error") from FromRank(_told(outcomes))
        return [outcome.error for outcome in outcomes if outcome.error is not None]

    def outcomes(
        self, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS, after_error: float | None = None
    ) -> list[Outcome]:
        """
        Call a function on all ranks, and return what each did.

        Args:
            function: see :meth:`run`.
            arguments: see :meth:`run`.
            seconds: see :meth:`run`.
            after_error: the seconds that the other ranks have after one has raised. Default: as many as all.
        """
        assert self.alive, "the pool is closed: a rank has ended or hung"
        self._send(pickle.dumps((inspect.getsourcefile(function), function.__qualname__, arguments)))
        outcomes: dict[int, Outcome] = {}
        waiting = dict(enumerate(self._pipes))
        end = time.monotonic() + seconds
        while waiting and (ready := wait(waiting.values(), timeout=max(0.0, end - time.monotonic()))):
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                outcomes[rank] = self._outcome(rank, waiting.pop(rank))
                if outcomes[rank].error is not None and after_error is not None:
                    end = min(end, time.monotonic() + after_error)
        hanging = {rank: self._stack(rank) for rank in waiting}
        for rank, text in hanging.items():
            outcomes[rank] = Outcome(None, Ended(f"rank {rank} did not return"), text)
        if any(isinstance(outcome.error, Ended) for outcome in outcomes.values()):
            self.close()
        else:
            self._send(_OVER)
        return [outcomes[rank] for rank in range(self.ranks)]

    def _send(self, message: bytes) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that has ended: its end of the pipe says so later
                pipe.send_bytes(message)

    def _outcome(self, rank: int, pipe: Connection) -> Outcome:
        try:
            return pickle.loads(pipe.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            text = f"ended with the exit code {self._processes[rank].exitcode}\n{self._dump(rank).read_text()}"
            return Outcome(None, Ended(f"rank {rank} {text}"), text)

    def _stack(self, rank: int) -> str:
        """Return where a rank hangs."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        end = time.monotonic() + 5
        # It is written line by line, and the outermost frame of a process comes last.
        while not (text := self._dump(rank).read_text()).endswith("in <module>\n") and time.monotonic() < end:
            time.sleep(0.05)
        return f"did not return:\n{text}"

    def _dump(self, rank: int) -> Path:
        return Path(self._folder.name, f"stack-{rank}")


def _told(outcomes: list[Outcome]) -> str:
    return "\n".join(f"rank {rank} {outcome.text}" for rank, outcome in enumerate(outcomes))


@contextlib.contextmanager
def _one_thread() -> Any:
    """Give the process that is forked no threads: a fork would not have them."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


# ---- The other side: a rank's process --------------------------------------------------------------------------------


def _work(rank: int, ranks: int, device: str, port: int, dump: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    # No test takes the power away from ranks, and tests/checkpoint/test_crash.py sees what is flushed when.
    os.fsync = lambda descriptor: None
    with open(dump, "w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device == "cuda":
            torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", port)
        files: dict[str, ModuleType] = {}
        gc.freeze()  # collections look at what calls have left alone
        with contextlib.suppress(EOFError, BrokenPipeError):  # the pool is closed
            for call in itertools.count():
                path, name, arguments = pickle.loads(pipe.recv_bytes())
                # A job of its own for each call: none meets what another has left, and groups end with their threads.
                dist.init_process_group(
                    "nccl" if device == "cuda" else "gloo",
                    store=dist.PrefixStore(f"call {call}", store),
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=2 * SECONDS),
                )
                dist.barrier()  # a rank that returns at once does not close what others still connect to
                pipe.send_bytes(_called(files, path, name, arguments))
                # No rank ends its groups while another may still use them. They end while the test looks at what came
                # back: gloo's threads look only every 10 ms whether they are to end.
                assert pipe.recv_bytes() == _OVER
                dist.destroy_process_group()
                # A module over ranks is in a circle: until it is found its groups live, three polling threads each.
                gc.collect()


def _called(files: dict[str, ModuleType], path: str, name: str, arguments: Any) -> bytes:
    """Call a function of a file, and return the outcome, pickled."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled", UserWarning)
            if path not in files:
                files[path] = _imported(path)
            return pickle.dumps(Outcome(getattr(files[path], name)(*arguments)))
    except Exception as error:
        text = f"raised an error\n{traceback.format_exc()}"
        try:
            pickle.loads(pickled := pickle.dumps(Outcome(None, error, text)))
            return pickled
        except Exception:
            return pickle.dumps(Outcome(None, RuntimeError(f"{type(error).__name__}: {error}"), text))


def _imported(path: str) -> ModuleType:
    """Import a file, under its module's name where it is on the path, so that its classes are those of all files."""
    found = Path(path)
    folders = [Path(entry).resolve() for entry in sys.path if entry]
    for folder in folders:
        if folder.name == "tests" and folder in found.parents:
            return importlib.import_module(".".join(found.relative_to(folder).with_suffix("").parts))
    spec = importlib.util.spec_from_file_location(found.stem, found)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
