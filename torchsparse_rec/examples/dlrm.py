"""DLRM on generated data or Criteo's, in tables without a vocabulary: ``python -m torchsparse_rec.examples.dlrm``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchsparse_rec
from torchsparse_rec import distributed, initializers, ops, variable
from torchsparse_rec._flags import Parser, at_least, check_alone, ending, widths
from torchsparse_rec.data import read_criteo, read_prebatched
from torchsparse_rec.data.criteo import CATEGORIES, COLUMNS, INTEGERS, as_tensors, held_out_rows, kept_rows
from torchsparse_rec.data.generated import effects, generator_of, zipf
from torchsparse_rec.distributed.torchrun import Ranks, run_command
from torchsparse_rec.examples import _common
from torchsparse_rec.examples._common import GRAD_MODES, OPTIMIZERS, Examples, Run
from torchsparse_rec.nn.linear import linear

PROGRAM = "python -m torchsparse_rec.examples.dlrm"
RATES = {**_common.RATES, "adagrad": 0.01}
KINDS, TIERS = ("dynamic", "hashed"), ("DRAM", "HBM", "HBM_DRAM", "DRAM_SSD", "HBM_DRAM_SSD")
#: How many different values each category has in the training file of the Display Advertising Challenge.
CARDINALITIES = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)

# ---- Data ------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Labels, float32 ``[B]``; numbers, float32 ``[B, 13]``; raw ids, int64 ``[26, B]``, feature by feature."""

    labels: Tensor
    numbers: Tensor
    ids: Tensor

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.labels)

    def rows(self, span: slice) -> Batch:
        """Return the batch of some of the examples."""
        return Batch(self.labels[span], self.numbers[span], self.ids[:, span])


def spread(ids: Tensor) -> Tensor:
    """Map numbers of 32 bits one to one to numbers of 32 bits in no visible order."""
    # An odd factor below 2^31 has an inverse modulo 2^32, and its product fits int64.
    ids = ((ids >> 16) ^ ids) * 0x7FEB352D & 0xFFFFFFFF
    ids = ((ids >> 15) ^ ids) * 0x5BD1E995 & 0xFFFFFFFF
    return (ids >> 16) ^ ids


@dataclass(frozen=True)
class Generator:
    """
    Examples of the Challenge's shape; a batch depends on the arguments and its number alone.

    The i-th commonest value of a category is about as frequent as ``i ** -1.05``, its raw id any 32 bits. Numbers are
    ``log(1 + x)`` of counts, most of which are small. Each number and each value has an effect on the label.

    Args:
        max_cardinality: the most values of a category. Default None: as many as in the Challenge, 33,762,577 in all.
    """

    batch_size: int
    max_cardinality: int | None = None
    seed: int = 0

    def batch(self, number: int) -> Batch:
        """Return the batch of a number, at least 0."""
        random, size = generator_of(self.seed, number), self.batch_size
        drawn = torch.randn(size, len(INTEGERS), generator=random)
        uniform = torch.rand(len(CATEGORIES), size, generator=random, dtype=torch.float64)
        counts = torch.tensor([min(count, self.max_cardinality or count) for count in CARDINALITIES])
        values, features = zipf(uniform, counts.unsqueeze(1)), torch.arange(len(CATEGORIES)).unsqueeze(1)
        # Numbers add a standard deviation of 0.8 to the hidden model's logit, ids one of 1.5, as an effect uniform in
        # [-1, 1) has the variance 1/3; by the mean a quarter of the labels are clicks.
        weights, scale = effects(torch.arange(len(INTEGERS)), -1), 1.5 * (3.0 / len(CATEGORIES)) ** 0.5
        logits = drawn @ (weights * (0.8 / weights.norm())) + scale * effects(values, features).sum(0) - 1.4
        labels = (torch.rand(size, generator=random) < torch.sigmoid(logits)).to(torch.float32)
        numbers = drawn.mul(1.5).exp_().floor_().log1p_()
        return Batch(labels, numbers, spread((values + features * 0x3C6EF372) & 0xFFFFFFFF))


