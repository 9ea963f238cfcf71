"""A benchmark row: a candidate, its peers, and the check that must pass before anything is timed."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .timing import Call, Pair

# Prepares one side (data in its framework's own memory, a compiled function) and returns the call to time. It is called
# just before the side is timed, and its data is released after that: the peers' tables never pile up.
Make = Callable[[], Call]


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    device: str = "cpu"
    quick: bool = False
    threads: int = 2

    def size(self, full: int, quick: int, cuda: int | None = None) -> int:
        """Return the size of a problem: the row's own, a small one in quick mode, or one that fills a GPU."""
        if self.quick:
            return quick
        return cuda if cuda is not None and self.device == "cuda" else full

    def compositions(self) -> bool:
        """Say whether computations by several of torch's operators are peers: on a GPU, and in quick mode."""
        return self.quick or self.device == "cuda"


class UnavailableError(Exception):
    """An error that says why a peer cannot run here."""


@dataclass(frozen=True)
class Fact:
    """A figure beside the times, such as a peak of memory, with its limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    def passed(self) -> bool | None:
        """Say whether the figure stays under its limit; None without a limit."""
        return None if self.limit is None else self.value < self.limit


@dataclass(frozen=True)
class Case:
    """A row's candidate and peers for given options."""

    ours: Make
    peers: dict[str, Make]
    # Raises AssertionError if the candidate's result differs from the reference's.
    check: Callable[[], None]
    # The bytes that a call must read and write at least, by formula; None where no such count means anything.
    bytes_moved: int | None = None
    # Training samples per call, for rows that are quoted in samples per second, and ids per call.
    samples: int | None = None
    ids: int | None = None
    # The sizes, for rows whose sizes depend on the device.
    sizes: str = ""
    facts: Callable[[], list[Fact]] = list
    # Times our side beside the peer of that name, instead of the calls, where both do not fit in one process.
    pair: Callable[[str], Pair] | None = None


@dataclass(frozen=True)
class CudaTargets:
    """A row's targets on an NVIDIA GPU."""

    # The least share of the copy bandwidth of the same run.
    copy_share: float | None = None
    # The least ratio to the fastest peer.
    fastest_peer: float | None = 1.0
    # The least ratio to each peer.
    peers: dict[str, float] = field(default_factory=dict)
    ids_per_second: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    name: str
    what: str
    build: Callable[[Options], Case]
    # The least ratio to each peer on two cores.
    targets: dict[str, float] = field(default_factory=dict)
    cuda: CudaTargets = CudaTargets()
    # Figures that others have published of their own programs on their own machines.
    published: str = ""
    # Where it can run.
    devices: tuple[str, ...] = ("cpu", "cuda")


def tensorflow(options: Options) -> Any:
    """Import TensorFlow with as many threads as torch; ``UnavailableError`` where it cannot be a peer."""
    if options.device != "cpu":
        raise UnavailableError(f"not run on {options.device}")
    if importlib.util.find_spec("tensorflow") is None:
        raise UnavailableError("TensorFlow is not installed")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
        tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    except RuntimeError:  # TensorFlow has started its threads in an earlier row, as many as are asked for here.
        pass
    return tf


def fbgemm(options: Options) -> Any:
    """Import FBGEMM's module of tables, and return it. Raise ``UnavailableError`` where it cannot be a peer."""
    if options.device != "cpu":
        raise UnavailableError(f"not run on {options.device}")
    if importlib.util.find_spec("fbgemm_gpu") is None:
        raise UnavailableError("fbgemm-gpu-cpu is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of optimizers that its build for the CPU lacks
        import fbgemm_gpu.split_table_batched_embeddings_ops_training as training

    return training
