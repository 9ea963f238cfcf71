"""The command ``python -m torchsparse_rec.examples.dlrm``: flags, output, data, statistics of dynamic tables."""

import os
import re
from pathlib import Path

import pytest
import torch
from examples.cases import damage_criteo, refused, run, write_criteo

from torchsparse_rec.data.convert import convert
from torchsparse_rec.data.criteo import CATEGORIES
from torchsparse_rec.examples import dlrm as command
from torchsparse_rec.examples.dlrm import KINDS, Generator
from torchsparse_rec.nn import EmbeddingVariable

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")

NETWORK = "--embedding-dim 4 --bottom 8 --top 16 --batch-size 128 --held-out 256".split()
GENERATED = [*NETWORK, *"--samples 1024 --max-cardinality 100".split()]
HASHED = "--tables hashed --buckets 60".split()
COMPARE = "--tables hashed --compare tensorflow".split()
SAMPLE = Path(os.environ.get("TORCHSPARSE_REC_DATA", "")) / "criteo-sample" / "train.txt"


def flags_of(kind):
    return [*GENERATED, *(HASHED if kind == "hashed" else ["--tables", kind])]


def test_it_writes_nothing_unless_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(command, *flags_of("hashed"), "--epochs", 2, "--evaluate-every", 5) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"epoch (\d)/2 step (\d+)", printed) == [*zip("11222", ["5", "8", "10", "15", "16"], strict=True)]
    assert "curves" not in printed and list(tmp_path.iterdir()) == []


# ---- Files -----------------------------------------------------------------------------------------------------------


def figures_of(printed):
    return re.findall(r"step (\d+)  loss (\S+)  held out: (.*)  [\d,]+ samples/s", printed)


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_prebatched_files_train_alike_and_learn(kind, tmp_path, capsys):
    text, arrow = tmp_path / "train.txt", tmp_path / "train.arrow"
    write_criteo(text, 1500)
    convert(text, arrow, batch_size=256, progress=False)
    flags = [*NETWORK, *(HASHED if kind == "hashed" else ["--tables", kind]), "--lr", "0.05", "--epochs", 3]
    found = []
    for path in (text, arrow):
        assert run(command, *flags, "--data", path) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"data: {path.name} of ")
        found.append(figures_of(printed))
    assert found[0] == found[1] and len(found[0]) == 3
    losses = [float(loss) for _, loss, _ in found[0]]
    assert losses == sorted(losses, reverse=True)
    assert float(re.search(r"AUC (\S+)", found[0][-1][2])[1]) > 0.9


@pytest.mark.skipif(not SAMPLE.is_file(), reason="$TORCHSPARSE_REC_DATA has no criteo-sample/train.txt")
@pytest.mark.parametrize("kind", KINDS)
def test_criteos_sample_trains_end_to_end(kind, capsys):
    flags = [*NETWORK, *(HASHED if kind == "hashed" else ["--tables", kind]), "--epochs", 5, "--data", SAMPLE]
    assert run(command, *flags) == 0
    losses = [float(loss) for _, loss, _ in figures_of(capsys.readouterr().out)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.03


# ---- What it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--bottom", "8,0"], "argument --bottom: must be at least 1 and below 2 ** 63, got 0"),
        (["--top", ""], "argument --top: invalid widths value: ''"),
        (["--tiers", "TAPE"], "invalid choice: 'TAPE'"),
        (["--data", "x", "--samples", "9"], "--data does not go with --samples"),
        (["--data", "x", "--max-cardinality", "9"], "--data does not go with --max-cardinality"),
        (["--save-every", "9"], "--save-every needs --checkpoint"),
        (["--delta-every", "9"], "--delta-every needs --checkpoint"),
        (["--evict-every", "9"], "--evict-every needs --evict"),
        (["--hbm-rows", "9"], "--hbm-rows needs --tiers with more below HBM"),
        (["--dram-rows", "9", "--tiers", "HBM_DRAM"], "--dram-rows needs --tiers with SSD"),
        (["--ssd-path", "x", "--tiers", "DRAM"], "--ssd-path needs --tiers with SSD"),
        (["--tiers", "DRAM_SSD"], "--tiers DRAM_SSD needs --ssd-path or --checkpoint"),
        (["--tables", "hashed", "--filter", "2"], "--filter needs --tables dynamic"),
        (["--tables", "hashed", "--evict", "2"], "--evict needs --tables dynamic"),
        (["--tables", "hashed", "--tiers", "DRAM"], "--tiers needs --tables dynamic"),
        ([*HASHED, "--checkpoint", "x", "--delta-every", "3"], "--delta-every needs --tables dynamic"),
        (["--tables", "dynamic", "--buckets", "2"], "--buckets needs --tables hashed"),
        (["--tables", "hashed", "--data", "none.txt"], "none.txt"),
        (["--compare", "tensorflow"], "--compare needs --tables hashed"),
        ([*COMPARE, "--optimizer", "adam"], "--compare trains by adagrad or sgd, got --optimizer adam"),
        ([*COMPARE, "--filter", "2"], "--filter needs --tables dynamic"),
        ([*COMPARE, "--data", "x"], "does not go with --data"),
        ([*COMPARE, "--epochs", "1"], "does not go with --epochs"),
        ([*COMPARE, "--held-out", "9"], "does not go with --held-out"),
        ([*COMPARE, "--evaluate-every", "2"], "does not go with --evaluate-every"),
    ],
)
def test_it_refuses_flags(flags, text, capsys):
    assert text in refused(capsys, command, *flags)


