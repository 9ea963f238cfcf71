"""
Golden vectors: TensorFlow's results, for tests on machines without TensorFlow.

    python -m torchsparse_rec.compat.goldens --record DIR [--op NAME]

records the hand-picked cases of the parity check and small random ones, one compressed JSON file per operator.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._interrupt import run_command
from ._parity import OPERATORS, hand_picked, random_cases
from ._parity.case import Case, Outcome
from ._parity.evaluate import run_tensorflow, tensorflow_version
from .tensorflow import IndexedSlices, RaggedTensor, SparseTensor

_RANDOM_CASES = 8
_RANDOM_ELEMENTS = 100
# Composite tensors: the class of each, and its parts in the order in which its constructor takes them.
_COMPOSITE: dict[str, tuple[type, tuple[str, ...]]] = {
    "sparse": (SparseTensor, ("indices", "values", "dense_shape")),
    "ragged": (RaggedTensor, ("values", "row_splits")),
    "slices": (IndexedSlices, ("values", "indices", "dense_shape")),
}
# The dtype by which an element of so many bytes is written: numpy has no bfloat16.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def record(folder: Path, operators: Sequence[str]) -> None:
    """Write one file per operator, with its cases and TensorFlow's answers."""
    folder.mkdir(parents=True, exist_ok=True)
    for operator in operators:
        cases = hand_picked(operator)
        cases += random_cases(operator, _RANDOM_CASES, seed=1, elements=_RANDOM_ELEMENTS)
        entries = [_encode_case(case, run_tensorflow(case)) for case in cases]
        lines = ",\n".join(json.dumps(entry) for entry in entries)
        name = re.sub(r"\W+", "_", operator)
        text = f'{{"tensorflow": "{tensorflow_version()}", "operator": "{operator}", "cases": [\n{lines}\n]}}\n'
        # gzip's time stamp is left out, so that equal answers make equal files.
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def load(file: Path) -> list[tuple[Case, Outcome]]:
    """Return the cases of one file and TensorFlow's answers."""
    recorded = json.loads(gzip.decompress(file.read_bytes()))
    return [_decode_case(recorded["operator"], entry) for entry in recorded["cases"]]


def _encode_case(case: Case, outcome: Outcome) -> dict[str, Any]:
    return {
        "note": case.note,
        "arguments": {name: _encode(value) for name, value in case.arguments.items()},
        "upstream": _encode(case.upstream),
        "gradients": list(case.gradients),
        "names": None if case.names is None else list(case.names),
        "values": {name: _encode(value) for name, value in outcome.values.items()},
        # The kind of error is enough: its text names TensorFlow's internals.
        "error": outcome.error and outcome.error.split(":")[0],
    }


def _decode_case(operator: str, entry: dict[str, Any]) -> tuple[Case, Outcome]:
    arguments = {name: _decode(value) for name, value in entry["arguments"].items()}
    names = None if entry["names"] is None else tuple(entry["names"])
    gradients = tuple(entry["gradients"])
    case = Case(operator, arguments, entry["note"], _decode(entry["upstream"]), gradients, names)
    return case, Outcome({name: _decode(value) for name, value in entry["values"].items()}, entry["error"])


def _encode(value: Any) -> Any:
    """Return a value as JSON: a tensor by its bytes; bytes in Latin-1; other objects as a dict of one kind."""
    if isinstance(value, Tensor):
        real = torch.view_as_real(value) if value.is_complex() else value
        raw = real.contiguous().view(_BITS[real.element_size()]).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": dtype, "shape": list(value.shape), "raw": base64.b64encode(raw).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray):
        return {"numpy": value.dtype.str, "shape": list(value.shape), "items": _encode(value.reshape(-1).tolist())}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {name: _encode(item) for name, item in value.items()}}
    for kind, (type_, parts) in _COMPOSITE.items():
        if isinstance(value, type_):
            return {kind: [_encode(getattr(value, part)) for part in parts]}
    return [_encode(item) for item in value] if isinstance(value, list) else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return value["bytes"].encode("latin-1")
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "numpy" in value:
        result = np.empty(len(value["items"]), dtype=value["numpy"])
        result[:] = _decode(value["items"])
        return result.reshape(value["shape"])
    if "tuple" in value:
        return tuple(_decode(value["tuple"]))
    if "dict" in value:
        return {name: _decode(item) for name, item in value["dict"].items()}
    for kind, (type_, _) in _COMPOSITE.items():
        if kind in value:
            return type_(*_decode(value[kind]))
    raw = base64.b64decode(value["raw"])
    dtype = getattr(torch, value["tensor"])
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchsparse_rec.compat.goldens", description="Record golden vectors from TensorFlow."
    )
    parser.add_argument("--record", type=Path, required=True, metavar="DIR", help="where to write them")
    parser.add_argument("--op", choices=OPERATORS, metavar="NAME", action="append", help="only this operator")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    record(options.record, options.op or list(OPERATORS))
    return 0


if __name__ == "__main__":
    run_command(main)
