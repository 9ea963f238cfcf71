"""Print what is installed and found here, and which commands exist: ``python -m torchsparse_rec``."""

from __future__ import annotations

from pathlib import Path

from ._extras import extras
from ._interrupt import run_command
from ._library import show_config
from .examples import __main__ as examples

COMMANDS = {
    "python -m torchsparse_rec.data": "convert files of training data, and print what one contains",
    "python -m torchsparse_rec.serving": "check that a folder's published version is whole",
    "python -m torchsparse_rec.profiling": "diagnose why a training loop is slow, and say what to change",
    "python -m torchsparse_rec.compat.parity": "compare the operators with the installed TensorFlow's",
}
BENCHMARKS = {"python -m benchmarks": "time the operators, the embeddings and the examples beside their peers"}


def _print(title: str, lines: dict[str, str]) -> None:
    width = max(map(len, lines), default=0)
    print(f"\n{title}", *(f"  {name:{width}}  {text}" for name, text in lines.items()), sep="\n")


def main() -> int:
    """Print what :func:`~torchsparse_rec.show_config` does, then the extras and the commands."""
    show_config()
    _print("Extras:", extras() or {"unknown": "pip has not installed torchsparse_rec, which would name them"})
    _print("Examples, which train:", examples.commands())
    _print("Commands:", COMMANDS)
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "benchmarks/__main__.py").is_file():
        _print(f"In {checkout}, where make lists more:", BENCHMARKS)
    print("\nEach command lists its arguments by --help.")
    return 0


if __name__ == "__main__":
    run_command(main)
