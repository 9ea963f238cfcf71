"""Sample inputs of the family ``embedding_collection``: lookups in several tables, each also a sample of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from samples.row_optimizer import IDLE_RULES, OTHER_RULES, changing, last_steps_for, states_for
from samples.sample import FLOATS, INDICES, PRESENT_ROWS, Family, Random, Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference import EXTREMES, MAX, MEAN, MIN, SQRTN, SUM
from torchsparse_rec.compat._parity.reference.embedding_collection import (
    embedding_collection,
    embedding_collection_current,
)
from torchsparse_rec.compat._parity.reference.row_optimizer import history_of


@dataclass(frozen=True)
class Collection:
    """Lookups in several tables and the gradient of their results."""

    name: str
    weights: list[Tensor]
    indices: Tensor
    offsets: Tensor | None
    per_sample_weights: Tensor | None
    tables: list[int]
    keys: list[int]
    modes: list[int]
    bags: list[int]
    padding_idx: list[int]
    side_by_side: bool
    grad: Tensor
    wanted: list[bool]
    representative: bool = False

    @property
    def inputs(self) -> tuple:
        return self.indices, self.offsets, self.per_sample_weights

    @property
    def lists(self) -> tuple:
        return self.tables, self.keys, self.modes, self.bags, self.padding_idx, self.side_by_side

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        return [x.shape[0] for x in self.weights], [x.shape[1] for x in self.weights]

    def argmax(self, weights: list[Tensor] | None = None) -> Tensor | None:
        """Return the argmax that the forward gives the backward of extremes, from the reference."""
        if not {*EXTREMES} & {*self.modes}:
            return None
        return embedding_collection(weights or self.weights, *self.inputs, *self.lists, False)[1]


def random_collection(
    name: str,
    rows: tuple[int, ...] = (12, 5, 30),
    dims: tuple[int, ...] = (3, 1, 8),
    tables: tuple[int, ...] = (0, 1, 2),
    keys: tuple[int, ...] = (0, 1, 2),
    modes: tuple[int, ...] = (SUM, MEAN, SQRTN),
    bags: tuple[int, ...] = (5, 5, 5),
    padding_idx: tuple[int, ...] = (-1, -1, -1),
    most: int | None = 5,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    offset: torch.dtype = torch.int64,
    weighted: bool = False,
    side_by_side: bool = True,
    wanted: tuple[bool, ...] | None = None,
    seed: int = 0,
    representative: bool = False,
) -> Collection:
    """Return random lookups in bags of up to ``most`` ids, or of single ids without offsets if ``most`` is None."""
    random = Random(seed)
    drawn = [1] * sum(bags) if most is None else random.integers(0, most + 1, sum(bags), dtype=torch.int64).tolist()
    starts = [0, *itertools.accumulate(lengths or drawn)]
    # The ids of a key must suit all tables that it is looked up in.
    parts, first = [], 0
    for key, count in enumerate(bags):
        read = [table for table, other in zip(tables, keys, strict=True) if other == key]
        bound = min((rows[table] + (padding_idx[table] == rows[table]) for table in read), default=99)
        ids = starts[first + count] - starts[first]
        parts.append(random.integers(0, max(bound, 1), ids, dtype=index))
        first += count
    sizes = [(bags[key], dims[table]) for table, key in zip(tables, keys, strict=True)]
    elements = sum(count * dim for count, dim in sizes)
    shape = (sizes[0][0], sum(dim for _, dim in sizes)) if side_by_side else (elements,)
    return Collection(
        name,
        [random.floats(v, d, dtype=dtype) for v, d in zip(rows, dims, strict=True)],
        torch.cat([*parts, torch.empty(0, dtype=index)]),
        None if most is None else torch.tensor(starts, dtype=offset),
        random.weights(starts[-1], dtype) if weighted else None,
        list(tables),
        list(keys),
        list(modes),
        list(bags),
        list(padding_idx),
        side_by_side,
        random.floats(*shape, dtype=dtype),
        list(wanted or [True] * len(rows)),
        representative,
    )


def _by_hand(**flags: object) -> Collection:
    return Collection(
        "by_hand",
        [torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]])],
        torch.tensor([1, 0, 2, 0, 1]),
        torch.tensor([0, 1, 2, 4, 5]),
        None,
        [0, 1],
        [0, 1],
        [SUM, MEAN],
        [2, 2],
        [-1, -1],
        True,
        torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        [True, True],
        **flags,  # type: ignore[arg-type]
    )


SHARED = {"tables": (0, 2, 0, 1, 2), "keys": (0, 2, 1, 1, 0), "modes": (SUM, MEAN, SQRTN, SUM, MEAN)}


def collections() -> Iterator[Collection]:
    yield _by_hand(representative=True)
    yield random_collection("max", modes=(MAX, MEAN, MIN), representative=True, side_by_side=False, seed=1)
    yield random_collection("weighted", weighted=True, padding_idx=(2, 5, -1), representative=True, seed=2)
    yield random_collection("sequences", modes=(SUM,) * 3, bags=(4, 0, 7), most=None, side_by_side=False, seed=3)
    flavours = itertools.cycle(itertools.product((False, True), (True, False), (-1, 4)))
    dims = itertools.cycle([(1, 2, 3), (16, 1, 64), (130, 17, 7)])
    for seed, (dtype, index, offset) in enumerate(itertools.product(FLOATS, INDICES, INDICES)):
        weighted, side_by_side, padding = next(flavours)
        name = f"{dtype}_{index}_{offset}".replace("torch.", "")
        flavour = {"dtype": dtype, "index": index, "offset": offset, "side_by_side": side_by_side, "seed": seed}
        flavour |= {"dims": next(dims), "padding_idx": (padding, -1, padding)}
        yield random_collection(f"{name}_shared", weighted=weighted, **flavour, **SHARED)
        yield random_collection(f"{name}_max", **flavour, **(SHARED | {"modes": (MAX, SUM, MIN, MAX, MEAN)}))
    yield random_collection("bags_of_their_own", bags=(2, 9, 0), side_by_side=False, weighted=True)
    yield random_collection("not_all_wanted", wanted=(True, False, True), **SHARED)
    yield random_collection("none_wanted", wanted=(False, False, False))
    yield random_collection("table_and_key_left_out", tables=(2,), keys=(1,), modes=(MEAN,), weighted=True)
    yield random_collection("one_id_each", most=None, modes=(SUM,) * 3, tables=(0, 0, 2), index=torch.int32)
    yield random_collection("no_bags", bags=(0, 0, 0))
    yield random_collection("only_empty_bags", most=0, weighted=True)
    yield random_collection("no_rows", rows=(0, 0, 3), most=0)
    yield random_collection("no_columns", dims=(0, 4, 0), weighted=True)
    yield random_collection("only_padding", rows=(0, 1, 2), padding_idx=(0, 0, 2))
    yield random_collection("long_bags", rows=(3, 4, 5), bags=(2, 2, 2), most=700, weighted=True, seed=6)


def forward_samples(operator: str) -> Iterator[Sample]:
    for x in collections():
        yield Sample(operator, x.name, (x.weights, *x.inputs, *x.lists, False), x.representative)


def backward_samples(operator: str) -> Iterator[Sample]:
    for x in collections():
        arguments = (x.grad, *x.inputs, x.argmax(), *x.sizes, *x.lists, x.wanted)
        yield Sample(operator, x.name, arguments, x.representative)


# ---- Tables of an optimizer -----------------------------------------------------------------------------------------

STEPS = 12


def optimizer_of(
    x: Collection,
    tables: list[int],
    rule: int,
    h: list[float],
    seed: int,
    with_history: bool = True,
    steps: int = STEPS,
) -> tuple:
    """Return the states of some tables; with a history also the last step of each row, and steps from 4 on."""
    random = Random(seed)
    of_table = [(*x.weights[k].shape, x.weights[k].dtype) for k in tables]
    states = [s for rows, dim, dtype in of_table for s in states_for(random, rule, h, rows, dim, dtype)]
    if not with_history:
        return states, [], None
    last_steps = [last_steps_for(random, rows, steps) for rows, _, _ in of_table]
    return states, last_steps, history_of(rule, changing(h, steps), 3)


def _with_rules(rules: dict[str, tuple[int, list[float]]]) -> Iterator[tuple[str, int, list[float], Collection, int]]:
    """Yield every problem with some rule, and every rule with some problem."""
    problems = list(collections())
    names = itertools.cycle(rules)
    for seed, x in enumerate(problems):
        name = next(names)
        yield name, *rules[name], x, seed
    for seed, name in enumerate(list(rules)[len(problems) % len(rules) :]):
        yield name, *rules[name], replace(random_collection(f"small_{seed}", **SHARED), representative=seed < 2), seed


def current_samples(operator: str) -> Iterator[Sample]:
    for name, rule, h, x, seed in _with_rules(IDLE_RULES):
        states, last_steps, history = optimizer_of(x, list(range(len(x.weights))), rule, h, seed)
        tables = (x.weights, states, last_steps, history)
        arguments = (*tables, *x.inputs, *x.lists, rule, h, 3 + STEPS, 3)
        yield Sample(operator, f"{x.name}-{name}", arguments, x.representative)


def weights_backward_samples(operator: str) -> Iterator[Sample]:
    for x in collections():
        if x.per_sample_weights is not None:
            output = embedding_collection(x.weights, *x.inputs, *x.lists, False)[0]
            arguments = (x.grad, x.weights, [], [], None, *x.inputs, output, *x.lists, 0, [], 0, 0)
            yield Sample(operator, x.name, arguments, x.representative)
    for name, rule, h, x, seed in _with_rules(IDLE_RULES):
        if x.per_sample_weights is not None:
            states, last_steps, history = optimizer_of(x, list(range(len(x.weights))), rule, h, seed)
            tables, step = (x.weights, states, last_steps, history), (rule, h, 3 + STEPS, 3)
            output = embedding_collection_current(*tables, *x.inputs, *x.lists, *step)[0]
            yield Sample(operator, f"{x.name}-{name}", (x.grad, *tables, *x.inputs, output, *x.lists, *step))


def update_samples(operator: str) -> Iterator[Sample]:
    for word, rules in (("caught_up", IDLE_RULES), ("plain", OTHER_RULES | IDLE_RULES)):
        for name, rule, h, x, seed in _with_rules(rules):
            if x.per_sample_weights is not None:
                # None below zero: entries could add up to zero but for a rounding, and some rules leave zeros alone.
                x = replace(x, per_sample_weights=x.per_sample_weights.abs())
            stepped = [k for k, want in enumerate(x.wanted) if want]
            states, last_steps, history = optimizer_of(x, stepped, rule, h, seed, with_history=word == "caught_up")
            wide = torch.float64 if x.grad.dtype == torch.float64 else torch.float32
            scale = torch.tensor([0.5], dtype=wide) if seed % 2 else None
            given = (x.weights, states, last_steps, history, x.grad, *x.inputs, x.argmax(), *x.lists, x.wanted)
            step = (scale, rule, h, 4 + STEPS, 3, seed % 3 == 0, [])
            yield Sample(operator, f"{x.name}-{name}-{word}", (*given, *step), x.representative)
    for seed, name in enumerate(("lamb", "ftrl", "rowwise_adagrad", "momentum", "partial_rowwise_adam", "amsgrad")):
        rule, h = (OTHER_RULES | IDLE_RULES)[name]
        x = random_collection("zeros", dims=(3, 130, 300), modes=(SUM,) * 3, weighted=seed % 2 == 0, seed=seed)
        x.grad[:3] *= -0.0
        states, *_ = optimizer_of(x, [0, 1, 2], rule, h, seed, with_history=False)
        given = (x.weights, states, [], None, x.grad, *x.inputs, None, *x.lists, x.wanted)
        yield Sample(operator, f"zeros-{name}", (*given, None, rule, h, 4 + STEPS, 3, False, []))


# ---- Derivatives ----------------------------------------------------------------------------------------------------


def _smooth() -> Iterator[Collection]:
    usual = {"rows": (5, 4), "dims": (2, 1), "tables": (0, 1, 0), "keys": (0, 1, 1), "bags": (3, 3)}
    usual |= {"dtype": torch.float64, "most": 3, "seed": 1}
    for side_by_side in (True, False):
        word = "side_by_side" if side_by_side else "flat"
        flavour = usual | {"side_by_side": side_by_side, "padding_idx": (4, 4)}
        yield random_collection(f"max_{word}", modes=(MAX, SUM, MIN), **flavour)
        weighted = random_collection(f"weighted_{word}", modes=(SUM, MEAN, SQRTN), weighted=True, **flavour)
        weights = Random(5).floats(*weighted.indices.shape, dtype=torch.float64) + 3
        yield replace(weighted, per_sample_weights=weights)
    flavour = usual | {"side_by_side": False, "padding_idx": (-1, -1), "wanted": (True, False)}
    yield random_collection("not_all_wanted", modes=(SUM, MEAN, SQRTN), **flavour)
    yield random_collection("sequences", modes=(SUM,) * 3, **(flavour | {"most": None}))


def gradient_samples(operator: str) -> Iterator[Sample]:
    for x in _smooth():
        yield Sample(operator, x.name, (x.weights, *x.inputs, *x.lists, False))


FAMILY = Family(
    samples={
        "embedding_collection": forward_samples,
        "embedding_collection_current": current_samples,
        "embedding_collection_dense_backward": backward_samples,
        "embedding_collection_sparse_backward": backward_samples,
        "embedding_collection_coo_backward": backward_samples,
        "embedding_collection_weights_backward": weights_backward_samples,
        "embedding_collection_update_": update_samples,
    },
    gradients={"embedding_collection": gradient_samples},
    read_backs={f"embedding_collection_{name}_backward": PRESENT_ROWS for name in ("sparse", "coo")},
)
