"""What the examples' commands share: types of flags, and the checks before a run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def widths(text: str) -> tuple[int, ...]:
    """Parse comma-separated widths, at least one."""
    return tuple(positive_int(width) for width in text.split(","))


def seed(text: str) -> int:
    """Parse an integer in ``[0, 2^63)``, which torch's generators take as a seed."""
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 2^63, got {value}")
    return value


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def device(text: str) -> torch.device:
    """Parse the name of a device: ``cpu`` or ``cuda``, and one that this machine has."""
    try:
        chosen = torch.device(text)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be used: {str(error).splitlines()[0]}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {text}")
    return chosen


def check_given(given: Mapping[str, Any], saved: Any, checkpoint: Path) -> None:
    """
    Raise ``ValueError`` if a flag has another value than the one that a checkpoint was trained with.

    Args:
        given: the settings on the command line.
        saved: the checkpoint's, with a method ``learning_rate()`` for where none was given.
        checkpoint: the file, for the message.

    Raises:
        ValueError: if one differs.
    """
    for name, value in given.items():
        trained = saved.learning_rate() if name == "lr" else getattr(saved, name)
        if value != trained:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, but {checkpoint} was trained with {trained}")


def check_writable(folder: Path) -> None:
    """Make a folder. Raise an ``OSError`` that names it if it cannot be made or files cannot be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"the output folder {folder} cannot be written to: {error.strerror or error}") from None


@contextmanager
def ending(parser: argparse.ArgumentParser, *unusable: type[Exception]) -> Iterator[None]:
    """End the process with a line of text if the block raises: code 1 for a loss that is not finite, else 2."""
    try:
        yield
    except FloatingPointError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except unusable as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
