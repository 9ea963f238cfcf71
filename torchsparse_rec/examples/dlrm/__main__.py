"""The command ``python -m torchsparse_rec.examples.dlrm``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..._extras import extra_module
from .._command import check_given, check_writable, device, ending, positive_float, positive_int, seed, widths
from .._figures import plot_curves, summary, torchmetrics
from .checkpoints import Checkpoints
from .sources import make_source
from .tables import KINDS, TIERS, Placement, statistics
from .train import Settings, Trainer, saved_settings


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser. Flags that a checkpoint fixes have no default: so it is known which were given."""
    default, place = Settings(), Placement()
    bottom, top = (",".join(map(str, sizes)) for sizes in (default.bottom, default.top))
    parser = argparse.ArgumentParser(
        prog="python -m torchsparse_rec.examples.dlrm",
        description="Train DLRM (Naumov et al., 2019) on Criteo's files, or on generated examples of their shape.",
    )
    add = parser.add_argument
    add("--data", type=Path, nargs="+", metavar="FILE", help="Criteo's, as text or prebatched (.arrow, .prebatched)")
    add("--samples", type=positive_int, help=f"generated for an epoch, default {default.samples:,}")
    add("--max-cardinality", type=positive_int, metavar="N", help="generated categories have no more values than that")
    add("--held-out", type=positive_int, help=f"samples for the metrics, default {default.held_out:,}")
    add("--batch-size", type=positive_int, help=f"samples, default {default.batch_size:,}")
    add("--tables", choices=KINDS, help=f"keyed by raw ids, or fixed ones of hashed ids; default {default.tables}")
    add("--buckets", type=positive_int, help=f"rows of each hashed table, default {default.buckets:,}")
    add("--embedding-dim", type=positive_int, help=f"of each category, default {default.embedding_dim}")
    add("--bottom", type=widths, help=f"widths of the hidden layers over the numbers, default {bottom}")
    add("--top", type=widths, help=f"widths of the hidden layers over the products, default {top}")
    add("--lr", type=positive_float, help=f"Adagrad's learning rate, default {default.lr:g}")
    add("--seed", type=seed, help=f"of dense weights and generated examples, default {default.seed}")
    add("--filter", type=positive_int, metavar="N", help="an id gets a row with the step of its N-th occurrence")
    add("--evict", type=positive_int, metavar="STEPS", help="drop the rows of ids that did not occur for so long")
    add("--evict-every", type=positive_int, metavar="STEPS", help="how often, default as long as they live")
    add("--tiers", choices=TIERS, help=f"where dynamic tables are, default {place.tiers}")
    add("--hbm-rows", type=positive_int, help=f"of each table, where DRAM or SSD are below, default {place.hbm_rows:,}")
    add("--dram-rows", type=positive_int, help=f"of each table, where SSD is below, default {place.dram_rows:,}")
    add("--ssd-path", type=Path, metavar="FOLDER", help="of the SSD tier, default ssd in --checkpoint")
    add("--checkpoint", type=Path, metavar="FOLDER", help="write checkpoints there, and go on from one that is there")
    add("--save-every", type=positive_int, metavar="STEPS", help="full checkpoints, default one at the end")
    add("--delta-every", type=positive_int, metavar="STEPS", help="checkpoints of what changed in dynamic tables")
    add("--epochs", type=positive_int, default=1, help="in all, default 1")
    add("--steps", type=positive_int, help="end after so many steps, in all")
    add("--evaluate-every", type=positive_int, metavar="STEPS", help="also within epochs")
    add("--device", type=device, default=torch.device("cpu"), help="cpu or cuda, default cpu")
    add("--threads", type=positive_int, help="default torch's")
    return parser


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were named on the command line."""
    values = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    return {name: value for name, value in values.items() if value is not None}


def make_placement(arguments: argparse.Namespace) -> Placement:
    """Return where the rows of dynamic tables are."""
    values = {field.name: getattr(arguments, field.name) for field in fields(Placement)}
    found = {name: value for name, value in values.items() if value is not None}
    if "SSD" in found.get("tiers", "") and "ssd_path" not in found:
        found["ssd_path"] = arguments.checkpoint / "ssd"
    return Placement(**found)


def make_trainer(arguments: argparse.Namespace) -> Trainer:
    """Return a new trainer, or one that goes on from the checkpoint."""
    settings, checkpoints, content = Settings(), None, None
    if arguments.checkpoint is not None:
        check_writable(arguments.checkpoint)
        checkpoints = Checkpoints(arguments.checkpoint, arguments.save_every, arguments.delta_every)
        content = checkpoints.read()
    if content is None or checkpoints is None:
        settings = Settings(**given_settings(arguments))
    else:
        settings = saved_settings(content)
        check_given(given_settings(arguments), settings, checkpoints.path)
    check_fit(arguments, settings)
    if checkpoints is not None and settings.tables == "dynamic":
        _check_safetensors()
    source = make_source(settings, arguments.data)
    trainer = Trainer(settings, source, make_placement(arguments), arguments.device, checkpoints)
    if content is not None and checkpoints is not None:
        trainer.resume(content)
        if trainer.is_over(arguments.epochs, arguments.steps):
            raise ValueError(
                f"{checkpoints.path} has {trainer.epoch} epochs and {trainer.step} steps already: --epochs or --steps "
                "must be larger, or --checkpoint another folder"
            )
    return trainer


def _check_safetensors() -> None:
    """Raise ``ImportError`` if safetensors is missing: at the start, and not after an hour's training."""
    extra_module("safetensors.torch", "checkpoint", "--checkpoint of dynamic tables")


