"""SASRec, which ranks all items for a user, on MovieLens: ``python -m torchsparse_rec.examples.sasrec``."""

from __future__ import annotations

import math
import resource
import statistics
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torchsparse_rec import nn
from torchsparse_rec._flags import Parser, at_least, check_alone, ending
from torchsparse_rec.data import releases
from torchsparse_rec.data.generated import ZIPF_EXPONENT, generator_of, zipf
from torchsparse_rec.distributed.torchrun import Ranks, run_command
from torchsparse_rec.examples import _common, ncf
from torchsparse_rec.examples._common import GRAD_MODES, Examples, Run

PROGRAM = "python -m torchsparse_rec.examples.sasrec"
RUNS = "runs/sasrec"
RATES = {"adam": 2e-3, "sgd": 0.5, "adagrad": 0.02}
LOSSES = ("full", "in_batch", "sampled")
TOP = 10
#: How far the losses of the first steps of --compare may be apart, of their size. Later, training amplifies rounding.
TOLERANCE, COMPARED_STEPS = 1e-6, 50

# ---- Data ------------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """
    The items of all users, of which the last one of each is for the test, and the one before for validation.

    Attributes:
        items: one user's items after another's, each in the order of time ``[N]``. They are numbered by falling
            frequency in training, as the log-uniform sampler wants it.
        begins, ends: the span of each user ``[U]``.
        counts: how often each item is there in training ``[num_items]``, falling.
    """

    items: Tensor
    begins: Tensor
    ends: Tensor
    counts: Tensor

    @property
    def num_items(self) -> int:
        """The number of items, which is the number of the padding row too."""
        return len(self.counts)

    def to(self, device: torch.device) -> Split:
        """Return the split on a device."""
        return Split(*(x.to(device) for x in self))


def leave_two_out(data: releases.Interactions) -> Split:
    """Return users' items in the order of time. Users with fewer than four are left out: nothing is left to train."""
    order = np.lexsort((data.times, data.users))  # a stable sort keeps equal times in the file's order
    order = order[np.bincount(data.users, minlength=data.num_users)[data.users[order]] >= 4]
    if not len(order):
        raise ValueError("there is nothing to train with: no user has four interactions or more")
    _, lengths = np.unique(data.users[order], return_counts=True)
    ends = np.cumsum(lengths)
    counts = np.bincount(np.delete(data.items[order], [*(ends - 1), *(ends - 2)]), minlength=data.num_items)
    by_count = np.argsort(-counts, kind="stable")
    items = np.argsort(by_count)[data.items[order]]
    return Split(*map(torch.from_numpy, (items, ends - lengths, ends, counts[by_count])))


def windows(items: Tensor, begins: Tensor, ends: Tensor, length: int, filling: int) -> Tensor:
    """Return the last ``length`` items of each span ``[begins, ends)``: ``[U, length]``, filled up on the left."""
    places = ends.unsqueeze(1) + torch.arange(-length, 0, device=items.device)
    return items[places.clamp_min(0)].where(places >= begins.unsqueeze(1), filling)


class Batch(NamedTuple):
    """Users' items ``[B, L]``, and in each place the item that comes next; padding is in the same places of both."""

    inputs: Tensor
    targets: Tensor

    @property
    def size(self) -> int:
        """The number of users."""
        return len(self.inputs)

    def rows(self, span: slice) -> Batch:
        """Return the batch of some of the users."""
        return Batch(self.inputs[span], self.targets[span])


