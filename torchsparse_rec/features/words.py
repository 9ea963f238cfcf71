"""The words of vocabularies: as ``str`` and as bytes, from lists and from files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_ENCODING = ("utf-8", "surrogateescape")


def encoded(word: str) -> bytes:
    """Encode a word as UTF-8, the inverse of :func:`decoded`, also for bytes that were no UTF-8."""
    return word.encode(*_ENCODING)


def decoded(word: bytes) -> str:
    """Decode UTF-8 for JSON; other bytes become lone surrogates, as in Python's file names."""
    return word.decode(*_ENCODING)


def as_list(words: Any) -> list[Any]:
    """Return the items of a list, an array or a tensor as a list."""
    return words.tolist() if hasattr(words, "tolist") else list(words)


def checked_words(words: Any, key: str) -> tuple[Any, ...]:
    """Return a vocabulary as a tuple, all ``str`` or all ``int``; raise ``ValueError`` if words mix or repeat."""
    words = tuple(as_list(words))
    if not words:
        raise ValueError(f"column {key!r}: vocabulary_list must not be empty")
    strings = isinstance(words[0], (str, bytes))
    for position, word in enumerate(words):
        good = isinstance(word, (str, bytes)) if strings else isinstance(word, (int, np.integer))
        if not good or isinstance(word, bool):
            raise ValueError(
                f"column {key!r}: vocabulary_list must hold strings or integers, and not both, got {word!r} at "
                f"position {position}"
            )
        if not strings and not -(2**63) <= word < 2**63:
            raise ValueError(
                f"column {key!r}: vocabulary_list must hold integers of 64 bits, got {word} at position {position}"
            )
    same = tuple(_text(x, key) for x in words) if strings else tuple(map(int, words))
    check_distinct(same, f"column {key!r}: vocabulary_list")
    return same


def _text(word: str | bytes, key: str) -> str:
    try:
        text = str(word) if isinstance(word, str) else decoded(word)
        encoded(text)
    except UnicodeError as error:
        raise ValueError(
            f"column {key!r}: vocabulary_list must hold strings that can be encoded, got {word!r}"
        ) from error
    return text


def check_distinct(words: Sequence[Any], what: str) -> None:
    """Raise ``ValueError`` if a word is repeated."""
    if len(set(words)) == len(words):
        return
    first: dict[Any, int] = {}
    for position, word in enumerate(words):
        if word in first:
            raise ValueError(
                f"{what} must not hold a word twice, got {word!r} at positions {first[word]} and {position}"
            )
        first[word] = position


def lines_of(file: str | Path) -> list[bytes]:
    """Return a file's lines as TensorFlow's tables read them: without one carriage return at the end of each."""
    lines = [line.removesuffix(b"\r") for line in Path(file).read_bytes().split(b"\n")]
    return lines[:-1] if not lines[-1] else lines


def integer_of(line: bytes) -> int:
    """
    Parse the integer of a line, in the decimal forms that TensorFlow reads.

    Raises:
        ValueError: for any other line, and for integers that do not fit in 64 bits.
    """
    if not re.fullmatch(rb"\s*[+-]?[0-9]+\s*", line):
        raise ValueError("no integer")
    number = int(line)
    if not -(2**63) <= number < 2**63:
        raise ValueError("more than 64 bits")
    return number
