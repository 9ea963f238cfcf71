"""Checks of the arguments and vocabulary files of Keras's lookup layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...features.words import lines_of
from ..tensorflow import RaggedTensor, SparseTensor
from .encode import as_inputs, mapped_values

MODES = ("int", "one_hot", "multi_hot", "count", "tf_idf")


def check_arguments(
    max_tokens: Any, num_oov: Any, invert: bool, mode: str, sparse: bool, pad: bool, oov_method: str, idf_weights: Any
) -> None:
    if max_tokens is not None and max_tokens <= 1:
        raise ValueError(f"max_tokens must be above 1, got {max_tokens}")
    if pad and max_tokens is None:
        raise ValueError("max_tokens must be given with pad_to_max_tokens")
    if num_oov < 0:
        raise ValueError(f"num_oov_indices must not be negative, got {num_oov}")
    if oov_method not in ("floormod", "farmhash"):
        raise ValueError(f"oov_method must be 'floormod' or 'farmhash', got {oov_method!r}")
    if mode not in MODES:
        raise ValueError(f"output_mode must be one of {MODES}, got {mode!r}")
    if invert and mode != "int":
        raise ValueError(f"output_mode must be 'int' with invert, got {mode!r}")
    if sparse and mode == "int":
        raise ValueError("sparse must be False for output_mode 'int'")
    if idf_weights is not None and mode != "tf_idf":
        raise ValueError(f"idf_weights must be given for output_mode 'tf_idf' alone, got output_mode {mode!r}")


def checked_salt(salt: Any) -> list[int] | None:
    if salt is None:
        return None
    if isinstance(salt, (list, tuple)) and len(salt) == 2:
        return list(salt)
    if isinstance(salt, int):
        return [salt, salt]
    raise ValueError(f"salt must be an integer or two, got {salt!r}")


def read_lines(file: Path) -> list[bytes]:
    """Return the tokens of a vocabulary file, one for each line, read as TensorFlow reads it."""
    if not file.exists():
        raise ValueError(f"vocabulary must be a file that exists, or tokens, got {str(file)!r}")
    lines = lines_of(file)
    if not lines:
        raise ValueError(f"vocabulary file {file} must hold a token, got none")
    if b"" in lines:
        raise ValueError(f"vocabulary file {file} must have no empty line, got one: line {lines.index(b'') + 1}")
    return lines


def is_stream(data: Any) -> bool:
    one = (list, tuple, str, bytes, np.ndarray, Tensor, SparseTensor, RaggedTensor)
    is_arrow = type(data).__module__.partition(".")[0] == "pyarrow"
    return hasattr(data, "__iter__") and not isinstance(data, one) and not is_arrow


def integers(inputs: Any) -> Any:
    """Return the inputs of an inverted lookup, which must be integer ids, as int64."""
    x = as_inputs(inputs)
    if not isinstance(x, (SparseTensor, RaggedTensor)) and not isinstance(x, Tensor):
        raise ValueError("inputs must be integers with invert, got strings")
    return mapped_values(x, lambda values: values.to(torch.int64))


def listed(x: Any) -> Sequence[Any] | None:
    return x if x is None else x.tolist() if hasattr(x, "tolist") else list(x)
