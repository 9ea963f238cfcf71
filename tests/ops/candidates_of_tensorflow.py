"""
Calls of TensorFlow's candidate samplers, and what they give.

    python tests/ops/candidates_of_tensorflow.py     # writes tests/goldens/candidates.json; needs tensorflow
"""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchsparse_rec import ops

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "candidates.json"
KINDS = ("Uniform", "LogUniform", "LearnedUnigram", "FixedUnigram", "All")
CALLS = 3

# Ids, counts of the true classes and counts of the ids, of a call.
Results = list[list[Any]]


@dataclass
class Case:
    """Some calls of one sampler, one after the other; its seeds are not both 0, of which TensorFlow makes others."""

    kind: str
    seed: int
    seed2: int
    range_max: int
    num_sampled: int
    unique: bool
    true_classes: list[list[list[int]]]
    unigrams: list[float] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def random_case(rng: np.random.Generator, kind: str) -> Case:
    """Return a case: of few ids or of many, by a few true classes or none."""
    few = kind not in ("Uniform", "LogUniform") or rng.integers(2)
    range_max = int(rng.integers(1, 400) if few else rng.integers(1, 2**40))
    num_sampled = int(rng.integers(1, min(range_max, 120) + 1))
    unique = bool(rng.integers(2))
    case = Case(kind, *(int(x) for x in rng.integers(-(2**62), 2**62, 2)), range_max, num_sampled, unique, [])
    if kind == "All":
        case.range_max = num_sampled
    if kind == "FixedUnigram":
        reserved = int(rng.integers(0, min(3, range_max)))
        shards = 1 if reserved else int(rng.integers(1, 4))
        weights = rng.random(range_max * shards - reserved).astype(np.float32) * 9 + np.float32(0.01)
        distortion = float(np.float32(rng.choice([1.0, 0.75, 0.5])))
        case.unigrams = weights.tolist()
        case.options = {"distortion": distortion, "num_reserved_ids": reserved}
        case.options |= {"num_shards": shards, "shard": int(rng.integers(shards))}
        case.num_sampled = min(num_sampled, range_max - reserved)
    batch, num_true = int(rng.integers(0, 9)), int(rng.integers(1, 4))
    case.true_classes = [rng.integers(0, case.range_max, (batch, num_true)).tolist() for _ in range(CALLS)]
    return case


def run_ours(case: Case) -> Results:
    generator = ops.new_candidate_generator(case.seed, case.seed2)
    counts = ops.new_unigram_counts(case.range_max) if case.kind == "LearnedUnigram" else None
    table = ops.unigram_table(case.unigrams, **case.options) if case.kind == "FixedUnigram" else None
    results: Results = []
    for given in case.true_classes:
        true_classes = torch.tensor(given, dtype=torch.int64)
        arguments = (generator, true_classes, case.num_sampled)
        if case.kind == "All":
            drawn = ops.all_candidates(true_classes, case.range_max)
        elif counts is not None:
            drawn = ops.learned_unigram_candidates_(
                generator, counts, true_classes, case.num_sampled, unique=case.unique
            )
        elif table is not None:
            drawn = ops.fixed_unigram_candidates_(*arguments, table=table, unique=case.unique)
        else:
            draw = ops.uniform_candidates_ if case.kind == "Uniform" else ops.log_uniform_candidates_
            drawn = draw(*arguments, range_max=case.range_max, unique=case.unique)
        results.append([x.reshape(-1).tolist() for x in drawn])
    return results


def run_tensorflow(tf: Any, case: Case) -> Results:
    tf.random.set_seed(1)  # kernels are forgotten, so that the first call begins the stream
    arguments = {"num_sampled": case.num_sampled, "unique": case.unique, "seed": case.seed, "seed2": case.seed2}
    if case.kind != "All":
        arguments["range_max"] = case.range_max
    if case.kind == "FixedUnigram":
        arguments |= {"unigrams": case.unigrams, **case.options}
    sampler = getattr(tf.raw_ops, f"{case.kind}CandidateSampler")
    results: Results = []
    for given in case.true_classes:
        num_true = len(given[0]) if given else 1
        true_classes = np.array(given, np.int64).reshape(-1, num_true)
        drawn = sampler(true_classes=true_classes, num_true=num_true, **arguments)
        results.append([x.numpy().reshape(-1).tolist() for x in (drawn[0], drawn[1], drawn[2])])
    return results


def load() -> list[tuple[Case, Results]]:
    """Return the recorded cases and TensorFlow's results."""
    return [(Case(**entry["case"]), entry["results"]) for entry in json.loads(GOLDENS.read_text())]


def main() -> None:
    tf, rng = importlib.import_module("tensorflow"), np.random.default_rng(0)
    cases = [random_case(rng, kind) for kind in KINDS for _ in range(3)]
    entries = [json.dumps({"case": asdict(case), "results": run_tensorflow(tf, case)}) for case in cases]
    GOLDENS.write_text("[\n" + ",\n".join(entries) + "\n]\n")


if __name__ == "__main__":
    main()
