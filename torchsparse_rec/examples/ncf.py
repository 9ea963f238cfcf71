"""Neural collaborative filtering on MovieLens: ``python -m torchsparse_rec.examples.ncf``."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import torchsparse_rec
from torchsparse_rec import distributed
from torchsparse_rec._flags import Parser, at_least, check_alone, ending, widths
from torchsparse_rec.data import releases
from torchsparse_rec.data.generated import interactions
from torchsparse_rec.data.pairs import PairSet, latest
from torchsparse_rec.distributed.torchrun import Ranks, run_command
from torchsparse_rec.examples import _common
from torchsparse_rec.examples._common import GRAD_MODES, Examples, Run

PROGRAM = "python -m torchsparse_rec.examples.ncf"
RUNS = "runs/ncf"
RATES = {"adam": 1e-3, "sgd": 0.5, "adagrad": 0.02}
FOLDER_VARIABLE = "TORCHSPARSE_REC_DATA"

# ---- Data ------------------------------------------------------------------------------------------------------------


def load(name: str = "ml-100k", folder: Path | None = None) -> tuple[releases.Interactions, str]:
    """Return a release from its file, or generated data where ml-100k cannot be downloaded, and say which."""
    given_by = "--data-dir" if folder else f"${FOLDER_VARIABLE}"
    place: Any = folder or os.environ.get(FOLDER_VARIABLE)
    if name == "generated":
        return generated(), "a generated data set of ml-100k's shape"
    if not place and name != "ml-100k":
        raise ValueError(f"{name} is not downloaded: give its folder by --data-dir or ${FOLDER_VARIABLE}")
    try:
        path = releases.find(name, Path(place), given_by) if place else releases.download()
    except (OSError, ValueError) as error:
        if place:
            raise
        why = f"ml-100k could not be downloaded ({error}): this run trains on GENERATED data of the same shape"
        return generated(), f"{why}; give the real file by --data-dir or ${FOLDER_VARIABLE}"
    return releases.read(name, path), f"{name} from {path}"


def generated(users: int = 943, items: int = 1682, total: int = 100_000, seed: int = 0) -> releases.Interactions:
    """Return generated interactions, by default as many as ml-100k has."""
    return releases.Interactions("generated", *interactions(users, items, total, seed), users, items)


class Split(NamedTuple):
    """Training interactions ``[N]``, and the latest one of each user with at least two, which is held out ``[T]``."""

    users: Tensor
    items: Tensor
    test_users: Tensor
    test_items: Tensor
    num_users: int
    num_items: int

    def pairs(self, with_held_out: bool) -> PairSet:
        """Return the set of training interactions, perhaps with those held out."""
        parts = (self[:2], self[2:4]) if with_held_out else (self[:2],)
        users, items = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return PairSet(users, items, self.num_users, self.num_items)


def leave_one_out(data: releases.Interactions, device: torch.device | str = "cpu") -> Split:
    """Hold out each user's latest interaction; a user with a single one keeps it for training."""
    test = latest(data.users, data.times)
    test = test[np.bincount(data.users, minlength=data.num_users)[data.users[test]] > 1]
    if not len(test):
        raise ValueError("there is nothing to evaluate: no user has two interactions or more")
    rest = np.delete(np.arange(len(data.users)), test)
    u, i, v, j = (torch.from_numpy(x[rows]).to(device) for rows in (rest, test) for x in (data.users, data.items))
    return Split(u, i, v, j, data.num_users, data.num_items)


class Batch(NamedTuple):
    """Samples in training order: users and items, int32 ``[B]``, and labels, float32 ``[B]`` (1 or 0)."""

    users: Tensor
    items: Tensor
    labels: Tensor

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.labels)

    def rows(self, span: slice) -> Batch:
        """Return the batch of some of the samples."""
        return Batch(*(column[span] for column in self))


