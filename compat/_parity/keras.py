"""Parity check of the Keras layers that hash."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import RaggedTensor
from . import draw
from .case import INTEGERS, Case, Operator
from .draw import sparse_of

_MODES = ("int", "one_hot", "multi_hot", "count")


def _case(layer: str, inputs: Any, note: str, **arguments: Any) -> Case:
    """Return a case with these arguments of the layer, 5 bins unless given, and these inputs."""
    return Case(layer, {"num_bins": 5} | arguments | {"inputs": inputs}, note)


def _hashing(layer: str) -> list[Case]:
    cases = []
    words = np.array([[b"a", b"b"], [b"", b"\xff\x00"]], dtype=object)
    inputs = {
        "words": words,
        "integers": torch.tensor([[1, 1], [2, 3]]),
        "a column": torch.tensor([[1], [2]]),
        "a vector": torch.tensor([4, 4, 5]),
        "rank 3": torch.arange(12).reshape(2, 3, 2),
        "floats": torch.tensor([[1.9, -2.7]]),
        "booleans": torch.tensor([[True, False]]),
        "sparse": sparse_of([[0, 0], [0, 1], [2, 0]], torch.tensor([5, 6, 5]), [3, 4]),
        "ragged": RaggedTensor.from_row_splits(torch.tensor([1, 2, 3, 1]), [0, 2, 2, 4]),
    }
    for note, value in inputs.items():
        for mode in _MODES:
            cases.append(_case(layer, value, f"{mode} of {note}", output_mode=mode))
            cases.append(_case(layer, value, f"salted {mode} of {note}", output_mode=mode, salt=[-5, 2**63 - 1]))
            cases.append(_case(layer, value, f"sparse {mode} of {note}", output_mode=mode, sparse=mode != "int"))
    for mask in (1, 2.5, "a", True):
        for note, value in inputs.items():
            cases.append(_case(layer, value, f"mask {mask!r} of {note}", mask_value=mask))
    cases.append(_case(layer, words, "one bin", num_bins=1, mask_value="a"))
    return cases


def _crossing(layer: str) -> list[Case]:
    cases = []
    words, numbers = np.array([b"a", b"b"], dtype=object), torch.tensor([1, -2])
    for mode in ("int", "one_hot", "count"):
        for note, inputs in {
            "numbers": (numbers, numbers),
            "words and numbers": (words, numbers, words),
            "columns": (numbers.reshape(2, 1), words.reshape(2, 1)),
            "scalars": (torch.tensor(3), torch.tensor(4)),
            "one feature": (numbers,),
            "other shapes": (numbers, numbers.reshape(2, 1)),
            "wide": (numbers.reshape(1, 2), numbers.reshape(1, 2)),
            "floats": (numbers.float(), numbers),
            "booleans": (numbers > 0, numbers),
        }.items():
            cases.append(_case(layer, inputs, f"{mode} of {note}", output_mode=mode))
    cases.append(_case(layer, (numbers, words), "sparse", output_mode="one_hot", sparse=True))
    cases.append(_case(layer, (numbers, words), "any number", num_bins=0))
    cases.append(_case(layer, (numbers, words), "a negative number", num_bins=-1))
    return cases


def _random(rng: np.random.Generator, layer: str, elements: int) -> Case:
    """Draw words or numbers of any integer dtype, and any mode."""
    bins = int(rng.choice(np.array([1, 2, 10, 1000])))
    rows = draw.size(rng, min(elements // 4, 3000))
    if layer.endswith("HashedCrossing"):
        # Keras fails for no rows.
        features = tuple(_values(rng, (max(rows, 1), 1)) for _ in range(int(rng.integers(2, 5))))
        mode = str(rng.choice(np.array(_MODES[:2])))
        return _case(layer, features, "random", num_bins=bins, output_mode=mode)
    salt = rng.integers(-(2**63), 2**63 - 1, 2).tolist() if rng.random() < 0.5 else None
    mode = str(rng.choice(np.array(_MODES)))
    values = _values(rng, (rows, int(rng.integers(1, 4))))
    mask = None
    if rows and rng.random() < 0.5:
        mask = values.reshape(-1)[0]
        mask = mask.item() if isinstance(mask, Tensor) else mask
    return _case(layer, values, "random", num_bins=bins, output_mode=mode, salt=salt, mask_value=mask)


def _values(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    if rng.random() < 0.4:
        return draw.strings(rng, int(np.prod(shape)), 30).reshape(shape)
    return draw.values(rng, shape, draw.one_of(rng, INTEGERS))


def _run_tensorflow(layer: str, tf: Any, arguments: dict[str, Any]) -> Any:
    given = dict(arguments)
    inputs = given.pop("inputs")
    if isinstance(inputs, tuple):
        inputs = tuple(tf.constant(x) if isinstance(x, np.ndarray) else x for x in inputs)
    return getattr(importlib.import_module("keras").layers, layer)(**given)(inputs)


def _run_ours(layer: str, arguments: dict[str, Any]) -> Any:
    from .. import keras

    given = dict(arguments)
    inputs = given.pop("inputs")
    return getattr(keras, layer)(**given)(inputs)


def _operator(layer: str, hand_picked: Any) -> Operator:
    return Operator(
        _random,
        hand_picked,
        run_tensorflow=lambda tf, arguments: _run_tensorflow(layer, tf, arguments),
        run_ours=lambda _, arguments: _run_ours(layer, arguments),
    )


OPERATORS: dict[str, Operator] = {
    "keras.layers.Hashing": _operator("Hashing", _hashing),
    "keras.layers.HashedCrossing": _operator("HashedCrossing", _crossing),
}
