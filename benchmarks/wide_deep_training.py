"""
Benchmark rows of the Wide & Deep example: its sparse step, and its whole step, from raw columns in memory.

40 features, three of them with ten ids, and 10 numbers. TensorFlow is timed in each of its forms: with its function for
any number of ids and with gather. Its embeddings and wide part are in separate tables, or in joined rows, as ours are.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchsparse_rec
from torchsparse_rec.distributed.torchrun import Ranks
from torchsparse_rec.examples import _common, wide_deep
from torchsparse_rec.examples.wide_deep import HOTS, Batch, Generator

from .rows import Call, Case, Make, Options, Row, UnavailableError, tensorflow

ROWS_OF_TABLE, BATCH, DIM, MLP = 400_000, 16_384, 16, (256, 128)
BATCHES, RATE = 4, 0.1
SAFE, GATHER = "safe_embedding_lookup_sparse", "gather"
FORMS = {
    "TensorFlow safe_embedding_lookup_sparse": (SAFE, "separate"),
    "TensorFlow gather": (GATHER, "separate"),
    "TensorFlow safe_..., joined rows": (SAFE, "joined"),
    "TensorFlow gather, joined rows": (GATHER, "joined"),
}


class Problem:
    """Columns of a kind, batches, and first weights; every side makes its own from them."""

    def __init__(self, kind: str, device: str, rows: int = ROWS_OF_TABLE, batch: int = BATCH) -> None:
        self.kind, self.device, self.rows, self.batch = kind, device, rows, batch

    @cached_property
    def batches(self) -> list[Batch]:
        """The batches, on the device."""
        generator = Generator(self.rows, self.batch)
        return [_moved(generator.batch(number), self.device) for number in range(BATCHES)]

    def settings(self) -> Any:
        """Return the example's settings, by which an epoch has all batches."""
        given = {"columns": self.kind, "rows": self.rows, "embedding_dim": DIM, "mlp": list(MLP), "lr": RATE}
        sizes = {"batch_size": self.batch, "samples": BATCHES * self.batch, "held_out": self.batch}
        return wide_deep.make_parser().settings({**given, **sizes})

    def transform(self) -> Any:
        """Make the transform anew, because it may be moved to another device."""
        return wide_deep.make_transform(self.settings())

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient of the pooled rows, ``[batch, features * (DIM + 1)]``."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, len(HOTS) * (DIM + 1), generator=generator).to(self.device)

    def tables(self) -> dict[str, Tensor]:
        """Return the first rows by the table's name."""
        generator = torch.Generator().manual_seed(2)
        return {
            table.name: torch.empty(self.rows, DIM + 1).uniform_(-0.01, 0.01, generator=generator)
            for table in self.transform().embedding_bag_configs()
        }

    def model(self) -> Any:
        """Make the network with its first weights."""
        return wide_deep.make_model(self.transform(), self.settings()).to(self.device)


def _moved(batch: Batch, device: str) -> Batch:
    return Batch(batch.labels.to(device), {name: x.to(device) for name, x in batch.columns.items()})


# ---- The sparse step -------------------------------------------------------------------------------------------------


