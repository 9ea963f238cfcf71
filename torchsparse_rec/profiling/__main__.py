"""
Say why a training loop is slow: ``python -m torchsparse_rec.profiling TARGET``.

``TARGET`` is ``module:function`` or ``path/to/script.py:function``; the function takes no arguments and returns
``(step, loader, model, optimizer)``, the arguments of :func:`diagnose`. The steps train the model itself, as the
process ends with the report. ``demo CAUSE`` diagnoses a loop that is slow for a known cause instead.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from .._flags import at_least, device, positive_float
from .._interrupt import run_command
from ._run import diagnose
from .demo import HEALTHY_LOOPS, PLANTS, build


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        loop = _demo(options) if options.target == "demo" else _load(options)
    except TargetError as error:
        parser.error(str(error))
    diagnosis = diagnose(
        *loop, in_place=True, device=options.device, steps=options.steps, warmup=options.warmup, out=options.out
    )
    print(diagnosis.to_json() if options.json else diagnosis.report())
    return 0


class TargetError(Exception):
    """An error in the target: it does not exist, or does not return a training loop."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchsparse_rec.profiling", description="Say why a training loop is slow, and what to change."
    )
    parser.add_argument(
        "target",
        help="module:function or script.py:function that returns (step, loader, model, optimizer), or demo",
    )
    parser.add_argument("cause", nargs="?", help=f"for demo: {', '.join([*PLANTS, *HEALTHY_LOOPS])}")
    parser.add_argument(
        "--strength", type=positive_float, default=3.0, help="for demo: the cost of the cause, in healthy steps"
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="for demo: the seed of sizes and values (default 0)"
    )
    parser.add_argument(
        "--steps", type=at_least(2), help="timed steps of each experiment (default: about 0.4 s of them)"
    )
    parser.add_argument("--warmup", type=at_least(1), default=3, help="steps before (default 3)")
    parser.add_argument("--device", type=device, help="the device of the step (default: the model's)")
    parser.add_argument("--threads", type=at_least(1), help="the number of torch's threads (default: torch's choice)")
    parser.add_argument(
        "--out", type=_folder, help="folder for trace.json, timeline.png, report.txt and diagnosis.json"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the report")
    return parser


def _folder(text: str) -> Path:
    """Make the folder at once and return its path: a diagnosis that cannot be written is not worth its time."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"must be a folder that can be written, got {text}: {error.strerror}"
        ) from None
    return path


def _demo(options: argparse.Namespace) -> tuple[Any, ...]:
    names = [*PLANTS, *HEALTHY_LOOPS]
    if options.cause not in names:
        raise TargetError(f"demo needs one of {', '.join(names)}, got {options.cause}")
    loop = build(options.cause, strength=options.strength, seed=options.seed)
    return loop.step, loop.loader, loop.model, loop.optimizer


def _load(options: argparse.Namespace) -> tuple[Any, ...]:
    """Call the function that the target names, and return its tuple of step, loader, model and optimizer."""
    if options.cause is not None:
        raise TargetError(f"only demo takes a cause, got {options.target} {options.cause}")
    source, colon, name = options.target.rpartition(":")
    if not colon or not source or not name:
        raise TargetError(f"the target must be module:function or script.py:function, got {options.target!r}")
    function = getattr(_module(source), name, None)
    if not callable(function):
        raise TargetError(f"{source} has no function {name!r}")
    loop = function()
    if not isinstance(loop, tuple) or len(loop) != 4:
        raise TargetError(
            f"{options.target} must return (step, loader, model, optimizer), with a function step(model, optimizer, "
            f"batch), got {type(loop).__name__}{f' of {len(loop)}' if isinstance(loop, tuple) else ''}"
        )
    return loop


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        sys.path.insert(0, "")  # the current folder's modules can be imported, as with python -m
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            # The module exists, but something that it imports does not: that error passes through.
            if error.name is None or not (source == error.name or source.startswith(f"{error.name}.")):
                raise
            raise TargetError(f"there is no module {source!r}") from None
        finally:
            sys.path.remove("")
    path = Path(source)
    if not path.is_file():
        raise TargetError(f"there is no file {source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look the module up by its name
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


if __name__ == "__main__":
    run_command(main)
