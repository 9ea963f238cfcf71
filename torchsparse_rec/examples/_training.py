"""What the training loops share: checkpoints, the progress bar, the picture's file, comparison of two runs' losses."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..data._files import whole_file

T = TypeVar("T")


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint. Only a complete file replaces one of that name. Raise ``OSError`` if it cannot be written."""
    with whole_file(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch cannot close its archive after a failed write, and raises a RuntimeError that does not tell why.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def read_checkpoint(path: Path, form: Any) -> dict[str, Any]:
    """
    Return a checkpoint's content, on the CPU.

    Args:
        path: the file's path.
        form: what its ``"format"`` must be.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no checkpoint of that format.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint {path}") from None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        # torch's message is a paragraph on unpickling, so it is replaced.
        reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        raise ValueError(f"{path} is not a checkpoint of this program, or is truncated{reason}") from None
    if not isinstance(content, dict) or content.get("format") != form:
        raise ValueError(f"{path} is not a checkpoint of this program")
    return content


def check_device(checkpoint: dict[str, Any], device: torch.device | str) -> None:
    """Raise ``ValueError`` if a checkpoint is of another kind of device."""
    if checkpoint["device"] != torch.device(device).type:
        raise ValueError(f"the checkpoint was trained on {checkpoint['device']}, got device {device}")


def progress(batches: Iterable[T], title: str, total: int | None, done: int = 0) -> Iterable[T]:
    """
    Yield the batches, and show a bar of their progress on a terminal: tqdm's if it is installed.

    Args:
        batches: those to come.
        title: printed beside the bar.
        total: how many there are with those done, where it is known; without, there is a bar only by tqdm.
        done: how many are done.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return batches
    try:
        from tqdm import tqdm
    except ImportError:
        return batches if total is None else _plain_progress(batches, title, total, done)
    return tqdm(batches, desc=title, total=total, initial=done, leave=False, mininterval=0.2)


def _plain_progress(batches: Iterable[T], title: str, total: int, done: int) -> Iterator[T]:
    every = max(1, total // 100)
    for number, batch in enumerate(batches, done):
        if number % every == 0:
            print(f"\r{title}: {100 * number // total:3d} %", end="", file=sys.stderr, flush=True)
        yield batch
    print(f"\r{' ' * (len(title) + 8)}\r", end="", file=sys.stderr, flush=True)


@contextmanager
def picture(title: str, path: Path) -> Iterator[tuple[Any, Any]]:
    """
    Yield two axes side by side to draw on. They are written as a PNG when the block ends.

    Args:
        title: text above the picture.
        path: the picture's path; only a complete file replaces one that is there.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    yield left, right
    figure.suptitle(title)
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def largest_difference(losses: Iterable[float], others: Iterable[float]) -> float:
    """
    Return the largest difference between two runs' losses, as many of each; infinite if a loss is not finite.

    Example:
        >>> largest_difference([0.5, 0.25], [0.5, 0.375])
        0.125
        >>> largest_difference([0.5, float("nan"), 0.25], [0.5, 0.375, 0.25])
        inf
    """
    differences = [abs(one - other) for one, other in zip(losses, others, strict=True)]
    # max would pass over a NaN, which is not larger than anything.
    return max(differences) if all(map(math.isfinite, differences)) else math.inf
