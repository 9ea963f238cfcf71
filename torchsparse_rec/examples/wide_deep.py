"""Wide & Deep learning on generated data or Criteo's: ``python -m torchsparse_rec.examples.wide_deep``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import torchsparse_rec
from torchsparse_rec import distributed, features, initializers
from torchsparse_rec._flags import Parser, at_least, check_alone, ending, positive_float, widths
from torchsparse_rec.data import PrebatchedDataset, write_prebatched
from torchsparse_rec.data.criteo import CATEGORIES, INTEGERS, held_out_rows, kept_rows, read_criteo
from torchsparse_rec.data.generated import effects, generator_of, zipf
from torchsparse_rec.distributed.torchrun import Ranks, run_command
from torchsparse_rec.examples import _common
from torchsparse_rec.examples._common import GRAD_MODES, OPTIMIZERS, RATES, Examples, Run
from torchsparse_rec.nn.linear import linear

PROGRAM = "python -m torchsparse_rec.examples.wide_deep"
RUNS = "runs/wide_deep"
LABEL, NUMBERS = "label", tuple(f"number_{n}" for n in range(10))
#: How many ids an example has of each categorical feature.
HOTS = {**{f"ten_hot_{n}": 10 for n in range(3)}, **{f"one_hot_{n}": 1 for n in range(37)}}

# ---- Data ------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Labels, float32 ``[B]``, and raw columns by name, tensors or those of a ``pyarrow.RecordBatch``."""

    labels: Tensor
    columns: Any

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.labels)

    def rows(self, span: slice) -> Batch:
        """Return the batch of some of the examples."""
        if isinstance(self.columns, Mapping):
            return Batch(self.labels[span], {name: column[span] for name, column in self.columns.items()})
        return Batch(self.labels[span], self.columns.slice(span.start, span.stop - span.start))


