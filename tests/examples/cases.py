"""What the tests of all examples share: running their commands, files of Criteo's form, and the ends of runs."""

import gzip
import random

import pytest

from torchsparse_rec.checkpoint import CheckpointStore
from torchsparse_rec.examples import _common


def run(command, *flags):
    """Run a command with flags of any type, and return its exit code."""
    return command.main([str(flag) for flag in flags])


def refused(capsys, command, *flags):
    """Return the line with which a command refuses flags."""
    with pytest.raises(SystemExit) as stopped:
        run(command, *flags)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def settings_of(command, **given):
    """Return a command's settings, by default those of its flags."""
    return command.make_parser().settings(given)


def step_of(model, settings, logits):
    """Return a function that trains a model on a batch, whose logits another function returns; it returns the loss."""
    optimizer = _common.OPTIMIZERS[settings.optimizer](model.parameters(), lr=settings.lr, in_backward=True)
    return lambda batch: float(_common.train(model, optimizer, logits(batch), batch.labels, _common.Ranks()))


def write_criteo(path, rows):
    """Write lines with missing values as in the real files, whose label follows from the first integer and category."""
    chosen, lines = random.Random(0), []
    for _ in range(rows):
        label = chosen.random() < 0.4
        numbers = [str(chosen.randrange(-2, 30)) if chosen.random() < 0.8 else "" for _ in range(13)]
        words = [f"{chosen.randrange(30):08x}" if chosen.random() < 0.9 else "" for _ in range(26)]
        numbers[0], words[0] = str(chosen.randrange(5) + 9 * label), f"{chosen.randrange(4) + 4 * label:08x}"
        lines.append("\t".join([str(int(label)), *numbers, *words]).rstrip("\t"))
    text = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def damage_criteo(path, row, line=None):
    """Replace a line of a file, which by default gets a label that is none."""
    lines = path.read_text().split("\n")
    lines[row] = "x" + lines[row][1:] if line is None else line
    path.write_text("\n".join(lines))


# ---- Ends of runs ----------------------------------------------------------------------------------------------------


def said_in(folder):
    """Return what a run's newest checkpoint says of it."""
    return CheckpointStore(folder / "checkpoint").open().version.metadata["extra"]


def history_of(folder):
    """Return a run's records, without their speeds."""
    return [{**record, "samples_per_second": None} for record in said_in(folder)["run"]["history"]]


def end_of(folder):
    """Return what a run has come to: checksums of all that is trained, its place, and losses since the last record."""
    chain, said = CheckpointStore(folder / "checkpoint").open(), said_in(folder)
    run = {name: x for name, x in said["run"].items() if name not in ("history", "seconds")}
    return {**said, "run": run, "files": sorted((shard.file, shard.crc32c) for _, shard in chain.shards())}


def assert_same_end(one, other):
    """Check that two folders' checkpoints are of the same end and have the same records."""
    assert end_of(one) == end_of(other)
    assert history_of(one) == history_of(other) != []