def batches(split: Split, settings: Namespace, generator: torch.Generator) -> tuple[Callable[[int], Any], int]:
    """
    Return a function that draws an epoch, and yields its batches from a number on; and how many an epoch has.

    An epoch has every training interaction, each with fresh negatives, shuffled. A negative may be any item outside the
    user's training interactions, the held-out one too: training must not know the answer.
    """
    excluded, group, size = split.pairs(bool(settings.exclude_held_out)), 1 + settings.negatives, settings.batch_size
    everybody = torch.arange(split.num_users, device=split.users.device).split(1024)
    full = [user for some in everybody for user in some[excluded.row_mask(some).all(1)].tolist()]
    if full:
        raise ValueError(f"no negative exists for user {full[0]}, who has all {split.num_items} items")

    def draw(first: int) -> Iterator[Batch]:
        items = split.items.unsqueeze(1).repeat(1, group)
        items[:, 1:] = excluded.draw_outside(split.users.unsqueeze(1).expand(-1, group - 1), generator)
        order = torch.randperm(items.numel(), generator=generator, device=items.device)
        positives = order.div(group, rounding_mode="floor")
        epoch = Batch(split.users[positives], items.view(-1)[order], (order == positives * group).float())
        return (epoch.rows(slice(begin, begin + size)) for begin in range(first * size, epoch.size, size))

    return draw, -(-len(split.users) * group // size)


def candidates_of(split: Split, seed: int) -> Tensor:
    """Draw 99 different items for each tested user, none ever touched by the user, on the CPU: int32 ``[T, 99]``."""
    touched = split.pairs(with_held_out=True)
    return touched.draw_distinct_outside(split.test_users, 99, torch.Generator().manual_seed(seed))


# ---- Model -----------------------------------------------------------------------------------------------------------


class NeuMF(nn.Module):
    """
    The score of a (user, item) pair: ``h . [p_u * q_i, MLP([r_u, s_i])] + b`` before the sigmoid.

    The GMF vectors p, q and the MLP vectors r, s are separate parameters that share a table's rows, as in TensorFlow's
    official model: columns ``[:factors]`` are GMF's, the rest the MLP's, so that one lookup serves both.

    Args:
        num_users, num_items: the numbers of rows of the two tables.
        factors: the width of the GMF vectors.
        layers: the widths of the MLP from its input on, which is a user's and an item's vector, half each.
        make_table: a function of a table's rows and columns.

    Source:
        He et al., Neural Collaborative Filtering, WWW 2017.
    """

    mlp: Any  # the perceptron's layers

    def __init__(
        self, num_users: int, num_items: int, factors: int, layers: Sequence[int], make_table: Any = nn.Embedding
    ) -> None:
        super().__init__()
        self.num_items, self.widths = num_items, [factors, layers[0] // 2]
        self.user_table = make_table(num_users, sum(self.widths))
        self.item_table = make_table(num_items, sum(self.widths))
        self.mlp = nn.ModuleList(nn.Linear(n, m) for n, m in zip(layers[:-1], layers[1:], strict=True))
        self.output = nn.Linear(factors + layers[-1], 1)
        for table in (self.user_table, self.item_table):
            nn.init.normal_(table.weight, std=0.01)  # as in the paper
        for layer in [*self.mlp, self.output]:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logits ``[N]`` of the pairs ``users[n], items[n]``, integers ``[N]``."""
        gmf_user, mlp_user = self.user_table(users).split(self.widths, dim=1)
        gmf_item, mlp_item = self.item_table(items).split(self.widths, dim=1)
        hidden = torch.cat([mlp_user, mlp_item], dim=1)
        for layer in self.mlp:
            hidden = layer(hidden).relu_()
        return self.output(torch.cat([gmf_user * gmf_item, hidden], dim=1)).squeeze(1)

    @torch.no_grad()
    def score_all(self, users: Tensor) -> Tensor:
        """
        Return the logits ``[len(users), num_items]`` of every item for each user.

        The first layer is linear in user and item, so each half is computed once per user and once per item.
        """
        gmf_user, mlp_user = self.user_table(users).split(self.widths, dim=1)
        items = self.item_table(torch.arange(self.num_items, device=users.device))  # of all ranks, if they share it
        gmf_item, mlp_item = items.split(self.widths, dim=1)
        (first, *later), head, (factors, width) = self.mlp, self.output.weight[0], self.widths
        for_user = mlp_user @ first.weight[:, :width].T + first.bias  # [U, layers[1]]
        for_item = mlp_item @ first.weight[:, width:].T  # [num_items, layers[1]]
        hidden = (for_user.unsqueeze(1) + for_item).relu_()  # [U, num_items, layers[1]]
        for layer in later:
            hidden = layer(hidden).relu_()
        return (gmf_user * head[:factors]) @ gmf_item.T + hidden @ head[factors:] + self.output.bias


def make_model(num_users: int, num_items: int, settings: Namespace, make_table: Any = None) -> NeuMF:
    """Make a network whose weights depend on the seed alone, by default of our tables."""
    ours = partial(torchsparse_rec.nn.Embedding, grad_mode=settings.grad_mode)
    with torch.random.fork_rng(devices=[]):  # torch's global generator keeps its state
        sizes = num_users, num_items, settings.factors, settings.layers
        model = NeuMF(*sizes, make_table or ours)
        torch.manual_seed(settings.seed)
        model.load_state_dict(NeuMF(*sizes).state_dict())
    return model


def make_optimizer(model: nn.Module, settings: Namespace, **options: Any) -> torch.optim.Optimizer:
    """Make our optimizer, which takes gradients of every mode, and updates as torch's does dense ones."""
    if settings.optimizer == "adam":
        options["fused"] = True
    return _common.OPTIMIZERS[settings.optimizer](model.parameters(), lr=settings.lr, in_backward=True, **options)


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def ranks_of(held_out: Tensor, others: Tensor) -> Tensor:
    """Return each held-out item's 0-based rank ``[T]`` among ``[T, C]``: ties count against it, and so does a NaN."""
    return others.shape[1] - (others < held_out.unsqueeze(1)).sum(1)


def hit_rate_and_ndcg(ranks: Tensor, top: int = 10) -> tuple[float, float]:
    """Return the share of ranks ``[T]`` below ``top``, and their mean gain ``1 / log2(rank + 2)``; others have none."""
    hits = ranks < top
    return hits.double().mean().item(), torch.where(hits, 1.0 / torch.log2(ranks.double() + 2.0), 0.0).mean().item()


@torch.no_grad()
def evaluate(model: NeuMF, split: Split, candidates: Tensor, ranks: Ranks, pairs: int = 1 << 15) -> dict[str, float]:
    """Return HR@10 and NDCG@10 against sampled items, and against the whole catalogue; ``pairs`` are scored at once."""
    trained, span = split.pairs(with_held_out=False), ranks.span(len(split.test_users))
    users, items, candidates = split.test_users[span], split.test_items[span].unsqueeze(1), candidates[span]
    sampled, full = [], []
    for some, block in blocks(pairs, users, torch.cat([items, candidates], dim=1)):
        scores = model(some.repeat_interleave(block.shape[1]), block.flatten()).view(block.shape)
        sampled.append(ranks_of(scores[:, 0], scores[:, 1:]))
    for some, its in blocks(pairs // split.num_items, users, items.long()):
        scores = model.score_all(some)
        held_out = scores.gather(1, its).squeeze(1)
        # A training item, or the held-out item itself, is no competitor: it scores below every number.
        scores.masked_fill_(trained.row_mask(some), -torch.inf).scatter_(1, its, -torch.inf)
        full.append(ranks_of(held_out, scores))
    hr, ndcg = hit_rate_and_ndcg(ranks.joined(torch.cat(sampled)))
    full_hr, full_ndcg = hit_rate_and_ndcg(ranks.joined(torch.cat(full)))
    return {"hr": hr, "ndcg": ndcg, "full_hr": full_hr, "full_ndcg": full_ndcg}


def blocks(pairs: int, users: Tensor, items: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Split users, and the items of each, into blocks of about so many pairs, which stay in the cache."""
    size = max(1, pairs // items.shape[1])
    return zip(users.split(size), items.split(size), strict=True)


# ---- The program -----------------------------------------------------------------------------------------------------


def layer_widths(text: str) -> list[int]:
    """Parse comma-separated widths: two or more, the first one even."""
    if len(found := widths(text)) < 2 or found[0] % 2:
        raise ArgumentTypeError(f"must be two or more widths, the first one even, got {text}")
    return found


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(RATES, prog=PROGRAM, description="Train NeuMF (He et al., 2017) on MovieLens.")
    add, setting = parser.add_argument, parser.setting
    names = [*releases.RELEASES, "generated"]
    add("--dataset", choices=names, default="ml-100k", help="the ratings, default ml-100k")
    add("--data-dir", type=Path, help=f"folder of the original files, default ${FOLDER_VARIABLE}")
    setting("--grad-mode", "auto", "gradient mode of the tables", choices=GRAD_MODES)
    setting("--optimizer", "adam", "optimizer", choices=tuple(RATES))
    parser.add_rate()
    setting("--factors", 8, "width of the GMF vectors", type=at_least(1))
    setting("--layers", [32, 16, 8], "widths of the MLP from its input on", type=layer_widths)
    setting("--negatives", 4, "negatives per positive and epoch", type=at_least(1))
    flatters = "never draw the held-out item as a negative, as many published programs do: flatters the metrics"
    setting("--exclude-held-out", None, flatters, action="store_const", const=True)
    setting("--batch-size", 1024, "examples of a step", type=at_least(1))
    setting("--seed", 0, "seed of weights, batches and candidates", type=at_least(0))
    add("--epochs", type=at_least(1), default=30, help="epochs in total, default 30")
    parser.add_machine()
    parser.add_folder(RUNS)
    add("--compare", choices=["tensorflow"], help="train the same network in TensorFlow too, and print both")
    return parser


def text(record: dict[str, Any], prefix: str = "") -> str:
    """Return a record's metrics against sampled items, or with the prefix ``full-`` against the catalogue."""
    name = prefix.replace("-", "_")
    return f"{prefix}HR@10 {record[f'{name}hr']:.4f} {prefix}NDCG@10 {record[f'{name}ndcg']:.4f}"


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code. Unusable input ends the process with one line and code 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    folder = _common.folder_of(arguments, RUNS)
    with ending(parser, ValueError, OSError, ImportError):
        check_alone(arguments, "compare", "resume", "plan", "output_dir")
        ranks = _common.begin(arguments, "safetensors")
        data, where = ranks.from_first(lambda: load(arguments.dataset, arguments.data_dir))
        ranks.print(f"data: {where}: {data}")
        if arguments.compare:
            settings = parser.settings(vars(arguments))
            return _common.compare("compared_ncf", arguments, settings, data, arguments.epochs)
        folder.mkdir(parents=True, exist_ok=True)
        return train(parser, arguments, data, folder, ranks)


def train(parser: Parser, arguments: Namespace, data: releases.Interactions, folder: Path, ranks: Ranks) -> int:
    """Train, from a checkpoint if there is one to go on from, and print each epoch's record."""
    checkpoint = folder / "checkpoint"
    saved = _common.saved_of(arguments, checkpoint, PROGRAM, ranks)
    settings = parser.settings(vars(arguments), saved and saved["settings"], saved and saved["folder"])
    split = leave_one_out(data, arguments.device)
    candidates = candidates_of(leave_one_out(data), settings.seed).to(arguments.device)
    generator = torch.Generator(arguments.device).manual_seed(settings.seed)
    examples = Examples(data.fingerprint(), *batches(split, settings, generator))
    model = make_model(data.num_users, data.num_items, settings).to(arguments.device)
    if ranks.group:
        distributed.shard(model, plan=arguments.plan or "auto")
        ranks.print(str(distributed.plan_of(model)).splitlines()[-1])
    optimizer, run = make_optimizer(model, settings), Run()
    about = _common.about(PROGRAM, settings, examples, arguments.device)
    if saved:
        run, said = _common.load(saved, model, optimizer, arguments, ranks, **about)
        generator.set_state(said["generator"])
    metrics = {"HR@10": "hr", "NDCG@10": "ndcg", "full-HR@10": "full_hr", "full-NDCG@10": "full_ndcg"}
    panels = {"held-out items": metrics, "training": {"binary cross-entropy": "loss"}}
    title = f"NeuMF on {data.name}, grad_mode={settings.grad_mode}"
    curves = partial(_common.draw, run.history, folder, title, "epoch", panels)
    parser.when_interrupted = partial(run.when_interrupted, ranks, curves, "--resume")
    while not run.is_over(arguments.epochs):
        for batch, size, following in run.batches(examples, ranks, arguments.device):
            loss = _common.train(model, optimizer, model(batch.users, batch.items), batch.labels, ranks)
            run.add(loss, size, following is None)
        record = run.record(lambda: evaluate(model, split, candidates, ranks))
        figures = f"{text(record)} {text(record, 'full-')} loss {record['loss']:.4f}"
        place = f"epoch {record['epoch']:>{len(str(arguments.epochs))}}/{arguments.epochs}"
        ranks.print(f"{place}  {figures} {record['samples_per_second']:,.0f} samples/s")
        run.save(checkpoint, model, optimizer, **about, generator=generator.get_state())
    if ranks.rank == 0:
        print(f"checkpoint: {checkpoint}, {curves()}")
        last, best = run.history[-1], max(run.history, key=lambda record: (record["hr"], record["ndcg"]))
        print(f"last epoch {last['epoch']}: {text(last)}, best epoch {best['epoch']}: {text(best)}")
    return 0


if __name__ == "__main__":
    run_command(main)