@dataclass(frozen=True)
class Generator:
    """Examples by a hidden model: 10 numbers, 37 features of one id and 3 of ten; a batch depends on its number."""

    rows: int
    batch_size: int
    distribution: str = "uniform"
    seed: int = 0

    def batch(self, number: int) -> Batch:
        """Return the batch of a number, at least 0."""
        random, count = generator_of(self.seed, number), self.batch_size * sum(HOTS.values())
        numbers = torch.randn(len(NUMBERS), self.batch_size, generator=random)
        if self.distribution == "uniform":
            ids = torch.randint(self.rows, (count,), generator=random)
        else:
            ids = zipf(torch.rand(count, generator=random, dtype=torch.float64), self.rows)
        columns: dict[str, Tensor] = dict(zip(NUMBERS, numbers.unbind(0), strict=True))
        parts = ids.split([self.batch_size * hot for hot in HOTS.values()])
        for (name, hot), part in zip(HOTS.items(), parts, strict=True):
            columns[name] = part if hot == 1 else part.view(self.batch_size, hot)
        chance = torch.sigmoid(self.logits(numbers, columns))
        return Batch((torch.rand(self.batch_size, generator=random) < chance).to(torch.float32), columns)

    def logits(self, numbers: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden model's logits; numbers add a standard deviation of 1.0, ids one of 1.5."""
        weights = effects(torch.arange(len(NUMBERS)), -1)
        logits = (weights * (1.0 / weights.norm())) @ numbers
        # A number uniform in [-1, 1) has the variance 1/3, and the sum of a feature's k ids is divided by sqrt(k).
        scale = 1.5 * (3.0 / len(HOTS)) ** 0.5
        for feature, (name, hot) in enumerate(HOTS.items()):
            found = effects(columns[name], feature)
            logits += scale * (found if hot == 1 else found.sum(1) / hot**0.5)
        return logits


def generated_examples(settings: Namespace, path: Path | None = None) -> Examples:
    """Return generated examples; a file at ``path`` keeps those of an epoch, prebatched, and is made if missing."""
    generator = Generator(settings.rows, settings.batch_size, settings.distribution, settings.seed)
    length, held_out = (-(-count // settings.batch_size) for count in (settings.samples, settings.held_out))
    name = f"{length} batches of {generator}"
    generated = Examples(name, lambda first: map(generator.batch, range(first, length)), length)
    generated.held_out = [generator.batch(number) for number in range(length, length + held_out)]
    if path is None:
        return generated

    def stored(batch: Batch) -> dict[str, Tensor]:
        return {LABEL: batch.labels.to(torch.int8), **batch.columns}

    if not path.exists():
        write_prebatched(path, map(stored, generated.batches(0)))
    dataset, first = PrebatchedDataset(path), stored(generator.batch(0))
    found = dataset.get_batch(0)
    same = len(dataset) == length and found.keys() == first.keys()
    if not same or any(not torch.equal(found[name].to(x.dtype), x) for name, x in first.items()):
        raise ValueError(
            f"{path} has {len(dataset)} batches of other examples than {name}: give it another name, or remove it"
        )
    read = lambda begin: (Batch(x[LABEL].to(torch.float32), x) for x in islice(dataset, begin, None))  # noqa: E731
    return Examples(name, read, length, generated.held_out)


def criteo_examples(settings: Namespace, path: Path) -> Examples:
    """Return the rows of a file of Criteo's, which is read anew in every epoch. Every tenth row is held out."""

    def rows() -> Iterator[Any]:
        # So many are read at a time that about a batch's remain without those held out.
        return read_criteo(path, batch_size=-(-settings.batch_size * 10 // 9))

    def batch(rows: Any) -> Batch:
        labels = rows.column(LABEL).to_numpy(zero_copy_only=False).astype(np.float32)
        return Batch(torch.from_numpy(labels), rows)

    name = f"{path.name} of {path.stat().st_size:,} bytes in batches of {settings.batch_size}"
    held_out = list(map(batch, held_out_rows(rows(), settings.held_out)))
    return Examples(name, lambda first: map(batch, islice(kept_rows(rows()), first, None)), None, held_out)


# ---- Columns ---------------------------------------------------------------------------------------------------------


def make_transform(settings: Namespace, is_criteo: bool = False) -> features.FeatureTransform:
    """Return what makes numbers and ids of raw columns: of generated ones, or of Criteo's 13 counts and 26 strings."""

    def table(column: Any) -> Any:
        as_keras = initializers.Uniform(-0.05, 0.05)
        return features.embedding_column(column, settings.embedding_dim + 1, "mean", as_keras)

    if is_criteo:  # log(1 + x) of counts, 0 for missing and negative ones
        logarithm = features.Compose((features.Clip(0.0), features.Log()))
        counts = [features.numeric_column(name, default_value=0.0, normalizer_fn=logarithm) for name in INTEGERS]
        strings = [features.categorical_column_with_hash_bucket(name, settings.rows) for name in CATEGORIES]
        return features.FeatureTransform([*counts, *map(table, strings)])
    numbers = [features.numeric_column(name) for name in NUMBERS]
    identity, hashed = features.categorical_column_with_identity, features.categorical_column_with_hash_bucket
    make: Any = identity if settings.columns == "identity" else partial(hashed, dtype="int64")
    ids = [make(name, settings.rows) for name in HOTS]
    # No generated id is missing, so that the transform need not look for missing ones.
    return features.FeatureTransform([*numbers, *map(table, ids)], drop_missing=False)


# ---- Model -----------------------------------------------------------------------------------------------------------


class WideDeep(nn.Module):
    """
    The logit ``wide(numbers, ids) + deep(numbers, embeddings)``.

    A row of a table holds an id's embedding and, as its last column, its weight in the wide part: one lookup and one
    update serve both, which halves the accesses to memory at random. To optimizers that treat the elements of a table
    one by one it makes no difference.

    Args:
        tables: a config for each feature, their rows one column wider than the embeddings; pooled by mean.
        hots: the number of ids of each feature in an example: the wide part adds up their weights.
        numbers: the number of numbers of an example.
        mlp: the widths of the perceptron's hidden layers.
        grad_mode: the tables' mode.

    Source:
        Cheng et al., Wide & Deep Learning for Recommender Systems, 2016.
    """

    chosen: Tensor
    hidden: Any  # the perceptron's layers

    def __init__(
        self, tables: Sequence[Any], hots: Mapping[str, int], numbers: int, mlp: Sequence[int], grad_mode: Any
    ) -> None:
        super().__init__()
        self.names = [feature for table in tables for feature in table.feature_names]
        self.features, self.embedding_dim, self.numbers = len(self.names), tables[0].embedding_dim - 1, numbers
        self.bags = torchsparse_rec.nn.EmbeddingBagCollection(list(tables), grad_mode=grad_mode)
        self.wide = nn.Linear(numbers, 1)
        sizes = [self.features * self.embedding_dim + numbers, *mlp]
        self.hidden = nn.ModuleList(nn.Linear(n, m) for n, m in zip(sizes[:-1], sizes[1:], strict=True))
        self.output = nn.Linear(mlp[-1], 1)
        # This matrix picks the wide part's weights out of the pooled rows.
        chosen = torch.zeros(self.features, self.embedding_dim + 1)
        chosen[:, -1] = torch.tensor([float(hots[name]) for name in self.names])
        self.register_buffer("chosen", chosen.view(1, -1), persistent=False)
        for layer in [*self.hidden, self.output]:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        for of_wide in (self.wide.weight, self.wide.bias, *(table[:, -1] for table in self.bags.parameters())):
            nn.init.zeros_(of_wide.detach())  # as TensorFlow's linear models start

    def forward(self, numbers: Tensor, ids: Any) -> Tensor:
        """Return the logits ``[B]`` of numbers ``[B, n]`` and all features' ids, a ``KeyedJaggedTensor`` or mapping."""
        first, *later = self.hidden
        pooled = self.bags(ids).values()  # [B, features * (embedding_dim + 1)]
        of_tables, of_numbers, bias = self._first_layer(first)
        # The wide part is one more output of the first layer: the pooled rows are read once, and never taken apart.
        both = torch.addmm(linear(pooled, of_tables, bias), numbers, of_numbers)
        hidden, wide = both.split([first.out_features, 1], 1)
        hidden = hidden.relu()
        for layer in later:
            hidden = linear(hidden, layer.weight, layer.bias).relu()
        return (self.output(hidden) + wide).squeeze(1)

    def _first_layer(self, first: Any) -> tuple[Tensor, Tensor, Tensor]:
        """
        Return the weights for pooled rows and for numbers, and the bias, of the first layer and the wide part together.

        Weights for numbers are ``[inputs, outputs]``, as the product that computes their gradient is faster so.
        """
        embeddings = self.features * self.embedding_dim
        deep, of_numbers = first.weight.split([embeddings, self.numbers], 1)
        deep = deep.reshape(-1, self.features, self.embedding_dim)
        deep = nn.functional.pad(deep, (0, 1)).flatten(1)  # Zeros keep the wide part's weights out of the perceptron.
        numbers = torch.cat([of_numbers.t(), self.wide.weight.t()], 1)
        return torch.cat([deep, self.chosen]), numbers, torch.cat([first.bias, self.wide.bias])


def make_model(transform: features.FeatureTransform, settings: Namespace) -> WideDeep:
    """Make a network whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):  # torch's global generator keeps its state
        torch.manual_seed(settings.seed)
        tables, numbers = transform.embedding_bag_configs(), len(transform.dense_slices())
        hots = {name: HOTS.get(name, 1) for table in tables for name in table.feature_names}
        return WideDeep(tables, hots, numbers, settings.mlp, settings.grad_mode)


# ---- The program -----------------------------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(RATES, prog=PROGRAM, description="Train Wide & Deep (Cheng et al., 2016).")
    add, setting, count = parser.add_argument, parser.setting, at_least(1)
    setting("--columns", "identity", "columns of generated ids", choices=("identity", "hashed"))
    setting("--rows", 20_000, "rows of each table", type=count)
    setting("--samples", 262_144, "examples generated for an epoch", type=count)
    setting("--held-out", 32_768, "examples for the metrics", type=count)
    setting("--batch-size", 4096, "examples of a step", type=count)
    setting("--distribution", "uniform", "distribution of generated ids", choices=("uniform", "zipf"))
    setting("--embedding-dim", 16, "width of each feature's rows", type=count)
    setting("--mlp", [256, 128], "widths of the hidden layers", type=widths)
    setting("--grad-mode", "fused", "gradient mode of the tables", choices=GRAD_MODES)
    setting("--optimizer", "sgd", "optimizer", choices=tuple(OPTIMIZERS))
    parser.add_rate()
    setting("--seed", 0, "seed of weights and examples", type=at_least(0))
    add("--table-gb", type=positive_float, metavar="GB", help="size of all tables in 10^9 bytes, instead of --rows")
    add("--criteo", type=Path, metavar="TRAIN.TXT", help="train on this file of Criteo's instead of generated examples")
    add("--prebatched", type=Path, metavar="PATH", help="keep the generated batches in this file, made if missing")
    add("--epochs", type=count, help="epochs in total, default 3")
    add("--steps", type=count, help="stop after this many steps in total")
    add("--evaluate-every", type=count, metavar="STEPS", help="steps between metrics within an epoch")
    parser.add_machine()
    parser.add_folder(RUNS)
    add("--no-checkpoint", action="store_true", help="write no checkpoint, which is as large as the tables")
    add("--compare", choices=["tensorflow"], help="train --steps in TensorFlow too, default 100")
    return parser


def settings_of(parser: Parser, arguments: Namespace, saved: dict[str, Any] | None) -> Namespace:
    """Return the settings; --table-gb stands for so many --rows."""
    given, known = vars(arguments), saved and saved["settings"]
    if arguments.table_gb is not None:
        dim = arguments.embedding_dim or (known or parser.defaults)["embedding_dim"]
        tables = len(CATEGORIES) if arguments.criteo else len(HOTS)
        given = {**given, "rows": max(1, round(arguments.table_gb * 1e9 / (tables * (dim + 1) * 4)))}
    return parser.settings(given, known, saved and saved["folder"])


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code. Unusable input ends the process with one line and code 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    with ending(parser, ValueError, OSError, ImportError):
        check_alone(arguments, "criteo", "columns", "samples", "distribution", "prebatched")
        check_alone(arguments, "table_gb", "rows")
        check_alone(arguments, "compare", "resume", "criteo", "plan", "epochs", "held_out", "evaluate_every")
        check_alone(arguments, "compare", "output_dir", "no_checkpoint")
        ranks = _common.begin(arguments, "torchmetrics", "safetensors")
        if arguments.compare:
            settings = settings_of(parser, arguments, None)
            examples = generated_examples(settings, arguments.prebatched)
            return _common.compare("wide_deep_tensorflow", arguments, settings, examples, arguments.steps or 100)
        return train(parser, arguments, ranks)


def train(parser: Parser, arguments: Namespace, ranks: Ranks) -> int:
    """Train, from a checkpoint if there is one to go on from, and print records."""
    arguments.epochs = arguments.epochs or 3
    folder = _common.folder_of(arguments, RUNS)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint"
    saved = _common.saved_of(arguments, checkpoint, PROGRAM, ranks)
    settings = settings_of(parser, arguments, saved)
    if arguments.criteo:
        examples = criteo_examples(settings, arguments.criteo)
    else:
        if arguments.prebatched:  # the first rank writes it, where it is not there
            ranks.from_first(lambda: bool(generated_examples(settings, arguments.prebatched)))
        examples = generated_examples(settings, arguments.prebatched)
    transform = make_transform(settings, is_criteo=bool(arguments.criteo))
    model, tables = make_model(transform, settings), transform.embedding_bag_configs()
    size = 4e-9 * sum(table.num_embeddings * table.embedding_dim for table in tables)
    ranks.print(f"data: {examples.name}; {len(tables)} tables, {size:.3g} GB")
    model, transform = model.to(arguments.device), transform.to(arguments.device)
    if ranks.group:
        distributed.shard(model, plan=arguments.plan or "auto")
        ranks.print(str(distributed.plan_of(model)).splitlines()[-1])
    optimizer, run = OPTIMIZERS[settings.optimizer](model.parameters(), lr=settings.lr, in_backward=True), Run()
    about = _common.about(PROGRAM, settings, examples, arguments.device)
    if saved:
        run, _ = _common.load(saved, model, optimizer, arguments, ranks, **about)
    title = f"Wide & Deep, {'Criteo' if arguments.criteo else f'{settings.columns} columns'}"
    curves = _common.curves_of_clicks(run.history, folder, title)
    parser.when_interrupted = partial(run.when_interrupted, ranks, curves, "--resume")

    def logits(batch: Batch) -> Tensor:
        found = transform(batch.columns)
        return model(found.dense, found.sparse)

    while not run.is_over(arguments.epochs, arguments.steps):
        for batch, size, following in run.batches(examples, ranks, arguments.device):
            loss = _common.train(model, optimizer, logits(batch), batch.labels.to(arguments.device), ranks)
            run.add(loss, size, following is None)
            is_over = run.is_over(arguments.epochs, arguments.steps)
            if is_over or following is None or run.is_at(arguments.evaluate_every):
                record = run.record(lambda: _common.metrics_of_clicks(model, logits, examples.held_out, ranks))
                ranks.print(_common.line_of_clicks(record, arguments.epochs))
                if not arguments.no_checkpoint:
                    run.save(checkpoint, model, optimizer, **about)
            if is_over:
                break
    if ranks.rank == 0:
        _common.finish_clicks(run.history, curves, "none" if arguments.no_checkpoint else checkpoint)
    return 0


if __name__ == "__main__":
    run_command(main)
