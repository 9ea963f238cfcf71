"""What a benchmark row is: a candidate, its peers, and the check that must pass before anything is timed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .timing import Call

# Prepares one side (data in its framework's own memory, a compiled function) and returns the call to time. It is
# called just before the side is timed, and what it made is released after: tables of the peers never pile up.
Make = Callable[[], Call]


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    device: str = "cpu"
    quick: bool = False
    threads: int = 2

    def size(self, full: int, quick: int) -> int:
        """A problem size: the row's own, or a small one in quick mode."""
        return quick if self.quick else full


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
    # Training samples per call, for rows that are quoted in samples per second.
    samples: int | None = None
    facts: Callable[[], list[Fact]] = list


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    name: str
    what: str
    build: Callable[[Options], Case]
    # Least ratio to reach, by peer.
    targets: dict[str, float] = field(default_factory=dict)


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
