"""Parity check of the Keras layers that look tokens up, put numbers into bins and make vectors of ids."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import RaggedTensor, SparseTensor
from .bounds import near
from .case import INF, NAN, Case, Operator, Outcome, Reference
from .convert import leaves
from .draw import one_of, size

_MODES = ("int", "one_hot", "multi_hot", "count", "tf_idf")


def _case(layer: str, arguments: dict[str, Any], inputs: Any, note: str, **more: Any) -> Case:
    return Case(f"keras.layers.{layer}", {"layer": arguments, "inputs": inputs, **more}, note)


# ---- Inputs ---------------------------------------------------------------------------------------------------------


def _words(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    pool = [b"", b"[UNK]", "é".encode(), *(b"w%d" % k for k in range(25)), *(b"%d" % k for k in range(5))]
    result = np.empty(int(np.prod(shape)), dtype=object)
    result[:] = [pool[k] for k in (len(pool) * rng.random(result.size) ** 2).astype(np.int64)]
    return result.reshape(shape)


def _numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    dtype = one_of(rng, (torch.int32, torch.int64))
    return torch.from_numpy(np.asarray((30 * rng.random(shape) ** 2).astype(np.int64) - 3)).to(dtype)


def _reals(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    dtype = one_of(rng, (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.float16))
    x = torch.from_numpy(np.asarray(np.round(rng.standard_normal(shape) * 3, int(rng.integers(0, 3)))))
    if dtype.is_floating_point and x.numel() and rng.random() < 0.2:
        x.view(-1)[0] = one_of(rng, (NAN, INF, -INF))
    return x.to(dtype)


def _laid_out(rng: np.random.Generator, draw: Callable[..., Any], mode: str, sparse: bool) -> Any:
    """Draw a tensor of rank 0 to 3, or a sparse or ragged one if Keras takes it."""
    rows = size(rng, 40)
    kind = rng.random()
    if kind < 0.15 and not (sparse and mode == "one_hot"):
        lengths = rng.integers(0, 4, max(rows, 1))
        return RaggedTensor.from_row_splits(draw(rng, (int(lengths.sum()),)), [0, *lengths.cumsum().tolist()])
    if kind < 0.3 and mode != "one_hot":
        width = int(rng.integers(1, 5))
        taken = np.flatnonzero(rng.random((max(rows, 1), width)) < 0.5)
        indices = torch.from_numpy(np.stack([taken // width, taken % width], 1))
        return SparseTensor(indices, draw(rng, (len(taken),)), torch.tensor([max(rows, 1), width]))
    rank = int(rng.integers(0, 4))
    # Keras fails for sparse vectors of no inputs.
    rows = max(rows, 1) if sparse else rows
    shape = (rows, *(int(rng.integers(1, 4)) for _ in range(3)))[:rank]
    return draw(rng, shape)


# ---- Lookups --------------------------------------------------------------------------------------------------------


def _lookup(rng: np.random.Generator, layer: str) -> tuple[dict[str, Any], Any, Any]:
    strings = layer == "StringLookup"
    mode = str(one_of(rng, _MODES))
    pool: list[Any] = ["é", *(f"w{k}" for k in range(25)), "3"] if strings else [*range(1, 30), 2**40]
    words = [pool[k] for k in rng.permutation(len(pool))[: int(rng.integers(1, 20))]]
    arguments: dict[str, Any] = {"output_mode": mode, "num_oov_indices": int(one_of(rng, (0, 1, 1, 2, 5)))}
    if rng.random() < 0.4:
        arguments["mask_token"] = "" if strings else 0
    if mode == "int" and rng.random() < 0.2:
        inputs = torch.from_numpy(rng.integers(-2, 25, (size(rng, 30), 2)))
        return arguments | {"invert": True, "vocabulary": words}, inputs, None
    if rng.random() < 0.4:
        arguments |= {"max_tokens": int(rng.integers(30, 40)), "pad_to_max_tokens": bool(rng.random() < 0.7)}
    if not strings and rng.random() < 0.5:
        arguments["oov_method"] = "farmhash"
    if (strings or "oov_method" in arguments) and rng.random() < 0.3:
        arguments["salt"] = one_of(rng, (5, [1, -2]))
    # Keras writes ids of masks outside of sparse vectors, and fails for sparse ones of tf_idf.
    risky = mode in ("int", "tf_idf") or "mask_token" in arguments
    arguments["sparse"] = bool(not risky and rng.random() < 0.4)
    draw: Any = _words if strings else _numbers
    inputs = _laid_out(rng, draw, mode, arguments["sparse"])
    if not strings and isinstance(inputs, SparseTensor):
        inputs = draw(rng, (3, 2))  # Keras makes sparse inputs dense, with zeros
    if rng.random() < 0.4:
        return arguments, inputs, [draw(rng, (int(rng.integers(1, 30)), 3)) for _ in range(int(rng.integers(1, 4)))]
    if mode == "tf_idf":
        arguments["idf_weights"] = np.round(rng.random(len(words)) * 3, 2).tolist()
    return arguments | {"vocabulary": words}, inputs, None


def _random_lookup(rng: np.random.Generator, operator: str, elements: int) -> Case:
    layer = operator.split(".")[-1]
    arguments, inputs, data = _lookup(rng, layer)
    more = {} if data is None else {"data": data}
    # The only random input that is refused is an unknown token without an id for it.
    return Case(operator, {"layer": arguments, "inputs": inputs, **more}, "random", names=("num_oov_indices=0",))


def _picked_lookups(operator: str) -> list[Case]:
    layer = operator.split(".")[-1]
    strings = layer == "StringLookup"
    words: list[Any] = ["a", "c"] if strings else [3, 4]
    unknown: Any = np.array([b"a", b"z"], object) if strings else torch.tensor([3, 9])
    cases = [
        Case(operator, {"layer": changed, "inputs": unknown}, f"a wrong {name}", names=(name,))
        for changed, name in (
            ({"max_tokens": 1}, "max_tokens"),
            ({"num_oov_indices": -1}, "num_oov_indices"),
            ({"pad_to_max_tokens": True}, "max_tokens"),
            ({"output_mode": "x"}, "output_mode"),
            ({"invert": True, "output_mode": "count"}, "output_mode"),
            ({"sparse": True}, "sparse"),
            ({"idf_weights": [1.0]}, "idf_weights"),
            ({"vocabulary": []}, "vocabulary"),
            ({"vocabulary": words + words[:1]}, "vocabulary"),
            ({"vocabulary": [*words, words[0]], "mask_token": words[0]}, "vocabulary"),
            ({"vocabulary": words, "mask_token": words[1]}, "vocabulary"),
            ({"vocabulary": words, "max_tokens": 2}, "vocabulary"),
            ({"vocabulary": words, "output_mode": "tf_idf"}, "idf_weights"),
            ({"vocabulary": words, "output_mode": "tf_idf", "idf_weights": [1.0]}, "idf_weights"),
            ({"vocabulary": words, "salt": [1]}, "salt"),
            ({"vocabulary": words, "oov_method": "x"}, "oov_method"),
            ({"vocabulary": words, "num_oov_indices": 0}, "num_oov_indices"),
            ({"bogus": 1}, "bogus"),
        )
    ]
    special = ["", "[UNK]"] if strings else [0, -1]
    given = {"vocabulary": special + words, "mask_token": special[0]}
    cases.append(_case(layer, given, unknown, "special tokens given"))
    cases.append(
        Case(operator, {"layer": given | {"output_mode": "binary"}, "inputs": unknown}, "mask", names=("mask",))
    )
    cases.append(_case(layer, {"vocabulary": words, "output_mode": "binary"}, unknown, "an old mode"))
    weights = {"output_mode": "tf-idf", "idf_weights": [0.5, 1.5, 2.5], "vocabulary": [*special[1:], *words]}
    cases.append(_case(layer, weights, unknown, "weights of special tokens"))
    cases.append(_case(layer, {"vocabulary": words, "invert": True}, torch.tensor([[0, 1], [2, 99]]), "inverted"))
    for most in (2, 3, 5):
        cases.append(_case(layer, {"max_tokens": most}, unknown, "a limit", data=[unknown.reshape(1, 2)]))
    return cases


# ---- Bins and vectors -----------------------------------------------------------------------------------------------


def _random_bins(rng: np.random.Generator, operator: str, elements: int) -> Case:
    mode = str(one_of(rng, _MODES[:4]))
    sparse = bool(mode != "int" and rng.random() < 0.3)
    arguments: dict[str, Any] = {"output_mode": mode, "sparse": sparse}
    if mode == "int":
        arguments["dtype"] = str(one_of(rng, ("float32", "float64", "float16", "bfloat16")))
    inputs = _laid_out(rng, _reals, mode, sparse)
    if rng.random() < 0.5:
        bounds = np.sort(np.round(rng.standard_normal(int(rng.integers(1, 9))) * 3, int(rng.integers(0, 3))))
        return _case("Discretization", arguments | {"bin_boundaries": bounds.tolist()}, inputs, "random")
    arguments |= {"num_bins": int(rng.integers(2, 12)), "epsilon": float(one_of(rng, (0.01, 0.05, 0.1)))}
    batches = int(rng.integers(1, 4))
    data = [torch.from_numpy(rng.standard_normal(max(size(rng, 3000), 20))).to(torch.float32) for _ in range(batches)]
    return _case("Discretization", arguments, inputs, "random, adapted", data=data)


def _picked_bins(operator: str) -> list[Case]:
    x = torch.tensor([1.0, 2.0])
    return [
        Case(operator, {"layer": changed, "inputs": x}, f"a wrong {name}", names=(name,))
        for changed, name in (
            ({}, "num_bins"),
            ({"num_bins": 3, "bin_boundaries": [1.0]}, "num_bins"),
            ({"num_bins": -1}, "num_bins"),
            ({"num_bins": 3}, "bin_boundaries"),
            ({"bin_boundaries": [2.0, 1.0]}, "bin_boundaries"),
            ({"bin_boundaries": [1.0], "sparse": True}, "sparse"),
            ({"bin_boundaries": [1.0], "output_mode": "tf_idf"}, "output_mode"),
        )
    ] + [
        _case("Discretization", {"bin_boundaries": [1.0, 1.0]}, x, "equal boundaries"),
        _case("Discretization", {"bin_boundaries": [0.1]}, torch.tensor([0.1], dtype=torch.float64), "0.1 in float32"),
        _case("Discretization", {"bin_boundaries": []}, x, "no boundaries"),
    ]


def _random_encoding(rng: np.random.Generator, operator: str, elements: int) -> Case:
    mode = str(one_of(rng, _MODES[1:4]))
    depth = int(rng.integers(1, 40))
    # Ids may be too large for the vectors, except where Keras would then write outside of sparse ones.
    sparse = bool(rng.random() < 0.3)
    most = depth if sparse and mode == "one_hot" else depth + 3

    def ids(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
        dtype = one_of(rng, (torch.int32, torch.int64))
        return torch.from_numpy(np.asarray(rng.integers(0, most, shape))).to(dtype)

    inputs = _laid_out(rng, ids, mode, sparse)
    if sparse and mode != "one_hot" and isinstance(inputs, Tensor) and inputs.dim() > 2:
        inputs = inputs[0]
    arguments = {"num_tokens": depth, "output_mode": mode, "sparse": sparse}
    if mode == "count" and isinstance(inputs, Tensor) and inputs.dim() in (1, 2) and rng.random() < 0.4:
        weights = torch.from_numpy(np.asarray(rng.integers(0, 9, tuple(inputs.shape)))).to(torch.float32)
        return _case("CategoryEncoding", arguments, inputs, "random, weighted", count_weights=weights)
    return _case("CategoryEncoding", arguments, inputs, "random")


def _picked_encodings(operator: str) -> list[Case]:
    ids = torch.tensor([[1, 2]])
    cases = [
        Case(operator, {"layer": changed, "inputs": ids}, f"a wrong {name}", names=(name,))
        for changed, name in (
            ({"num_tokens": 0}, "num_tokens"),
            ({}, "num_tokens"),
            ({"num_tokens": 3, "output_mode": "int"}, "output_mode"),
        )
    ]
    for mode in _MODES[1:4]:
        layer = {"num_tokens": 4, "output_mode": mode}
        cases.append(_case("CategoryEncoding", layer, torch.tensor([[-1, 0]]), f"{mode} of a negative id"))
        cases.append(_case("CategoryEncoding", layer, torch.tensor([[[0, -1], [1, 1]]]), f"{mode} of rank 3"))
        cases.append(_case("CategoryEncoding", layer, torch.tensor([0.7, 1.9]), f"{mode} of floats"))
        cases.append(_case("CategoryEncoding", layer, torch.tensor([True, False]), f"{mode} of booleans"))
        weights = torch.tensor([1.0, 2.0])
        cases.append(_case("CategoryEncoding", layer, ids, f"{mode} with other weights", count_weights=weights))
    cases.append(_case("CategoryEncoding", {"num_tokens": 4, "output_mode": "binary"}, ids, "an old mode"))
    cases.append(_case("CategoryEncoding", {"num_tokens": 4, "dtype": "int64"}, ids, "integers"))
    return cases


# ---- Both sides -----------------------------------------------------------------------------------------------------


def _run(made: Any, arguments: dict[str, Any], strings: Callable[[Any], Any], to_batches: Callable[[Any], Any]) -> Any:
    """Return the layer's outputs and, if it was adapted, its vocabulary or boundaries."""
    found: dict[str, Any] = {}
    if "data" in arguments:
        made.adapt(to_batches(arguments["data"]))
        if hasattr(made, "get_vocabulary"):
            found["size"] = made.vocabulary_size()
            found["vocabulary"] = [str(x) for x in made.get_vocabulary()]
        else:
            found["boundaries"] = [float(x) for x in made.bin_boundaries]
    weights = {"count_weights": arguments["count_weights"]} if "count_weights" in arguments else {}
    return {"output": made(strings(arguments["inputs"]), **weights), **{name: str(x) for name, x in found.items()}}


