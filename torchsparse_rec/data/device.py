"""Batches that are on the device, or at least in memory, before they are asked for."""

from __future__ import annotations

import atexit
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

# How a batch travels from the thread: it, the copies' event and the loader's state; or an error; or the end.
_BATCH, _ERROR, _END = "batch", "error", "end"
# Seconds that an iteration which is given up waits for the batch that its thread is taking.
_PATIENCE = 1.0


class DeviceLoader:
    """
    A loader whose batches are prepared, and copied to a device, while the previous ones are in use.

    A thread takes batches from the loader and keeps up to ``depth`` of them ready. For CUDA it copies tensors to
    page-locked memory (unless they are there) and from there to the device, on a stream of its own; the consumer's
    stream waits for the copies, its thread does not. On the CPU batches pass as they are.

    Each iteration begins the loader anew. An error of the loader is raised in its turn, after the batches before it. If
    the iteration is given up, be it by Ctrl-C, or the interpreter exits, the thread ends after the batch that it is
    taking. Who gives up waits for it, but no longer than a second: then what next needs the loader waits, which is
    another iteration, ``set_epoch`` and ``load_state_dict``. An interpreter that exits waits to the end, but for a
    second where Ctrl-C has ended the program.

    Args:
        loader: an iterable of batches: tensors, :class:`~torchsparse_rec.JaggedTensor`,
            :class:`~torchsparse_rec.KeyedJaggedTensor`, whatever else has ``to`` and ``pin_memory``, and dicts, lists
            and tuples of them. Other leaves, such as pyarrow arrays, pass as they are.
        device: where to.
        depth: how many batches are kept ready, at least 1. Default 2.

    Raises:
        ValueError: ``depth`` below 1.

    Example:
        >>> import torch
        >>> loader = DeviceLoader([{"id": torch.tensor([i])} for i in range(3)], "cpu")
        >>> len(loader), [int(batch["id"]) for batch in loader]
        (3, [0, 1, 2])
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"DeviceLoader: depth must be at least 1, got {depth}")
        self.loader, self.device, self.depth = loader, torch.device(device), depth
        self._state: Any = None
        # Iterations that were given up, whose threads may still take a batch.
        self._given_up: list[_Producer] = []

    def __len__(self) -> int:
        """That of the loader."""
        return len(self.loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Of the loader, or of its dataset."""
        self._owner("set_epoch").set_epoch(epoch)
        self._state = None

    def state_dict(self) -> Any:
        """
        The loader's ``state_dict()``, as it was after the batch that was handed out last.

        The loader itself is ahead of the consumer. For a ``DataLoader`` over a
        :class:`~torchsparse_rec.data.PrebatchedDataset` it is the dataset's state after so many batches.

        Raises:
            TypeError: if the loader has none.
        """
        return self._owner("state_dict").state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        """Let the next iteration go on where :meth:`state_dict` was taken."""
        self._owner("load_state_dict").load_state_dict(state)
        self._state = None

    def _owner(self, method: str) -> Any:
        """The loader or its dataset, whichever has the method; no thread uses them any more if it was told to end."""
        self._wait_for_given_up()
        for owner in (self.loader, getattr(self.loader, "dataset", None)):
            if hasattr(owner, method):
                return owner
        raise TypeError(f"DeviceLoader: loader must have {method}, and {type(self.loader).__name__} has none")

    def _states(self) -> Callable[[int], Any]:
        """A function from the number of batches taken in this iteration to the loader's state."""
        if hasattr(self.loader, "state_dict"):
            return lambda delivered: self.loader.state_dict()  # type: ignore[attr-defined]
        dataset = getattr(self.loader, "dataset", None)
        if dataset is None or not hasattr(dataset, "state_dict"):
            return lambda delivered: None
        if getattr(self.loader, "num_workers", 0) == 0:
            return lambda delivered: dataset.state_dict()
        return lambda delivered: dataset.state_dict(delivered)

    def _wait_for_given_up(self) -> None:
        """So that no thread takes from the loader while another, or the caller, uses it."""
        while self._given_up:
            self._given_up[-1].end()
            self._given_up.pop()

    def __iter__(self) -> Iterator[Any]:
        self._wait_for_given_up()
        states = self._states()
        batches = iter(self.loader)
        # Of what begins now: the loader may have come to the end of its last iteration.
        self._state = states(0)
        prepare = _CudaCopies(self.device) if self.device.type == "cuda" else _copy_to(self.device)
        return self._iterate(_Producer(batches, states, prepare, self.depth))

    def _iterate(self, producer: _Producer) -> Iterator[Any]:
        producer.start()
        try:
            while True:
                kind, content, event, state = producer.ready.get()
                if kind == _ERROR:
                    raise content
                self._state = state
                if kind == _END:
                    return
                if event is not None:
                    _wait(content, event, self.device)
                yield content
                # Nothing of it is held here while the next one is waited for.
                del content
        finally:
            self._given_up.append(producer)
            if producer.end(_PATIENCE):
                self._given_up.remove(producer)


