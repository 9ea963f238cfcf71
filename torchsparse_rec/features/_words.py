"""The words of vocabularies: as text and as bytes, in lists and in files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_ENCODING = ("utf-8", "surrogateescape")


def encoded(word: str) -> bytes:
    """As UTF-8; what :func:`decoded` made of other bytes as these bytes."""
    return word.encode(*_ENCODING)


def decoded(word: bytes) -> str:
    """As str, so that JSON holds it; what is no UTF-8 in lone surrogates, as file names are in Python."""
    return word.decode(*_ENCODING)


def as_list(words: Any) -> list[Any]:
    """Of a list, an array or a tensor."""
    return words.tolist() if hasattr(words, "tolist") else list(words)


def checked_words(words: Any, key: str) -> tuple[Any, ...]:
    """A vocabulary of one kind of words, no two equal: all str, or all int."""
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
    """Refuse a word that is there twice."""
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
    """A file's lines as TensorFlow's tables read them: one carriage return at the end is no part of a line."""
    lines = [line.removesuffix(b"\r") for line in Path(file).read_bytes().split(b"\n")]
    return lines[:-1] if not lines[-1] else lines


def integer_of(line: bytes) -> int:
    """
    The integer of a line, in the decimal forms that TensorFlow reads.

    Raises:
        ValueError: for all else, and for what 64 bits do not hold.
    """
    if not re.fullmatch(rb"\s*[+-]?[0-9]+\s*", line):
        raise ValueError("no integer")
    number = int(line)
    if not -(2**63) <= number < 2**63:
        raise ValueError("more than 64 bits")
    return number