def test_it_refuses_files_it_cannot_use(tmp_path, capsys):
    blocked = tmp_path / "file.txt"
    blocked.write_text("1\t2\n" * 9)
    assert "at least 10 rows" in refused(capsys, command, *HASHED, "--data", blocked)
    write_criteo(blocked, 200)
    damage_criteo(blocked, 150)
    flags = [*NETWORK, *HASHED, "--batch-size", 20, "--held-out", 5]
    text = refused(capsys, command, *flags, "--data", blocked)
    assert text.startswith(f"python -m torchsparse_rec.examples.dlrm: error: {blocked}: line 151: ")
    damage_criteo(blocked, 150, "\t".join(["0", *[""] * 13, "not"]))
    text = refused(capsys, command, *flags, "--data", blocked)
    assert "column 'C1' must hold hexadecimal ids of up to 8 digits, got 'not'" in text


# ---- Dynamic tables --------------------------------------------------------------------------------------------------


def rows_of_statistics(printed):
    rows = re.findall(r"^(C\d+|all) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", printed, re.MULTILINE)
    return {name: [int(figure.replace(",", "")) for figure in figures] for name, *figures in rows}


def test_statistics_are_printed_of_each_table(capsys):
    assert run(command, *flags_of("dynamic")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("data: 8 batches of Generator(batch_size=128, max_cardinality=100, seed=0); 26 dynamic ")
    found = rows_of_statistics(printed)
    ids = torch.cat([batch.ids for batch in map(Generator(128, 100).batch, range(8))], 1)
    distinct = [len(row.unique()) for row in ids]
    assert [found[f"C{n}"][0] for n in range(1, 27)] == distinct and found["all"][0] == sum(distinct)
    assert all(figures[1:3] == [0, 0] and figures[3] > 0 for figures in found.values())
    assert found["all"] == [sum(figures[k] for name, figures in found.items() if name != "all") for k in range(4)]
    (heading,) = [line for line in printed.splitlines() if line.startswith("table")]
    assert heading.split() == ["table", "keys", "filtered", "evicted", "bytes"]


def test_filter_and_eviction_are_seen_in_the_statistics(capsys):
    assert run(command, *flags_of("dynamic"), "--filter", 3, "--evict", 2, "--evict-every", 4) == 0
    found = rows_of_statistics(capsys.readouterr().out)
    batches = [batch.ids[2].tolist() for batch in map(Generator(128, 100).batch, range(8))]
    counts, last, filtered, evicted = {}, {}, 0, 0
    for step, batch in enumerate(batches):
        if step and step % 4 == 0:
            # Count the evicted keys that had a row; then remove all old keys, also those that were only counted.
            gone = [key for key in last if step - last[key] > 2]
            evicted += sum(counts[key] >= 3 for key in gone)
            for key in gone:
                del counts[key], last[key]
        for key in batch:
            counts[key], last[key] = counts.get(key, 0) + 1, step
        filtered += sum(counts[key] < 3 for key in batch)
    assert found["C3"][:3] == [sum(count >= 3 for count in counts.values()), filtered, evicted]
    assert filtered > 0 and evicted > 0


def test_rows_of_the_next_batch_are_read_ahead(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(EmbeddingVariable, "prefetch", lambda self, ids: asked.append((self.name, ids.tolist())))
    assert run(command, *flags_of("dynamic"), "--tiers", "DRAM_SSD", "--ssd-path", tmp_path) == 0
    batches = list(map(Generator(128, 100).batch, range(1, 8)))
    wanted = [(name, ids.tolist()) for batch in batches for name, ids in zip(CATEGORIES, batch.ids, strict=True)]
    assert asked == wanted
    asked.clear()
    assert run(command, *flags_of("dynamic")) == 0
    assert asked == []