class _Producer:
    """
    A thread that takes, prepares and hands over, until the loader ends, fails, or nobody wants more.

    Args:
        batches: the loader's.
        state: from the number of batches taken to the loader's state.
        prepare: from a batch to what is handed over, and the event to wait for.
        depth: how many batches are ready.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        state: Callable[[int], Any],
        prepare: Callable[[Any], tuple[Any, Any]],
        depth: int,
    ) -> None:
        self.ready: queue.Queue = queue.Queue(depth)
        self._stop, self._ended = threading.Event(), threading.Event()
        # The interpreter waits for threads that are no daemons before it calls what ends this one.
        self._thread = threading.Thread(
            target=_produce,
            args=(batches, state, prepare, self.ready, self._stop, self._ended),
            daemon=True,
            name="DeviceLoader",
        )

    def start(self) -> None:
        """Begin."""
        _RUNNING.add(self)
        self._thread.start()

    def end(self, patience: float = math.inf) -> bool:
        """Stop the thread, wait for it so many seconds, and say whether it has ended."""
        self._stop.set()
        until = time.monotonic() + patience
        # A forked process has no thread, and perhaps a queue that is locked for ever.
        while self._thread.is_alive() and not self._ended.is_set() and self._thread is not threading.current_thread():
            # The thread may be waiting for room. What it puts after this is one thing, for which there is room then.
            with suppress(queue.Empty):
                self.ready.get_nowait()
            if time.monotonic() > until:
                return False
            self._ended.wait(0.001)  # not join(), after whose interruption Python 3.11 takes the thread for dead
        _RUNNING.discard(self)
        return True


#: Those that nobody has ended, such as of an iterator that is alive at exit.
_RUNNING: set[_Producer] = set()


@atexit.register
def _end_all() -> None:
    """A thread that the interpreter ends within torch or Arrow, once it is gone, takes the process down."""
    # After Ctrl-C somebody waits for the process to end, and its status is that of a failure anyway.
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    for producer in list(_RUNNING):
        producer.end(_PATIENCE if interrupted else math.inf)


def _produce(
    batches: Iterator[Any],
    state: Callable[[int], Any],
    prepare: Callable[[Any], tuple[Any, Any]],
    ready: queue.Queue,
    stop: threading.Event,
    ended: threading.Event,
) -> None:
    taken = 0
    try:
        while not stop.is_set():
            try:
                batch = next(batches)
            except StopIteration:
                ready.put((_END, None, None, state(taken)))
                return
            taken += 1
            if not stop.is_set():
                ready.put((_BATCH, *prepare(batch), state(taken)))
            del batch
    except BaseException as error:
        ready.put((_ERROR, error, None, None))
    finally:
        ended.set()


def _copy_to(device: torch.device) -> Callable[[Any], tuple[Any, Any]]:
    """Copies without a stream; on the CPU, nothing."""
    if device.type == "cpu":
        return lambda batch: (batch, None)
    return lambda batch: (_map(lambda x: x.to(device), batch), None)


class _CudaCopies:
    """Copies through page-locked memory on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        with torch.cuda.stream(self.stream):
            # The allocator keeps page-locked memory until the copies from it are done.
            moved = _map(lambda x: _pinned(x).to(self.device, non_blocking=True), batch)
            event = torch.cuda.Event()
            event.record(self.stream)
        return moved, event


def _pinned(x: Any) -> Any:
    if isinstance(x, Tensor) and (x.device.type != "cpu" or x.is_pinned()):
        return x
    return x.pin_memory() if hasattr(x, "pin_memory") else x


def _wait(batch: Any, event: Any, device: torch.device) -> None:
    """Let the current stream wait for the copies, and the allocator know that it uses them."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    _map(lambda x: x.record_stream(current) if hasattr(x, "record_stream") else None, batch)


def _map(function: Callable[[Any], Any], batch: Any) -> Any:
    """The same containers with all that has ``to`` replaced; jagged types as wholes, which keeps what they know."""

    def leaf(x: Any) -> Any:
        return function(x) if hasattr(x, "to") else x

    return _pytree.tree_map(leaf, batch, is_leaf=lambda x: hasattr(x, "to"))