class OurTables:
    """Our sparse step: columns to ids, lookup, backward with a given gradient, update."""

    def __init__(self, problem: Problem) -> None:
        tables, self.transform = problem.tables(), problem.transform().to(problem.device)
        self.names = list(tables)
        self.bags = torchsparse_rec.nn.EmbeddingBagCollection(
            self.transform.embedding_bag_configs(),
            grad_mode="fused",
            device=torch.device(problem.device),
        )
        self.bags.load_state_dict({f"embedding_bags.{name}.weight": table for name, table in tables.items()})
        self.optimizer = torchsparse_rec.optim.SGD(self.bags.parameters(), lr=RATE, in_backward=True)
        self.gradient, self.batches = problem.gradient, itertools.cycle(problem.batches)

    def step(self) -> None:
        """Train on the next batch."""
        ids = self.transform(next(self.batches).columns).sparse
        self.bags(ids).values().backward(self.gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def trained(self) -> list[Tensor]:
        """Return the trained tables."""
        state = self.bags.state_dict()
        return [state[f"embedding_bags.{name}.weight"].cpu() for name in self.names]


class TheirTables:
    """TensorFlow's sparse step, in one tf.function."""

    def __init__(self, problem: Problem, options: Options, form: tuple[str, str]) -> None:
        tf = tensorflow(options)
        from .tensorflow_training import Optimizer
        from .wide_deep_tensorflow import Form, TensorflowTables

        names = _features(problem)
        hots = [HOTS[name] for name in names]
        rows = [table.numpy() for table in problem.tables().values()]
        tables = TensorflowTables(rows, hots, problem.kind == "hashed", problem.batch, Form(*form))
        gradients = [tf.constant(x.contiguous().numpy()) for x in _gradients(problem, hots, form[1])]
        optimizer = Optimizer("sgd", RATE, tables.variables)

        @tf.function
        def step(ids: list[Any]) -> Any:
            with tf.GradientTape() as tape:
                pooled = [x for part in tables.look_up(ids) for x in part]
            optimizer.step(tape.gradient(pooled, tables.variables, output_gradients=gradients))
            return pooled[0]

        prepared = [[tf.constant(batch.columns[name].flatten().numpy()) for name in names] for batch in problem.batches]
        batches = itertools.cycle(prepared)
        self.step: Callable[[], Any] = lambda: step(next(batches))
        self.trained: Callable[[], list[Tensor]] = lambda: [torch.from_numpy(table) for table in tables.rows()]


def _features(problem: Problem) -> list[str]:
    """Return the features' names, in the order of the tables."""
    return [name for table in problem.transform().embedding_bag_configs() for name in table.feature_names]


def _gradients(problem: Problem, hots: list[int], tables: str) -> list[Tensor]:
    """Return the gradient of each of TensorFlow's lookups. A sum's is its mean's over the number of ids."""
    rows = problem.gradient.split(DIM + 1, 1)
    if tables == "joined":
        return list(rows)
    return [x[:, :-1] for x in rows] + [x[:, -1:] / hot for x, hot in zip(rows, hots, strict=True)]


def reference_tables(problem: Problem, steps: int) -> list[Tensor]:
    """Return the tables after that many steps, computed by the formula in float64."""
    tables, names = [table.double() for table in problem.tables().values()], _features(problem)
    parts = problem.gradient.double().cpu().split(DIM + 1, 1)
    for batch in itertools.islice(itertools.cycle(problem.batches), steps):
        for table, name, part in zip(tables, names, parts, strict=True):
            ids = batch.columns[name].cpu().flatten()
            if problem.kind == "hashed":
                ids = torchsparse_rec.ops.to_hash_bucket_fast(ids, problem.rows)
            table.index_add_(0, ids, (part / HOTS[name]).repeat_interleave(HOTS[name], 0), alpha=-RATE)
    return [table.float() for table in tables]


def check_tables(problem: Problem, sides: dict[str, Callable[[Problem], Any]]) -> None:
    """Compare the tables that each side that can run here trains with the formula's."""
    expected = reference_tables(problem, 3)
    for name, make in sides.items():
        try:
            side = make(problem)
        except UnavailableError:
            continue
        for _ in range(3):
            side.step()
        for table, wanted in zip(side.trained(), expected, strict=True):
            torch.testing.assert_close(table, wanted, rtol=0, atol=2e-6, msg=f"{name}: {{}}".format)


def step_row(kind: str, targets: dict[str, float]) -> Row:
    """Make a benchmark row of the sparse step only."""

    def build(options: Options) -> Case:
        sides: dict[str, Callable[[Problem], Any]] = {
            name: partial(TheirTables, options=options, form=form) for name, form in FORMS.items()
        }
        problem = _problem(kind, options)

        def call(make: Callable[[Problem], Any]) -> Make:
            return lambda: make(problem).step

        return Case(
            call(OurTables),
            {name: call(make) for name, make in sides.items()},
            lambda: check_tables(_small(kind, options), {"ours": OurTables, **sides}),
            samples=problem.batch,
            ids=problem.batch * sum(HOTS.values()),
            sizes=_sizes(problem),
        )

    what = f"sparse step, {kind} columns: ids, lookup, backward, SGD; batch 16,384, no perceptron"
    return Row(f"wide_deep/step-{kind}", what, build, targets)


def _problem(kind: str, options: Options) -> Problem:
    return _small(kind, options) if options.quick else Problem(kind, options.device)


def _small(kind: str, options: Options) -> Problem:
    """Make a small problem, with few rows, so that a batch looks up many of them twice."""
    return Problem(kind, options.device, 50, 16)


def _sizes(problem: Problem) -> str:
    return f"{len(HOTS)} features, {problem.rows:,} rows each, dim {DIM} and 1"


# ---- The whole step --------------------------------------------------------------------------------------------------


def our_step(settings: Any, model: wide_deep.WideDeep) -> Callable[[Batch], Any]:
    """Return our training step, from raw columns."""
    device = next(model.parameters()).device
    transform, ranks = wide_deep.make_transform(settings).to(device), Ranks()
    make: Any = _common.OPTIMIZERS[settings.optimizer]
    optimizer = make(model.parameters(), lr=settings.lr, in_backward=True)

    def step(batch: Batch) -> Any:
        features = transform(batch.columns)
        logits = model(features.dense, features.sparse)
        return _common.train(model, optimizer, logits, batch.labels.to(device), ranks)

    return step


def our_training(problem: Problem) -> Callable[[Batch], Tensor]:
    """Make our training step of the whole network."""
    return our_step(problem.settings(), problem.model())


def their_training(problem: Problem, options: Options, form: tuple[str, str]) -> Callable[[Batch], Any]:
    """Make TensorFlow's training step of the whole network, on batches that are prepared once."""
    tensorflow(options)
    from .wide_deep_tensorflow import Form, TensorflowStep

    step = TensorflowStep(problem.settings(), problem.model(), Form(*form))
    prepared = {id(batch): step.prepare(batch) for batch in problem.batches}
    return lambda batch: step(prepared[id(batch)])


def _cycled(step: Callable[[Batch], Any], problem: Problem) -> Call:
    batches = itertools.cycle(problem.batches)
    return lambda: step(next(batches))


def check_losses(problem: Problem, sides: dict[str, Callable[[Problem], Any]]) -> None:
    """Compare every side's losses with those of the first."""
    expected = None
    for name, make in sides.items():
        try:
            call = _cycled(make(problem), problem)
        except UnavailableError:
            continue
        losses = [float(call()) for _ in range(20)]
        expected = expected or losses
        # Differences are compared one by one because max would pass over a NaN.
        for number, (one, other) in enumerate(zip(losses, expected, strict=True)):
            assert abs(one - other) < 1e-4, f"{name}: losses differ by {abs(one - other)} in step {number}"


def whole_row(kind: str, targets: dict[str, float]) -> Row:
    """Make a benchmark row for forward, backward and update of the whole network."""

    def build(options: Options) -> Case:
        sides: dict[str, Callable[[Problem], Any]] = {
            name: partial(their_training, options=options, form=form) for name, form in FORMS.items()
        }
        problem = _problem(kind, options)

        def call(make: Callable[[Problem], Any]) -> Make:
            return lambda: _cycled(make(problem), problem)

        return Case(
            call(our_training),
            {name: call(make) for name, make in sides.items()},
            lambda: check_losses(_small(kind, options), {"ours": our_training, **sides}),
            samples=problem.batch,
            ids=problem.batch * sum(HOTS.values()),
            sizes=f"{_sizes(problem)}, 10 numbers",
        )

    what = f"whole step, {kind} columns, perceptron 256-128, batch 16,384, SGD"
    return Row(f"wide_deep/whole-{kind}", what, build, targets)


# ---- From a file -----------------------------------------------------------------------------------------------------


def prebatched_row() -> Row:
    """Make a benchmark row for training from a prebatched file, beside training on the same batches in memory."""

    def build(options: Options) -> Case:
        problem = _problem("identity", options)

        def from_file() -> Call:
            step = our_training(problem)
            # The file is open, and can be read after its name is removed.
            with tempfile.TemporaryDirectory() as folder:
                source = wide_deep.generated_examples(problem.settings(), Path(folder, "train.arrow"))
            device = torch.device(problem.device)

            def epochs() -> Any:
                while True:
                    yield from source.batches(0)

            batches = epochs()
            return lambda: step(_on(next(batches), device))

        def from_memory() -> Call:
            return _cycled(our_training(problem), problem)

        def check() -> None:
            one, other = from_file(), from_memory()
            for _ in range(2 * BATCHES):
                assert float(one()) == float(other()), "the file's batches are others"

        return Case(from_file, {"from memory": from_memory}, check, samples=problem.batch, sizes=_sizes(problem))

    what = "whole step, identity columns, batches mapped from a prebatched file"
    return Row("wide_deep/from-prebatched", what, build, {"from memory": 0.95})


def _on(batch: Batch, device: torch.device) -> Batch:
    return batch if device.type == "cpu" else _moved(batch, str(device))


def _targets(ratio: float) -> dict[str, float]:
    """Return the target for the forms that TensorFlow's users write, with a separate table for the wide part."""
    return {name: ratio for name, (_, tables) in FORMS.items() if tables == "separate"}


ROWS = [
    step_row("identity", _targets(3.77)),
    step_row("hashed", _targets(5.55)),
    whole_row("identity", _targets(2.5)),
    whole_row("hashed", _targets(2.7)),
    prebatched_row(),
]
