"""What a benchmark row is: a candidate, its peers, and the check that must pass before anything is timed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .timing import Call, Pair

# Prepares one side (data in its framework's own memory, a compiled function) and returns the call to time. It is
# called just before the side is timed, and what it made is released after: tables of the peers never pile up.
Make = Callable[[], Call]


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    device: str = "cpu"
    quick: bool = False
    threads: int = 2

    def size(self, full: int, quick: int, cuda: int | None = None) -> int:
        """A problem size: the row's own, a small one in quick mode, or one that fills a GPU."""
        if self.quick:
            return quick
        return cuda if cuda is not None and self.device == "cuda" else full

    def compositions(self) -> bool:
        """Whether what torch can be made to compute in several steps is a peer: on a GPU, and to see that it runs."""
        return self.quick or self.device == "cuda"


class UnavailableError(Exception):
    """A peer that cannot run here; the text says why."""


@dataclass(frozen=True)
class Fact:
    """A figure beside the times, such as a peak of memory, with the limit it should stay under."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    def passed(self) -> bool | None:
        """Whether it stays under its limit; None without one."""
        return None if self.limit is None else self.value < self.limit


@dataclass(frozen=True)
class Case:
    """A row's content for given options."""

    ours: Make
    peers: dict[str, Make]
    # Raises AssertionError where the candidate's result differs from the reference's.
    check: Callable[[], None]
    # The least a call must read and write, by formula; None where no such count means anything.
    bytes_moved: int | None = None
    # Training samples per call, for rows that are quoted in samples per second; likewise ids.
    samples: int | None = None
    ids: int | None = None
    # The sizes at hand, where they depend on the device.
    sizes: str = ""
    facts: Callable[[], list[Fact]] = list
    # Times ours beside the peer of that name, where both do not fit in one process: instead of the calls.
    pair: Callable[[str], Pair] | None = None


@dataclass(frozen=True)
class CudaTargets:
    """What a row should reach on an NVIDIA GPU."""

    # Least share of the copy bandwidth of the same run.
    copy_share: float | None = None
    # Least ratio to the fastest peer.
    fastest_peer: float | None = 1.0
    # Least ratio by peer.
    peers: dict[str, float] = field(default_factory=dict)
    ids_per_second: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    name: str
    what: str
    build: Callable[[Options], Case]
    # Least ratio to reach on two cores, by peer.
    targets: dict[str, float] = field(default_factory=dict)
    cuda: CudaTargets = CudaTargets()
    # What others have published of their own programs on their own machines.
    published: str = ""


def tensorflow(options: Options) -> Any:
    """TensorFlow with the same number of threads, imported on first use; raises where it cannot be a peer."""
    if options.device != "cpu":
        raise UnavailableError(f"not run on {options.device}")
    if importlib.util.find_spec("tensorflow") is None:
        raise UnavailableError("TensorFlow is not installed")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
        tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    except RuntimeError:  # it has started its threads already: as the row before asked
        pass
    return tf


def fbgemm(options: Options) -> Any:
    """FBGEMM's module of embedding tables, imported on first use; raises where it cannot be a peer."""
    if options.device != "cpu":
        raise UnavailableError(f"not run on {options.device}")
    if importlib.util.find_spec("fbgemm_gpu") is None:
        raise UnavailableError("fbgemm-gpu-cpu is not installed")
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as training

    return training
