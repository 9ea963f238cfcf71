"""
Golden vectors: what TensorFlow answered, for tests on machines that have none.

    python -m torchsparse_rec.compat.goldens --record DIR

records the hand-picked cases of the parity check and small random ones, one compressed JSON file per operator.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._cases import OPERATORS, Case
from ._evaluate import Outcome, run_tensorflow, tensorflow_version
from ._hand_picked import hand_picked
from .parity import random_cases

_RANDOM_CASES = 8
_RANDOM_ELEMENTS = 100
# What numpy has too, by the size of an element in bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def record(folder: Path) -> None:
    """Write one file per operator, with TensorFlow's answers."""
    folder.mkdir(parents=True, exist_ok=True)
    picked = hand_picked()
    for operator in OPERATORS:
        cases = [c for c in picked if c.operator == operator]
        cases += random_cases(operator, _RANDOM_CASES, seed=1, elements=_RANDOM_ELEMENTS)
        entries = [_encode_case(case, run_tensorflow(case)) for case in cases]
        lines = ",\n".join(json.dumps(entry) for entry in entries)
        name = re.sub(r"\W+", "_", operator)
        text = f'{{"tensorflow": "{tensorflow_version()}", "operator": "{operator}", "cases": [\n{lines}\n]}}\n'
        # Without the time of writing: the same answers make the same file.
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def load(file: Path) -> list[tuple[Case, Outcome]]:
    """The cases of one file and TensorFlow's answers."""
    recorded = json.loads(gzip.decompress(file.read_bytes()))
    return [_decode_case(recorded["operator"], entry) for entry in recorded["cases"]]


def _encode_case(case: Case, outcome: Outcome) -> dict[str, Any]:
    return {
        "note": case.note,
        "arguments": {name: _encode(value) for name, value in case.arguments.items()},
        "upstream": _encode(case.upstream),
        "values": {name: _encode(value) for name, value in outcome.values.items()},
        # The kind of error is enough: its text names TensorFlow's internals.
        "error": outcome.error and outcome.error.split(":")[0],
    }


def _decode_case(operator: str, entry: dict[str, Any]) -> tuple[Case, Outcome]:
    arguments = {name: _decode(value) for name, value in entry["arguments"].items()}
    case = Case(operator, arguments, entry["note"], _decode(entry["upstream"]))
    return case, Outcome({name: _decode(value) for name, value in entry["values"].items()}, entry["error"])


def _encode(value: Any) -> Any:
    """As JSON: a tensor by its bytes; bytes in Latin-1."""
    if isinstance(value, Tensor):
        raw = value.contiguous().view(_BITS[value.element_size()]).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": dtype, "shape": list(value.shape), "raw": base64.b64encode(raw).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray):
        return {"numpy": value.dtype.str, "shape": list(value.shape), "items": _encode(value.reshape(-1).tolist())}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
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
    raw = base64.b64decode(value["raw"])
    dtype = getattr(torch, value["tensor"])
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchsparse_rec.compat.goldens", description="Record golden vectors from TensorFlow."
    )
    parser.add_argument("--record", type=Path, required=True, metavar="DIR", help="where to write them")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    record(parser.parse_args(arguments).record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