def examples_of(split: Split, settings: Namespace) -> Examples:
    """Return the batches of an epoch: all users, in an order that torch's generator draws."""
    shape = settings.positions, split.num_items
    inputs = windows(split.items, split.begins, split.ends - 3, *shape)
    targets = windows(split.items, split.begins + 1, split.ends - 2, *shape)

    def draw(first: int) -> Iterator[Batch]:
        parts = torch.randperm(len(inputs)).to(inputs.device).split(settings.batch_size)[first:]
        return (Batch(inputs[users], targets[users]) for users in parts)

    return Examples("", draw, -(-len(inputs) // settings.batch_size))


# ---- Model -----------------------------------------------------------------------------------------------------------


class SASRec(torch.nn.Module):
    """
    The vectors whose products with the items' rows are scores of the item that comes next.

    The table of items is tied: it is looked up, and it is what the result is multiplied with. Its last row is padding.

    Args:
        num_items: the number of items.
        settings: the run's settings, of which sizes and the loss count.
        make_table: a function of rows and columns that makes a table, with ``padding_idx``.

    Source:
        Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018.
    """

    mask: Tensor

    def __init__(self, num_items: int, settings: Namespace, make_table: Any) -> None:
        super().__init__()
        self.num_items, dim = num_items, settings.dim
        self.items = make_table(num_items + 1, dim, padding_idx=num_items)
        torch.nn.init.normal_(self.items.weight, std=0.02)
        with torch.no_grad():
            self.items.weight[num_items].zero_()
        self.places = torch.nn.Parameter(torch.randn(settings.positions, dim) * 0.02)
        self.dropout = torch.nn.Dropout(settings.dropout)
        block = torch.nn.TransformerEncoderLayer(dim, 1, dim, settings.dropout, batch_first=True, norm_first=True)
        norm = torch.nn.LayerNorm(dim)
        self.blocks = torch.nn.TransformerEncoder(block, settings.blocks, norm, enable_nested_tensor=False)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(settings.positions)
        self.register_buffer("mask", mask, persistent=False)
        if settings.loss == "sampled":  # part of the model, so that a checkpoint has its place
            self.sampler = nn.LogUniformSampler(num_items, settings.sampled, seed=settings.seed)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the vector ``[B, L, dim]`` of each place, which knows the items ``[B, L]`` up to there alone."""
        return self.blocks(self.dropout(self.items(inputs) + self.places), self.mask, is_causal=True)  # type: ignore[no-any-return]


def make_model(num_items: int, settings: Namespace, make_table: Any = None) -> SASRec:
    """Make a network whose weights depend on the seed alone, by default of our tables."""
    with torch.random.fork_rng(devices=[]):  # torch's global generator keeps its state
        torch.manual_seed(settings.seed)
        return SASRec(num_items, settings, make_table or partial(nn.Embedding, grad_mode=settings.grad_mode))


def loss_of(model: SASRec, batch: Batch, loss: str, log_q: Tensor) -> Tensor:
    """
    Return the mean loss of the items that come next.

    Args:
        model: the network.
        batch: the users.
        loss: ``full``, a softmax over all items; ``in_batch``, over the different items that come next in the batch;
            ``sampled``, over some that the model's sampler draws; or ``torch``: as ``full``, but torch's, with all
            scores in memory. ``in_batch`` and ``sampled`` make up for how often an item is among those.
        log_q: the logarithm of each item's probability in training ``[num_items]``.
    """
    is_item = batch.targets != model.num_items
    hidden, target = model(batch.inputs)[is_item], batch.targets[is_item]
    if loss == "full":
        return nn.table_cross_entropy(hidden, model.items, target)
    if loss == "in_batch":
        # An item that is next in c places is c candidates, which count as one together: each as its c-th part.
        _, places, counts = target.unique(return_inverse=True, return_counts=True)
        copies = counts[places].log()
        losses = nn.in_batch_softmax_loss(
            hidden, model.items(target), log_q=log_q[target] + copies, remove_accidental_hits=False
        )
        return losses - copies.mean()
    if loss == "sampled":
        return nn.sampled_softmax_loss(hidden, model.items, target, model.sampler(target))
    return cross_entropy(hidden @ model.items.weight[:-1].T, target)


# ---- Metrics ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: SASRec, split: Split, back: int, name: str) -> dict[str, float]:
    """
    Return HR@10 and NDCG@10 of each user's item that is so far back, among all that came not before it.

    Args:
        model: the network.
        split: the users.
        back: 1 for the last item, 2 for the one before.
        name: the beginning of the metrics' names.
    """
    model.eval()
    ranks = []
    for begins, ends in zip(split.begins.split(1024), (split.ends - back).split(1024), strict=True):
        inputs = windows(split.items, begins, ends, len(model.places), model.num_items)
        seen = windows(split.items, begins, ends, int((ends - begins).max()), -1)
        _, best = nn.TopK(TOP)(model(inputs)[:, -1], model.items, excluded=seen)
        found = best == split.items[ends].unsqueeze(1)
        ranks.append(found.int().argmax(1).where(found.any(1), TOP))
    model.train()
    return dict(zip((f"{name}_hr", f"{name}_ndcg"), ncf.hit_rate_and_ndcg(torch.cat(ranks), TOP), strict=True))


# ---- The program -----------------------------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(RATES, prog=PROGRAM, description="Train SASRec (Kang and McAuley, 2018) on MovieLens.")
    add, setting = parser.add_argument, parser.setting
    names = [*releases.RELEASES, "generated"]
    add("--dataset", choices=names, default="ml-100k", help="the ratings, default ml-100k")
    add("--data-dir", type=Path, help=f"folder of the original files, default ${ncf.FOLDER_VARIABLE}")
    over = "over all items, those of the batch, or some that are drawn"
    setting("--loss", "full", f"softmax {over}", choices=LOSSES)
    setting("--sampled", 256, "items that are drawn for a step of --loss sampled", type=at_least(1))
    setting("--grad-mode", "fused", "gradient mode of the table", choices=GRAD_MODES)
    setting("--optimizer", "adam", "optimizer", choices=tuple(RATES))
    parser.add_rate()
    setting("--positions", 30, "items of a user that the network sees", type=at_least(1))
    setting("--dim", 32, "width of all vectors", type=at_least(1))
    setting("--blocks", 2, "blocks of attention", type=at_least(1))
    setting("--dropout", 0.2, "dropout", type=share)
    setting("--batch-size", 64, "users of a step", type=at_least(1))
    setting("--seed", 0, "seed of weights, order, dropout and drawn items", type=at_least(0))
    add("--epochs", type=at_least(1), default=60, help="epochs in total, default 60")
    add("--runs", type=at_least(2), help="train with so many seeds, from --seed on, and print mean and standard error")
    parser.add_machine(over_ranks=False)
    parser.add_folder(RUNS)
    add("--compare", choices=["torch"], help="train with torch's table, loss and Adam too, and print both losses")
    cost = "only time steps over so many generated items; with --compare torch, torch's"
    add("--items", type=at_least(1), help=cost)
    return parser


def share(text: str) -> float:
    """Parse a number from 0 up to, but not including, 1."""
    if not 0.0 <= (value := float(text)) < 1.0:
        raise ArgumentTypeError(f"must be in [0, 1), got {text}")
    return value


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code. Unusable input ends the process with one line and code 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    with ending(parser, ValueError, OSError, ImportError):
        check_alone(arguments, "compare", "resume", "runs", "output_dir")
        check_alone(arguments, "items", "resume", "runs", "output_dir")
        check_alone(arguments, "runs", "resume")
        if _common.is_under_torchrun():
            raise ValueError("the example runs in one process: start it without torchrun")
        ranks = _common.begin(arguments, "safetensors")
        settings, device = parser.settings(vars(arguments)), arguments.device
        if arguments.items:
            return cost(settings, arguments.items, arguments.compare or "torchsparse_rec", device)
        data, where = ncf.load(arguments.dataset, arguments.data_dir)
        print(f"data: {where}: {data}")
        if arguments.compare:
            return compare(settings, data, arguments.epochs, device)
        folder = _common.folder_of(arguments, RUNS)
        if arguments.runs is None:
            train(parser, arguments, data, folder, ranks)
            return 0
        best = []
        for seed in range(settings.seed, settings.seed + arguments.runs):
            arguments.seed = seed
            best.append(train(parser, arguments, data, folder / f"seed{seed}", ranks))
        print(f"{arguments.runs} seeds, each at its best epoch: {text_of_runs(best)}")
    return 0


def text_of_runs(records: list[dict[str, Any]]) -> str:
    """Return the mean of the test metrics of several runs, and the standard error of that mean."""
    parts = []
    for metric, name in (("HR", "test_hr"), ("NDCG", "test_ndcg")):
        values = [record[name] for record in records]
        error = statistics.stdev(values) / len(values) ** 0.5
        parts.append(f"test-{metric}@{TOP} {statistics.mean(values):.4f} +- {error:.4f}")
    return " ".join(parts)


def begin_epoch(settings: Namespace, epoch: int) -> None:
    """Seed order and dropout by an epoch's number, so that a run that goes on draws what it would have drawn."""
    torch.manual_seed(generator_of(settings.seed, epoch).initial_seed())


def train(parser: Parser, arguments: Namespace, data: releases.Interactions, folder: Path, ranks: Ranks) -> Any:
    """Train, from a checkpoint if there is one to go on from, print each epoch's record, and return the best."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint"
    saved = _common.saved_of(arguments, checkpoint, PROGRAM, ranks)
    settings = parser.settings(vars(arguments), saved and saved["settings"], saved and saved["folder"])
    split = leave_two_out(data).to(arguments.device)
    examples, log_q = examples_of(split, settings), log_q_of(split.counts)
    examples.name = data.fingerprint()
    model = make_model(split.num_items, settings).to(arguments.device)
    optimizer, run = ncf.make_optimizer(model, settings), Run()
    about = _common.about(PROGRAM, settings, examples, arguments.device)
    if saved:
        run, _ = _common.load(saved, model, optimizer, arguments, ranks, **about)
    metrics = {f"{name}-{x.upper()}@{TOP}": f"{name}_{x}" for name in ("valid", "test") for x in ("hr", "ndcg")}
    panels = {"held-out items": metrics, "training": {"cross entropy": "loss"}}
    title = f"SASRec on {data.name}, loss {settings.loss}, grad_mode={settings.grad_mode}"
    curves = partial(_common.draw, run.history, folder, title, "epoch", panels)
    parser.when_interrupted = partial(run.when_interrupted, ranks, curves, "--resume")

    def metrics_now() -> dict[str, float]:
        return {**evaluate(model, split, 2, "valid"), **evaluate(model, split, 1, "test")}

    while not run.is_over(arguments.epochs):
        begin_epoch(settings, run.epoch)
        for batch, size, following in run.batches(examples, ranks, arguments.device):
            loss = loss_of(model, batch, settings.loss, log_q)
            run.add(_common.step(model, optimizer, loss, ranks), size, following is None)
        record = run.record(metrics_now)
        place = f"epoch {record['epoch']:>{len(str(arguments.epochs))}}/{arguments.epochs}"
        figures = f"{ncf.text(record, 'valid-')} {ncf.text(record, 'test-')} loss {record['loss']:.4f}"
        print(f"{place}  {figures} {record['samples_per_second']:,.0f} users/s", flush=True)
        run.save(checkpoint, model, optimizer, **about)
    print(f"checkpoint: {checkpoint}, {curves()}")
    last, best = run.history[-1], max(run.history, key=lambda record: record["valid_ndcg"])
    of_best = f"best epoch {best['epoch']} by valid-NDCG@{TOP}: {ncf.text(best, 'test-')}"
    print(f"last epoch {last['epoch']}: {ncf.text(last, 'test-')}, {of_best}", flush=True)
    return best


def log_q_of(counts: Tensor) -> Tensor:
    """Return the logarithm of each item's share of the counts, float32; -inf of items that are never there."""
    return (counts.double() / counts.sum()).log().float()


# ---- Beside torch ----------------------------------------------------------------------------------------------------


def side(name: str, num_items: int, settings: Namespace, device: torch.device) -> tuple[SASRec, Any, str]:
    """Return the network, the optimizer and the loss of ours or of torch's, from the same weights."""
    model = make_model(num_items, settings, torch.nn.Embedding if name == "torch" else None).to(device)
    if name == "torch":
        return model, torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True), "torch"
    return model, ncf.make_optimizer(model, settings), settings.loss


def compare(settings: Namespace, data: releases.Interactions, epochs: int, device: torch.device) -> int:
    """Train beside torch on the same batches with the same dropout; return 1 if the losses differ, else 0."""
    if (settings.loss, settings.optimizer) != ("full", "adam"):
        raise ValueError(f"--compare is of --loss full and --optimizer adam, got {settings.loss}, {settings.optimizer}")
    split = leave_two_out(data).to(device)
    examples, log_q = examples_of(split, settings), log_q_of(split.counts)
    both = {name: side(name, split.num_items, settings, device) for name in ("torchsparse_rec", "torch")}
    apart: list[float] = []  # each step's losses
    for epoch in range(epochs):
        losses = []
        for model, optimizer, loss in both.values():
            begin_epoch(settings, epoch)
            found = (loss_of(model, batch, loss, log_q) for batch in examples.batches(0))
            losses.append(torch.stack([_common.step(model, optimizer, x, Ranks()) for x in found]).double())
        ours, theirs = losses
        apart += ((ours - theirs) / theirs).abs().nan_to_num(math.inf).tolist()
        place = f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}"
        means = f"torchsparse_rec {ours.mean():.7f}, torch {theirs.mean():.7f}"
        print(f"{place}  loss of {means}; up to here steps differ by {max(apart):.1e} at most", flush=True)
    first = apart[:COMPARED_STEPS]
    verdict = "equal" if max(first) <= TOLERANCE else "NOT EQUAL"
    print(f"{verdict}: the losses of the first {len(first)} steps differ by {max(first):.1e} of their size at most")
    return int(max(first) > TOLERANCE)


def cost(settings: Namespace, num_items: int, name: str, device: torch.device, steps: int = 3) -> int:
    """Time steps on generated users, whose items follow Zipf's law, and print the largest memory so far."""
    shape = steps + 1, settings.batch_size, settings.positions + 1
    random = torch.rand(shape, dtype=torch.float64, generator=generator_of(settings.seed, 0))
    log_q = -ZIPF_EXPONENT * torch.arange(1.0, num_items + 1, device=device).log()
    (model, optimizer, loss), seconds = side(name, num_items, settings, device), []
    for users in zipf(random, num_items).to(device):
        began = time.perf_counter()
        float(_common.step(model, optimizer, loss_of(model, Batch(users[:, :-1], users[:, 1:]), loss, log_q), Ranks()))
        seconds.append(time.perf_counter() - began)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
    targets, table = settings.batch_size * settings.positions, num_items * settings.dim * 4
    what = name if name == "torch" else f"{name}, loss {loss}, grad_mode {settings.grad_mode}"
    print(
        f"{what}: {statistics.median(seconds[1:]):.3f} s a step of "
        f"{targets:,} targets, {used / 1e6:,.0f} MB at most; the table of {num_items:,} items has {table / 1e6:,.0f}"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
