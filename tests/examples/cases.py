"""What the tests of all examples share: running their commands, files of Criteo's form, and the ends of runs."""

import gzip
import random

import pytest
import torch

from torchsparse_rec.checkpoint import CheckpointStore


def run(command, *flags):
    """Run a command with flags of any type, and return its exit code."""
    return command.main([str(flag) for flag in flags])


def refused(capsys, command, *flags):
    """Return the line with which a command refuses flags."""
    with pytest.raises(SystemExit) as stopped:
        run(command, *flags)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


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


def end_of(folder):
    """Return everything that a checkpoint decides, by name; losses and metrics of each record are included."""
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    del content["interval"]["seconds"]
    for record in content["history"]:
        del record["samples_per_second"]
    history, tables = content.pop("history"), content.pop("tables", {})
    found = dict(_leaves(content))
    return {**found, "history": history, "tables": _tables(folder, **tables) if tables else {}}


def assert_same(one, other):
    """Check that two ends are equal, bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def assert_same_end(one, other):
    """Check that two folders' checkpoints are of the same end."""
    one, other = end_of(one), end_of(other)
    assert len(one["history"]) > 0
    assert_same(one, other)


def _tables(folder, chain, versions):
    """Return each table's keys, rows, optimizer state, frequencies, steps and filter counts, in order of keys."""
    found = {}
    for name, version in versions.items():
        content = {"rows": {}, "candidates": {}}
        for _, part, tensors in CheckpointStore(folder / "tables" / chain / name).open(version):
            columns = {key: x for key, x in tensors.items() if key != "keys"}
            for n, key in enumerate(tensors["keys"].tolist()):
                if part == "erased":
                    content["rows"].pop(key, None)
                else:
                    content[part][key] = {column: x[n].tolist() for column, x in columns.items()}
                    if part == "rows":
                        content["candidates"].pop(key, None)
        found[name] = content
    return found


def _leaves(state, name=""):
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _leaves(value, f"{name}.{key}")
    else:
        yield name, state
