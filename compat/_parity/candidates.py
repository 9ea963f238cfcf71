"""Parity check of the candidate samplers, and of the losses over what they draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import draw
from .bounds import near
from .case import Case, Operator, Outcome, Reference
from .convert import dense
from .reference.numbers import wide

_CALLS = 3


def _function(tf: Any, operator: str) -> Callable[..., Any]:
    for part in operator.split("."):
        tf = getattr(tf, part)
    return tf  # type: ignore[no-any-return]


# ---- Samplers --------------------------------------------------------------------------------------------------------


def _run_sampler(operator: str) -> Callable[[Any, dict[str, Any]], Any]:
    """Return what begins the streams again and calls a sampler several times, on either side."""

    def run(tf: Any, arguments: dict[str, Any]) -> Any:
        tf.random.set_seed(arguments["global_seed"])
        given = {name: x for name, x in arguments.items() if name != "global_seed"}
        return tuple(_function(tf, operator)(**given) for _ in range(_CALLS))

    return run


def _sampler_references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """Allow counts a rounding: they are the C library's, and that of a recording may be another."""
    return near(theirs, 1e-6, 0, lambda name: True)


def _sampler_arguments(rng: np.random.Generator, operator: str, elements: int) -> dict[str, Any]:
    range_max = 1 + draw.size(rng, min(300, elements // 4))
    num_true, num_sampled = int(rng.integers(1, 4)), int(rng.integers(1, min(range_max, 60) + 1))
    arguments: dict[str, Any] = {
        "global_seed": draw.one_of(rng, (None, int(rng.integers(-(2**40), 2**40)), 0)),
        "seed": draw.one_of(rng, (int(rng.integers(-(2**40), 2**40)), 0)),
        "num_true": num_true,
        "num_sampled": num_sampled,
        "unique": bool(rng.integers(2)),
        "range_max": range_max,
    }
    if arguments["global_seed"] is not None and rng.integers(2):
        arguments["seed"] = None
    if "fixed" in operator:
        reserved = int(rng.integers(0, min(3, range_max)))
        arguments["num_sampled"] = min(num_sampled, range_max - reserved)
        weights = (rng.integers(1, 99, range_max - reserved) / 8).tolist()
        arguments |= {"unigrams": weights, "num_reserved_ids": reserved, "distortion": draw.one_of(rng, (1.0, 0.5))}
    if "all" in operator:
        arguments["range_max"] = num_sampled
    classes = rng.integers(0, arguments["range_max"], (draw.size(rng, 20), num_true))
    return {**arguments, "true_classes": torch.from_numpy(classes)}


def _of_sampler(operator: str, arguments: dict[str, Any], note: str) -> Case:
    if "all" in operator:
        arguments = {name: x for name, x in arguments.items() if name != "range_max"}
    return Case(operator, arguments, note)


def _random_sampler(rng: np.random.Generator, operator: str, elements: int) -> Case:
    return _of_sampler(operator, _sampler_arguments(rng, operator, elements), "random")


def _picked_sampler(operator: str) -> list[Case]:
    classes = torch.tensor([[1, 4], [0, 1]])
    usual = {"global_seed": 7, "seed": 3, "true_classes": classes, "num_true": 2, "num_sampled": 5, "unique": False}
    usual["range_max"] = 5
    if "fixed" in operator:
        usual["unigrams"] = [1.0, 2.0, 3.0, 4.0, 0.5]
    changes: dict[str, dict[str, Any]] = {
        "both seeds": {},
        "both zero": {"global_seed": 0, "seed": 0},
        "zero by truncation": {"global_seed": 2**31 - 1, "seed": -(2**31) + 1},
        "seed alone": {"global_seed": None},
        "global seed alone": {"seed": None},
        "unique": {"unique": True},
        "a list": {"true_classes": [[1, 4]]},
        "no rows": {"true_classes": classes[:0]},
        "not as many columns": {"num_true": 1},
        "rank 1": {"true_classes": classes[0]},
        "no class": {"true_classes": classes + 1},
        "a negative class": {"true_classes": classes - 1},
        "nothing to sample": {"num_sampled": 0},
    }
    if "all" not in operator:
        changes["too many"] = {"unique": True, "num_sampled": 6}
    if "fixed" in operator:
        changes["no weights"] = {"unigrams": []}
        changes["not as many weights"] = {"unigrams": [1.0] * 4}
        changes["a shard"] = {"unigrams": [1.0] * 9 + [3.0], "num_shards": 2, "shard": 1}
    return [_of_sampler(operator, {**usual, **change}, note) for note, change in changes.items()]


# ---- Accidental hits -------------------------------------------------------------------------------------------------


def _hits_case(operator: str, true_classes: Tensor, sampled: Tensor, num_true: int, note: str) -> Case:
    arguments = {"true_classes": true_classes, "sampled_candidates": sampled, "num_true": num_true}
    return Case(operator, arguments, note)


def _random_hits(rng: np.random.Generator, operator: str, elements: int) -> Case:
    ids, num_true = 1 + draw.size(rng, 40), int(rng.integers(1, 4))
    classes = torch.from_numpy(rng.integers(0, ids, (draw.size(rng, 40), num_true)))
    return _hits_case(operator, classes, torch.from_numpy(rng.integers(0, ids, draw.size(rng, 60))), num_true, "random")


def _picked_hits(operator: str) -> list[Case]:
    classes, sampled = torch.tensor([[1, 1], [-5, 2**40]]), torch.tensor([1, 2**40, 1, 3])
    return [
        _hits_case(operator, classes, sampled, 2, "the last of equal ones"),
        _hits_case(operator, classes, sampled[:0], 2, "no candidates"),
        _hits_case(operator, classes[:0], sampled, 2, "no rows"),
        _hits_case(operator, classes, sampled, 1, "not as many columns"),
        _hits_case(operator, classes[0], sampled, 2, "rank 1"),
        _hits_case(operator, classes, sampled.unsqueeze(0), 2, "candidates of rank 2"),
    ]


# ---- Losses ----------------------------------------------------------------------------------------------------------


def _run_loss(operator: str, ours: bool) -> Callable[[Any, dict[str, Any]], Any]:
    def run(tf: Any, arguments: dict[str, Any]) -> Any:
        tf.random.set_seed(11)
        given = {name: x for name, x in arguments.items() if ours or name != "sparse_gradient"}
        return _function(tf, operator)(**given)

    return run


def _loss_references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """Allow a millionth of the largest loss, and of 1; three of gradients, in which errors of logits are multiplied."""
    references = {}
    for name, x in theirs.values.items():
        value = wide(x if isinstance(x, Tensor) else dense(x))
        allowed = (1e-6 if name == "output" else 3e-6) * max(1.0, float(np.abs(value).max(initial=0)))
        references[name] = Reference(value, np.full(value.shape, allowed))
    return references


def _loss_arguments(
    rng: np.random.Generator, operator: str, batch: int, num_true: int, classes: int, shards: int, columns: int
) -> dict[str, Any]:
    sizes = [len(range(shard, classes, shards)) for shard in range(shards)]  # the strategies agree on the sizes
    weights = [torch.from_numpy(rng.standard_normal((size, columns)).astype(np.float32)) for size in sizes]
    biases = [torch.from_numpy(rng.standard_normal(size).astype(np.float32)) for size in sizes]
    arguments = {
        "weights": weights if shards > 1 else weights[0],
        "biases": biases if shards > 1 else biases[0],
        "labels": torch.from_numpy(rng.integers(0, classes, (batch, num_true))),
        "inputs": torch.from_numpy(rng.standard_normal((batch, columns)).astype(np.float32) / 2),
        "num_sampled": int(rng.integers(1, min(classes, 40) + 1)),
        "num_classes": classes,
        "num_true": num_true,
        "remove_accidental_hits": bool(rng.integers(2)),
    }
    if "v1" in operator and rng.integers(2):
        arguments["partition_strategy"] = draw.one_of(rng, ("mod", "div"))
    if "softmax" in operator and rng.integers(2):
        arguments["seed"] = int(rng.integers(2**31))
    return arguments


def _values_for(rng: np.random.Generator, arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ids that may repeat, and counts."""
    ids = rng.integers(0, arguments["num_classes"], arguments["num_sampled"])
    shapes = (tuple(arguments["labels"].shape), ids.shape)
    counts = [torch.from_numpy((rng.random(shape) + 0.05).astype(np.float32)) for shape in shapes]
    return torch.from_numpy(ids), counts[0], counts[1]


_SOURCES = ("weights", "biases", "inputs")


def _random_loss(rng: np.random.Generator, operator: str, elements: int) -> Case:
    classes, columns = 2 + draw.size(rng, min(100, elements // 8)), 1 + draw.size(rng, min(15, elements // 32))
    shards = int(rng.integers(1, min(classes, 4) + 1)) if rng.integers(2) else 1
    batch = 1 + draw.size(rng, min(20, elements // 25))
    arguments = _loss_arguments(rng, operator, batch, int(rng.integers(1, 4)), classes, shards, columns)
    if rng.integers(2):
        arguments["sampled_values"] = _values_for(rng, arguments)
    upstream = torch.from_numpy(rng.standard_normal(7).astype(np.float32))
    return Case(operator, arguments, "random", upstream, _SOURCES)


def _picked_loss(operator: str) -> list[Case]:
    rng = np.random.default_rng(2)
    usual = {**_loss_arguments(rng, operator, 2, 2, 5, 2, 2), "num_sampled": 4, "remove_accidental_hits": True}
    values = _values_for(rng, usual)
    labels, inputs = usual["labels"], usual["inputs"]
    twice = labels[:, :1].repeat(1, 2)
    changes: dict[str, dict[str, Any]] = {
        "drawn": {},
        "given": {"sampled_values": values},
        "all hits": {"sampled_values": (twice[0, 0].repeat(4), *values[1:]), "labels": twice},
        "hits that count": {"sampled_values": values, "remove_accidental_hits": False, "num_sampled": 6},
        "int32 labels": {"labels": labels.int()},
        "doubles": {
            "inputs": inputs.double(),
            "sampled_values": (values[0], values[1].double(), values[2].double()),
        },
        "tables of doubles": {name: [x.double() for x in usual[name]] for name in ("weights", "biases")},
        "no rows": {"labels": labels[:0], "inputs": inputs[:0]},
        "one table beside shards": {"biases": torch.cat(usual["biases"])},
        "doubles with float counts": {"inputs": inputs.double()},
        "no such class": {"labels": labels + 5},
        "no such class, given": {"labels": labels + 5, "sampled_values": values},
        "no biases": {"biases": None},
        "other columns": {"inputs": inputs[:, :-1]},
        "not as many labels": {"num_true": 1},
        "not as many candidates": {"sampled_values": values, "num_sampled": 3},
        "too many": {"num_sampled": 6},
    }
    ones = torch.ones(1)
    return [Case(operator, {**usual, **change}, note, ones, _SOURCES) for note, change in changes.items()]


# ---- Operators -------------------------------------------------------------------------------------------------------


def _sampler(name: str) -> Operator:
    run = _run_sampler(name)
    return Operator(_random_sampler, _picked_sampler, _sampler_references, run_tensorflow=run, run_ours=run)


def _loss(name: str) -> Operator:
    return Operator(
        _random_loss,
        _picked_loss,
        _loss_references,
        gradient_calls={"gradient": {}, "sparse gradient": {"sparse_gradient": True}},
        run_tensorflow=_run_loss(name, ours=False),
        run_ours=_run_loss(name, ours=True),
    )


_LAWS = ("uniform", "log_uniform", "learned_unigram", "fixed_unigram", "all")
OPERATORS = {
    **{name: _sampler(name) for name in (f"random.{law}_candidate_sampler" for law in _LAWS)},
    "nn.compute_accidental_hits": Operator(_random_hits, _picked_hits),
    **{
        f"{part}.{name}": _loss(f"{part}.{name}")
        for part in ("nn", "compat.v1.nn")
        for name in ("sampled_softmax_loss", "nce_loss")
    },
}