def make_examples(settings: Namespace, paths: Sequence[Path] = ()) -> Examples:
    """Return the examples of the files' rows, one in ten of them held out, or of generated examples without files."""
    size = settings.batch_size
    if not paths:
        generator = Generator(size, settings.max_cardinality, settings.seed)
        length, held_out = -(-settings.samples // size), -(-settings.held_out // size)
        held = [generator.batch(number) for number in range(length, length + held_out)]
        name = f"{length} batches of {generator}"
        return Examples(name, lambda first: map(generator.batch, range(first, length)), length, held)
    prebatched = [path.suffix in (".arrow", ".prebatched") for path in paths]
    if any(prebatched) != all(prebatched):
        raise ValueError(f"--data must be all prebatched or all text, got {', '.join(map(str, paths))}")

    def rows() -> Iterator[Any]:
        # So many are read at a time that about a batch's remain without those held out.
        read: Any = read_prebatched if all(prebatched) else read_criteo
        return read(list(paths), batch_size=-(-size * 10 // 9), columns=COLUMNS)  # type: ignore[no-any-return]

    def batch(rows: Any) -> Batch:
        return Batch(*as_tensors(rows))

    name = ", ".join(f"{path.name} of {path.stat().st_size:,} bytes" for path in paths) + f" in batches of {size}"
    held = list(map(batch, held_out_rows(rows(), settings.held_out)))
    return Examples(name, lambda first: map(batch, islice(kept_rows(rows()), first, None)), None, held)


# ---- Model -----------------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Fully connected layers of these sizes, the input's first, each followed by a ReLU; the last one maybe not."""

    def __init__(self, sizes: Sequence[int], linear_end: bool = False) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(m, n) for n, m in pairwise(sizes))
        self.biases = nn.ParameterList(torch.empty(m) for m in sizes[1:])
        self.linear_end = linear_end
        for weight, bias in zip(self.weights, self.biases, strict=True):  # as the paper's program draws them
            nn.init.xavier_normal_(weight)
            nn.init.normal_(bias, std=bias.shape[0] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[B, sizes[0]]`` to ``[B, sizes[-1]]``."""
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True), 1):
            x = linear(x, weight, bias)
            x = x if self.linear_end and layer == len(self.weights) else x.relu()
        return x


class DenseLayers(nn.Module):
    """All of DLRM but its tables; ``bottom`` and ``top`` are widths of hidden layers, over numbers and products."""

    places: Tensor

    def __init__(self, features: int, dim: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self.vectors, self.dim = features + 1, dim
        self.bottom = Perceptron([len(INTEGERS), *bottom, dim])
        self.top = Perceptron([dim + features * (features + 1) // 2, *top, 1], linear_end=True)
        row, column = torch.tril_indices(self.vectors, self.vectors, -1)
        self.register_buffer("places", row * self.vectors + column, persistent=False)

    def forward(self, numbers: Tensor, pooled: Tensor) -> Tensor:
        """Return logits ``[B]`` of ``numbers`` ``[B, 13]`` and joined embeddings ``[B, features * dim]``."""
        dense = self.bottom(numbers)
        vectors = torch.cat([dense, pooled], 1).view(-1, self.vectors, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.places)
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


class DLRM(nn.Module):
    """The deep learning recommendation model (Naumov et al., 2019); ``storage`` is that of dynamic tables' rows."""

    def __init__(self, settings: Namespace, storage: variable.StorageOption | None = None) -> None:
        super().__init__()
        self.buckets = settings.buckets if settings.tables == "hashed" else None
        dynamic: dict[str, Any] = {}
        if self.buckets is None:  # tables keyed by raw ids, which grow
            evict = settings.evict and variable.GlobalStepEvict(settings.evict, settings.evict_every or settings.evict)
            once = settings.filter and variable.CounterFilter(settings.filter)
            option = variable.EmbeddingVariableOption(once, evict, storage or variable.StorageOption())
            dynamic = {"ev_option": option, "initializer": initializers.Uniform(-0.01, 0.01)}
        rows, config = self.buckets or 1024, torchsparse_rec.nn.EmbeddingBagConfig
        tables = [config(rows, settings.embedding_dim, name, feature_names=[name], **dynamic) for name in CATEGORIES]
        self.layers = DenseLayers(len(CATEGORIES), settings.embedding_dim, settings.bottom, settings.top)
        self.bags = torchsparse_rec.nn.EmbeddingBagCollection(tables, grad_mode=settings.grad_mode)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Return the logits ``[B]`` of numbers ``[B, 13]`` and raw ids ``[26, B]``."""
        flat = (ids if self.buckets is None else ops.to_hash_bucket_fast(ids, self.buckets)).flatten()
        offsets, counts = torch.arange(len(flat) + 1, device=flat.device), [len(numbers)] * len(CATEGORIES)
        features = torchsparse_rec.KeyedJaggedTensor(CATEGORIES, flat, offsets=offsets, length_per_key=counts)
        return self.layers(numbers, self.bags(features).values())

    def tables(self) -> dict[str, torchsparse_rec.nn.EmbeddingVariable]:
        """Return the dynamic tables by name."""
        found = self.bags.get_submodule("embedding_bags").named_children()
        return {name: table for name, table in found if isinstance(table, torchsparse_rec.nn.EmbeddingVariable)}


def make_model(settings: Namespace, storage: variable.StorageOption | None = None) -> DLRM:
    """Make a network whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):  # torch's global generator keeps its state
        torch.manual_seed(settings.seed)
        return DLRM(settings, storage)


def storage_of(arguments: Namespace, settings: Namespace, ranks: Ranks) -> variable.StorageOption:
    """Return where rows of dynamic tables are: a row has its weights, the optimizer's states, and 24 bytes more."""
    states = {"sgd": 0, "adagrad": 1, "rmsprop": 1}.get(settings.optimizer, 2)
    rows = {"HBM": arguments.hbm_rows or 1 << 16, "DRAM": arguments.dram_rows or 1 << 16}
    tiers = arguments.tiers or "DRAM"
    sizes = [rows[tier] * (settings.embedding_dim * 4 * (1 + states) + 24) for tier in tiers.split("_")[:-1]]
    path = arguments.ssd_path or (arguments.checkpoint / "ssd" if "SSD" in tiers else None)
    its_own = path / f"rank-{ranks.rank}" if path and ranks.group else path
    return variable.StorageOption(tiers, its_own and str(its_own), sizes)


def statistics(model: DLRM, ranks: Ranks) -> list[str]:
    """Return the lines of a report on each dynamic table, of all ranks, and on all of them; none without any."""
    figures = []
    for stats in (table.stats() for table in model.tables().values()):
        size = sum(value for name, value in stats.items() if name.startswith("bytes"))
        figures.append([int(stats["keys"]), int(stats["filtered"]), int(stats["evicted"]), int(size)])
    if not figures:
        return []
    of_all = ranks.joined(torch.tensor([figures])).sum(0)
    found = zip([*model.tables(), "all"], [*of_all.tolist(), of_all.sum(0).tolist()], strict=True)
    rows = [["table", "keys", "filtered", "evicted", "bytes"], *([name, *map("{:,}".format, x)] for name, x in found)]
    _, *ends = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([f"{name:<5}", *(f"{x:>{n}}" for x, n in zip(its, ends, strict=True))]) for name, *its in rows]


# ---- The program -----------------------------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(RATES, prog=PROGRAM, description="Train DLRM (Naumov et al., 2019).")
    add, setting, count = parser.add_argument, parser.setting, at_least(1)
    add("--data", type=Path, nargs="+", metavar="FILE", help="Criteo's files, text or prebatched (.arrow, .prebatched)")
    setting("--samples", 1 << 20, "examples generated for an epoch", type=count)
    setting("--max-cardinality", None, "the most values of a generated category", type=count, metavar="N")
    setting("--held-out", 1 << 16, "examples for the metrics", type=count)
    setting("--batch-size", 2048, "examples of a step", type=count)
    setting("--tables", "dynamic", "tables keyed by raw ids, or fixed ones of hashed ids", choices=KINDS)
    setting("--buckets", 100_000, "rows of each hashed table", type=count)
    setting("--embedding-dim", 16, "width of each category's rows", type=count)
    setting("--bottom", [512, 256, 64], "widths of the hidden layers over the numbers", type=widths)
    setting("--top", [512, 256], "widths of the hidden layers over the products", type=widths)
    setting("--grad-mode", "fused", "gradient mode of the tables", choices=GRAD_MODES)
    setting("--optimizer", "adagrad", "optimizer", choices=tuple(OPTIMIZERS))
    parser.add_rate()
    setting("--seed", 0, "seed of dense weights and generated examples", type=at_least(0))
    setting("--filter", None, "give an id a row in the step of its N-th occurrence", type=count, metavar="N")
    setting("--evict", None, "evict rows of ids that have not occurred for so many steps", type=count, metavar="STEPS")
    setting("--evict-every", None, "steps between evictions, default those of --evict", type=count, metavar="STEPS")
    add("--tiers", choices=TIERS, help="the storage of dynamic tables' rows, default DRAM")
    add("--hbm-rows", type=count, help="each table's rows in HBM above DRAM or SSD, default 65,536")
    add("--dram-rows", type=count, help="each table's rows in DRAM above SSD, default 65,536")
    add("--ssd-path", type=Path, metavar="FOLDER", help="the folder of the SSD tier, default ssd in --checkpoint")
    add("--checkpoint", type=Path, metavar="FOLDER", help="write checkpoints there, and resume from one found there")
    add("--save-every", type=count, metavar="STEPS", help="steps between full checkpoints, default: at the end")
    add("--delta-every", type=count, metavar="STEPS", help="steps between checkpoints of the changed rows alone")
    add("--epochs", type=count, help="epochs in total, default 1")
    add("--steps", type=count, help="stop after this many steps in total")
    add("--evaluate-every", type=count, metavar="STEPS", help="steps between metrics within an epoch")
    parser.add_machine()
    add("--compare", choices=["tensorflow"], help="train --steps in TensorFlow too, default 100")
    return parser


def check(arguments: Namespace, settings: Namespace) -> None:
    """Raise ``ValueError`` if flags were given that do not go together, or not with the kind of tables."""
    tiers, alone = arguments.tiers or "", ("data", "checkpoint", "plan", "epochs", "held_out", "evaluate_every")
    check_alone(arguments, "compare", *alone)
    check_alone(arguments, "data", "samples", "max_cardinality")
    for what, is_given, names in (
        ("--checkpoint", arguments.checkpoint, ("save_every", "delta_every")),
        ("--evict", settings.evict, ("evict_every",)),
        ("--tiers with more below HBM", tiers.startswith("HBM_"), ("hbm_rows",)),
        ("--tiers with SSD", tiers.endswith("_SSD"), ("dram_rows", "ssd_path")),
        ("--tables hashed", settings.tables == "hashed", ("buckets", "compare")),
        ("--tables dynamic", settings.tables == "dynamic", ("filter", "evict", "tiers", "delta_every")),
    ):
        for name in names:
            if getattr(arguments, name) is not None and not is_given:
                raise ValueError(f"--{name.replace('_', '-')} needs {what}")
    if tiers.endswith("_SSD") and not (arguments.ssd_path or arguments.checkpoint):
        raise ValueError(f"--tiers {tiers} needs --ssd-path or --checkpoint")
    if arguments.compare and settings.optimizer not in ("adagrad", "sgd"):
        raise ValueError(f"--compare trains by adagrad or sgd, got --optimizer {settings.optimizer}")


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code. Unusable input ends the process with one line and code 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    with ending(parser, ValueError, OSError, ImportError):
        ranks = _common.begin(arguments, "torchmetrics", "safetensors")
        if arguments.compare:
            settings = parser.settings(vars(arguments))
            check(arguments, settings)
            examples, steps = make_examples(settings), arguments.steps or 100
            return _common.compare("dlrm_tensorflow", arguments, settings, examples, steps)
        return train(parser, arguments, ranks)


def train(parser: Parser, arguments: Namespace, ranks: Ranks) -> int:
    """Train, from a checkpoint if there is one to go on from, and print records."""
    arguments.epochs = arguments.epochs or 1
    folder = arguments.checkpoint and arguments.checkpoint / "checkpoint"
    saved = ranks.from_first(lambda: _common.newest(folder, PROGRAM)) if folder else None
    settings = parser.settings(vars(arguments), saved and saved["settings"], folder)
    check(arguments, settings)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    examples = make_examples(settings, arguments.data or ())
    model = make_model(settings, storage_of(arguments, settings, ranks)).to(arguments.device)
    rows = f"of {settings.buckets:,} rows and" if settings.tables == "hashed" else "of"
    ranks.print(f"data: {examples.name}; 26 {settings.tables} tables {rows} dim {settings.embedding_dim}")
    if ranks.group:
        distributed.shard(model, plan=arguments.plan or "auto")
        ranks.print(str(distributed.plan_of(model)).splitlines()[-1])
    optimizer, run = OPTIMIZERS[settings.optimizer](model.parameters(), lr=settings.lr, in_backward=True), Run()
    about = _common.about(PROGRAM, settings, examples, arguments.device)
    if saved:
        run, _ = _common.load(saved, model, optimizer, arguments, ranks, **about)
    to = arguments.checkpoint
    curves = to and _common.curves_of_clicks(run.history, to, f"DLRM, {settings.tables} tables")
    parser.when_interrupted = partial(run.when_interrupted, ranks, curves)

    def logits(batch: Batch) -> Tensor:
        return model(batch.numbers.to(arguments.device), batch.ids.to(arguments.device))

    while not run.is_over(arguments.epochs, arguments.steps):
        for batch, size, following in run.batches(examples, ranks, arguments.device):
            if following is not None and "_" in (arguments.tiers or ""):  # rows below the first tier are read ahead
                for table, ids in zip(model.tables().values(), following.ids, strict=True):
                    table.prefetch(ids)
            loss = _common.train(model, optimizer, logits(batch), batch.labels.to(arguments.device), ranks)
            run.add(loss, size, following is None)
            is_over = run.is_over(arguments.epochs, arguments.steps)
            if is_over or following is None or run.is_at(arguments.evaluate_every):
                record = run.record(lambda: _common.metrics_of_clicks(model, logits, examples.held_out, ranks))
                ranks.print(_common.line_of_clicks(record, arguments.epochs))
            is_full, is_delta = run.is_at(arguments.save_every), run.is_at(arguments.delta_every)
            if folder and (is_over or is_full or is_delta):
                run.save(folder, model, optimizer, delta=is_delta and not is_full, **about)
            if is_over:
                break
    ranks.print(*statistics(model, ranks))
    if ranks.rank == 0:
        _common.finish_clicks(run.history, curves, folder)
    return 0


if __name__ == "__main__":
    run_command(main)