def check_fit(arguments: argparse.Namespace, settings: Settings) -> None:
    """Raise ``ValueError`` if a flag was given that means nothing to this kind of tables."""
    of_the_other = {
        "dynamic": ("buckets",),
        "hashed": (*("filter", "evict", "tiers", "delta_every"),),
    }
    for name in of_the_other[settings.tables]:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not go with --tables {settings.tables}")


def refusal(arguments: argparse.Namespace) -> str | None:
    """Return an error message if flags were given that do not go together, else None."""
    if arguments.data is not None:
        for name in ("samples", "max_cardinality"):
            if getattr(arguments, name) is not None:
                return f"--{name.replace('_', '-')} is of generated examples: it does not go with --data"
    tiers = arguments.tiers or ""
    needs = {
        "--checkpoint": (arguments.checkpoint is not None, ("save_every", "delta_every")),
        "--evict": (arguments.evict is not None, ("evict_every",)),
        "--tiers with more below HBM": (tiers.startswith("HBM_"), ("hbm_rows",)),
        "--tiers with SSD": (tiers.endswith("_SSD"), ("dram_rows", "ssd_path")),
    }
    for what, (given, names) in needs.items():
        for name in names:
            if getattr(arguments, name) is not None and not given:
                return f"--{name.replace('_', '-')} needs {what}"
    if tiers.endswith("_SSD") and arguments.ssd_path is None and arguments.checkpoint is None:
        return f"--tiers {tiers} needs --ssd-path or --checkpoint"
    return None


def describe(trainer: Trainer) -> str:
    """Return the first lines of a run: its data, its tables, and the step from which it goes on."""
    settings = trainer.settings
    rows = f"of {settings.buckets:,} rows and" if settings.tables == "hashed" else "of"
    tables = len(trainer.train_on.model.bags.embedding_bag_configs())
    text = (
        f"data: {trainer.source.fingerprint()}; {tables} {settings.tables} tables {rows} dim {settings.embedding_dim}"
    )
    if trainer.step:
        text += f"\ngoing on from step {trainer.step:,} of {trainer.checkpoints.path}"  # type: ignore[union-attr]
    return text


def train(trainer: Trainer, arguments: argparse.Namespace) -> None:
    """Train and print each record; then draw the curves and print the tables' statistics and the last line."""
    for record in trainer.run(arguments.epochs, arguments.steps, arguments.evaluate_every):
        print(record.line(arguments.epochs), flush=True)
    for line in statistics(trainer.train_on.model.bags):
        print(line)
    if arguments.checkpoint is not None:
        picture = arguments.checkpoint / "curves.png"
        try:
            plot_curves(trainer.history, f"DLRM, {trainer.settings.tables} tables", picture)
            print(f"checkpoint: {trainer.checkpoints.path}, curves: {picture}")  # type: ignore[union-attr]
        except ImportError as error:
            print(f"checkpoint: {arguments.checkpoint}; no curves: they need matplotlib ({error})")
    print(summary(trainer.history))


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code. Unusable input ends the process with one line and code 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    wrong = refusal(arguments)
    if wrong is not None:
        parser.error(wrong)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with ending(parser, ValueError, OSError, ImportError):
        torchmetrics()
        trainer = make_trainer(arguments)
    print(describe(trainer), flush=True)
    with ending(parser, ValueError, OSError):  # a file that is damaged further in, or a disk that is full
        train(trainer, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
