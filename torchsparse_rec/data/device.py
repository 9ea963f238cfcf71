"""Bring batches to the device, or at least into memory, before they are asked for."""

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

from .._torch import pytree

# An item that the thread hands over: a batch, with the copies' event and the loader's state; an error; or the end.
_BATCH, _ERROR, _END = "batch", "error", "end"
# Seconds that an abandoned iteration waits for the batch that its thread is taking.
_PATIENCE = 0.5


class DeviceLoader:
    """
    A loader whose batches are prepared, and copied to a device, while the previous ones are in use.

    A thread takes batches from the loader and keeps up to ``depth`` of them ready. For CUDA it copies tensors to
    page-locked memory (unless they are there) and from there to the device, on its own stream. The consumer's stream
    waits for the copies; its thread does not. On the CPU batches pass unchanged.

    Each iteration begins the loader anew. An error of the loader is raised in its turn, after the batches before it.
    If the iteration is abandoned, by Ctrl-C for example, or the interpreter exits, the thread ends after the batch that
    it is taking. The abandoned iteration waits for that batch for half a second at most; the next iteration,
    ``set_epoch`` and ``load_state_dict`` wait for the rest. An interpreter that exits waits until the thread has ended,
    or half a second if Ctrl-C has ended the program.

    Args:
        loader: an iterable of batches: tensors, :class:`JaggedTensor`,
            :class:`KeyedJaggedTensor`, other objects with ``to`` and ``pin_memory``, and dicts, lists
            and tuples of them. Other leaves, such as pyarrow arrays, pass unchanged.
        device: the device to which batches are copied.
        depth: the number of batches that are kept ready, at least 1. Default 2.

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
        # The producers of abandoned iterations, whose threads may still take a batch.
        self._given_up: list[_Producer] = []

    def __len__(self) -> int:
        """Return the loader's length."""
        return len(self.loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the loader, or else of its dataset."""
        self._owner("set_epoch").set_epoch(epoch)
        self._state = None

    def state_dict(self) -> Any:
        """
        Return the loader's ``state_dict()`` after the batch that was handed out last.

        The loader itself is ahead of the consumer. For a ``DataLoader`` over a
        :class:`~torchsparse_rec.data.PrebatchedDataset`, the state is the dataset's after the batches that were handed
        out.

        Raises:
            TypeError: neither the loader nor its dataset has ``state_dict``.
        """
        return self._owner("state_dict").state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        """Make the next iteration go on where :meth:`state_dict` was taken."""
        self._owner("load_state_dict").load_state_dict(state)
        self._state = None

    def _owner(self, method: str) -> Any:
        """Return the loader or its dataset, whichever has the method, once no abandoned iteration's thread uses it."""
        self._wait_for_given_up()
        for owner in (self.loader, getattr(self.loader, "dataset", None)):
            if hasattr(owner, method):
                return owner
        raise TypeError(f"DeviceLoader: loader must have {method}, and {type(self.loader).__name__} has none")

    def _states(self) -> Callable[[int], Any]:
        """Return a function from the number of batches taken in this iteration to the loader's state."""
        if hasattr(self.loader, "state_dict"):
            return lambda delivered: self.loader.state_dict()  # type: ignore[attr-defined]
        dataset = getattr(self.loader, "dataset", None)
        if dataset is None or not hasattr(dataset, "state_dict"):
            return lambda delivered: None
        if getattr(self.loader, "num_workers", 0) == 0:
            return lambda delivered: dataset.state_dict()
        return lambda delivered: dataset.state_dict(delivered)

    def _wait_for_given_up(self) -> None:
        """Wait for the threads of abandoned iterations, so that none takes from the loader while another uses it."""
        while self._given_up:
            self._given_up[-1].end()
            self._given_up.pop()

    def __iter__(self) -> Iterator[Any]:
        self._wait_for_given_up()
        states = self._states()
        batches = iter(self.loader)
        # The state before the first batch of this iteration: an old state may be from the last iteration's end.
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
                # The consumer may free the batch while this waits for the next one.
                del content
        finally:
            self._given_up.append(producer)
            if producer.end(_PATIENCE):
                self._given_up.remove(producer)


class _Producer:
    """
    A thread that takes, prepares and hands over batches until the loader ends or fails, or the thread is stopped.

    Args:
        batches: the loader's batches.
        state: a function from the number of batches taken to the loader's state.
        prepare: a function from a batch to the prepared batch, and the CUDA event to wait for or None.
        depth: the most batches that are ready.
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
        # A daemon: the interpreter waits for all other threads before it calls _end_all, which ends this one.
        self._thread = threading.Thread(
            target=_produce,
            args=(batches, state, prepare, self.ready, self._stop, self._ended),
            daemon=True,
            name="DeviceLoader",
        )

    def start(self) -> None:
        """Start the thread."""
        _RUNNING.add(self)
        self._thread.start()

    def end(self, patience: float = math.inf) -> bool:
        """Stop the thread, wait ``patience`` seconds for it at most, and say whether it has ended."""
        self._stop.set()
        until = time.monotonic() + patience
        # A forked process does not have the thread, and its queue may be locked for ever.
        while self._thread.is_alive() and not self._ended.is_set() and self._thread is not threading.current_thread():
            # The thread may be waiting for room in the queue. It puts at most one more item, which then has room.
            with suppress(queue.Empty):
                self.ready.get_nowait()
            if time.monotonic() > until:
                return False
            self._ended.wait(0.001)  # not join(): if it is interrupted, Python 3.11 takes the thread for dead
        if self._ended.is_set() and self._thread is not threading.current_thread():
            self._thread.join()  # what is left of it takes microseconds
        _RUNNING.discard(self)
        return True


#: The producers that have not ended, such as the producer of an iterator that is alive at exit.
_RUNNING: set[_Producer] = set()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter exits: if it ended one within torch or Arrow, the process would crash."""
    # After Ctrl-C somebody waits for the process to end, and its exit status is a failure anyway.
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
    """Return a function that copies batches to a device without its own stream; for the CPU, it copies nothing."""
    if device.type == "cpu":
        return lambda batch: (batch, None)
    return lambda batch: (_map(lambda x: x.to(device), batch), None)


class _CudaCopies:
    """Copies batches to a CUDA device, through page-locked memory and on its own stream."""

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
    """Make the current stream wait for a batch's copies, and tell the allocator that the stream uses them."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    _map(lambda x: x.record_stream(current) if hasattr(x, "record_stream") else None, batch)


def _map(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return a batch with ``function`` applied to every leaf that has ``to``; jagged tensors are leaves as wholes."""

    def leaf(x: Any) -> Any:
        return function(x) if hasattr(x, "to") else x

    return pytree.tree_map(leaf, batch, is_leaf=lambda x: hasattr(x, "to"))