def _run_tensorflow(layer: str, tf: Any, arguments: dict[str, Any]) -> Any:
    def strings(x: Any) -> Any:
        return tf.constant(x, tf.string) if isinstance(x, np.ndarray) else x

    keras = importlib.import_module("keras")
    try:
        return _run(
            getattr(keras.layers, layer)(**arguments["layer"]),
            arguments,
            strings,
            lambda data: (strings(x) if layer != "Discretization" else x.numpy() for x in data),
        )
    except RuntimeError as error:  # Keras's error for a layer without a vocabulary
        raise ValueError(str(error)) from error


def _run_ours(layer: str, arguments: dict[str, Any]) -> Any:
    from .. import keras

    made = getattr(keras, layer)(**arguments["layer"])
    # The layer is made again from its configuration, which must give the same layer.
    made = type(made).from_config(made.get_config())
    devices = [x.device for _, x in leaves(arguments["inputs"], "inputs") if isinstance(x, Tensor)]
    return _run(made.to(devices[0]) if devices else made, arguments, lambda x: x, iter)


def _references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """Return bounds for the weights, which are averages and logarithms in float32."""
    return near(theirs, 2e-6, 0.0, lambda _: True)


def _operator(layer: str, random: Any, picked: Any) -> Operator:
    return Operator(
        random,
        picked,
        references=_references,
        run_tensorflow=lambda tf, arguments: _run_tensorflow(layer, tf, arguments),
        run_ours=lambda _, arguments: _run_ours(layer, arguments),
    )


OPERATORS: dict[str, Operator] = {
    "keras.layers.StringLookup": _operator("StringLookup", _random_lookup, _picked_lookups),
    "keras.layers.IntegerLookup": _operator("IntegerLookup", _random_lookup, _picked_lookups),
    "keras.layers.Discretization": _operator("Discretization", _random_bins, _picked_bins),
    "keras.layers.CategoryEncoding": _operator("CategoryEncoding", _random_encoding, _picked_encodings),
}
