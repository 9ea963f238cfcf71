"""Types of the commands' flags, and how a command ends that cannot do what it was asked."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["Parser", "at_least", "check_alone", "checked_device", "device", "ending", "positive_float", "widths"]


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an integer of at least ``least``, and below 2^63."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value < 2**63:
            raise argparse.ArgumentTypeError(f"must be at least {least} and below 2 ** 63, got {text}")
        return value

    return number


def widths(text: str) -> list[int]:
    """Parse comma-separated integers of at least 1, at least one."""
    return [at_least(1)(width) for width in text.split(",")]


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


def checked_device(device: torch.device | str) -> torch.device:
    """Return the device, or raise ``ValueError`` unless it is the CPU or a CUDA device of this machine."""
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be cpu or cuda, got {device!r}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {str(chosen)!r}")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must be one of this machine's, {torch.cuda.device_count()} of CUDA, got {chosen}")
    return chosen


def device(text: str) -> torch.device:
    """Parse a device of this machine."""
    try:
        return checked_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Parser(argparse.ArgumentParser):
    """
    A parser some of whose flags are settings of a run: with its data they decide its bits, and a checkpoint has them.

    Args:
        rates: the learning rate of each optimizer where none is given.
        options: arguments of :class:`argparse.ArgumentParser`.
    """

    def __init__(self, rates: Mapping[str, float], **options: Any) -> None:
        super().__init__(**options)
        self.rates, self.defaults = rates, dict[str, Any]()
        #: What Ctrl-C's line says of the run: how to go on.
        self.when_interrupted: Callable[[], str] = lambda: ""

    def setting(self, flag: str, default: Any, help: str, **options: Any) -> None:
        """Add a setting. Its flag has no default, so that it is known which flags were given."""
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        shown = f"{shown:,}" if isinstance(shown, int) else shown
        action = self.add_argument(flag, help=help if default is None else f"{help}, default {shown}", **options)
        self.defaults[action.dest] = default

    def add_rate(self) -> None:
        """Add the setting of the learning rate, whose default depends on the optimizer."""
        rates = ", ".join(f"{rate:g} for {name}" for name, rate in self.rates.items())
        self.setting("--lr", None, f"learning rate, default {rates}", type=positive_float)

    def add_machine(self, over_ranks: bool = True) -> None:
        """Add the flags of where a run computes, perhaps on several ranks."""
        plans = ("auto", "row_wise", "table_wise", "column_wise", "data_parallel")
        cpu = torch.device("cpu")
        self.add_argument("--device", type=device, default=cpu, help="cpu or cuda, default cpu")
        self.add_argument("--threads", type=at_least(1), help="threads of torch and TensorFlow, default torch's choice")
        if not over_ranks:
            self.set_defaults(plan=None)
            return
        where = "where tables are, under torchrun; default auto: by their sizes"
        self.add_argument("--plan", choices=plans, help=where)

    def add_folder(self, default: str) -> None:
        """Add the flags of where a run writes, and of what it goes on from."""
        self.add_argument("--output-dir", type=Path, help=f"folder for checkpoint/ and curves.png, default {default}")
        where = "resume, bit for bit, from this folder of checkpoints, by default checkpoint/ of --output-dir"
        self.add_argument("--resume", type=Path, nargs="?", const=True, metavar="CHECKPOINT", help=where)

    def settings(self, given: Mapping[str, Any], saved: Mapping[str, Any] | None = None, path: Any = None) -> Any:
        """Return the settings given, else a checkpoint's or the defaults. Raise ``ValueError`` if it has others."""
        given = {name: given[name] for name in self.defaults if given.get(name) is not None}
        settings = argparse.Namespace(**{**self.defaults, **(given if saved is None else saved)})
        settings.lr = settings.lr or self.rates[settings.optimizer]
        for name, value in given.items():
            if value != (trained := getattr(settings, name)):
                raise ValueError(f"--{name.replace('_', '-')} is {value}, but {path} was trained with {trained}")
        return settings


def check_alone(arguments: argparse.Namespace, flag: str, *others: str) -> None:
    """Raise ``ValueError`` if a flag was given together with one that it does not go with."""
    for other in others:
        if getattr(arguments, flag) and getattr(arguments, other):
            raise ValueError(f"--{flag} does not go with --{other.replace('_', '-')}")


@contextmanager
def ending(parser: argparse.ArgumentParser, *unusable: type[Exception]) -> Iterator[None]:
    """End the process with a line of text if the block raises: code 1 for a loss that is not finite, else 2."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(parser.when_interrupted() if isinstance(parser, Parser) else "") from None
    except FloatingPointError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except unusable as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
