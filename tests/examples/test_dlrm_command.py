"""The command ``python -m torchsparse_rec.examples.dlrm``: flags, output, data, statistics of dynamic tables."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from examples.test_dlrm import KINDS, write_text

from torchsparse_rec.data.convert import convert
from torchsparse_rec.examples import _figures, _training
from torchsparse_rec.examples.dlrm import __main__ as command
from torchsparse_rec.examples.dlrm import tables
from torchsparse_rec.examples.dlrm.data import Generator
from torchsparse_rec.nn import EmbeddingVariable

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")

NETWORK = "--embedding-dim 4 --bottom 8 --top 16 --batch-size 128 --held-out 256".split()
GENERATED = [*NETWORK, *"--samples 1024 --max-cardinality 100".split()]
HASHED = "--tables hashed --buckets 60".split()
SAMPLE = Path(os.environ.get("TORCHSPARSE_REC_DATA", "")) / "criteo-sample" / "train.txt"


@pytest.fixture(autouse=True)
def curves(monkeypatch):
    """Return the function that draws curves. Runs use an empty one: drawing takes longer than training here."""
    drawing = command.plot_curves
    monkeypatch.setattr(command, "plot_curves", lambda *_: None)
    return drawing


def flags_of(kind):
    return [*GENERATED, *(HASHED if kind == "hashed" else ["--tables", kind])]


def run(*flags):
    return command.main([str(flag) for flag in flags])


def refused(capsys, *flags):
    with pytest.raises(SystemExit) as stopped:
        run(*flags)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# ---- What it prints and writes ---------------------------------------------------------------------------------------


def test_it_prints_records_and_writes_nothing_unless_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*flags_of("hashed"), "--epochs", 2, "--evaluate-every", 5) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    generator = "Generator(batch_size=128, max_cardinality=100, seed=0)"
    assert lines[0] == f"data: 8 batches of {generator}; 26 hashed tables of 60 rows and dim 4"
    number = r"[01]\.\d{4}"
    for line, (epoch, step) in zip(lines[1:], [(1, 5), (1, 8), (2, 10), (2, 15), (2, 16)], strict=False):
        pattern = (
            rf"epoch {epoch}/2 step {step}  loss {number}  held out: AUC {number} log loss {number}  [\d,]+ samples/s"
        )
        assert re.fullmatch(pattern, line), line
    figures = rf"AUC {number} log loss {number}"
    assert re.fullmatch(rf"last step 16: {figures}, best step \d+: {figures}", lines[6]) and len(lines) == 7
    assert captured.err == ""  # no progress bar where nobody watches
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoints_folder_has_the_curves_too(tmp_path, capsys, monkeypatch, curves):
    monkeypatch.setattr(command, "plot_curves", curves)
    folder = tmp_path / "new" / "folder"
    assert run(*flags_of("hashed"), "--checkpoint", folder) == 0
    printed = capsys.readouterr().out
    assert f"checkpoint: {folder}/checkpoint.pt, curves: {folder}/curves.png\n" in printed
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.pt", "curves.png"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")

    def missing(*_):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(command, "plot_curves", missing)
    assert run(*flags_of("hashed"), "--checkpoint", tmp_path / "other", "--steps", 1) == 0
    assert "no curves: they need matplotlib" in capsys.readouterr().out


def test_a_bar_is_shown_where_someone_watches(monkeypatch):
    shown = []

    def progress(batches, title, total, done=0):
        shown.append((title, total, done))
        return batches

    monkeypatch.setattr(_training, "progress", progress)
    assert run(*flags_of("hashed"), "--epochs", 2) == 0
    assert shown == [("epoch 1", 8, 0), ("epoch 2", 8, 0)]


def test_threads_are_torchs(restore_threads):
    assert run(*flags_of("hashed"), "--threads", 2, "--steps", 1) == 0
    assert torch.get_num_threads() == 2


def test_without_torchmetrics_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    assert "pip install 'torchsparse-rec[examples]'" in refused(capsys, *flags_of("hashed"))
    with pytest.raises(ImportError, match=r"AUC and log loss need torchmetrics"):
        _figures.torchmetrics()


# ---- Files -----------------------------------------------------------------------------------------------------------


def figures_of(printed):
    return re.findall(r"step (\d+)  loss (\S+)  held out: (.*)  [\d,]+ samples/s", printed)


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_prebatched_files_train_alike_and_learn(kind, tmp_path, capsys):
    text, arrow = tmp_path / "train.txt", tmp_path / "train.arrow"
    write_text(text, 1500)
    convert(text, arrow, batch_size=256, progress=False)
    flags = [*NETWORK, *(HASHED if kind == "hashed" else ["--tables", kind]), "--lr", "0.05", "--epochs", 3]
    found = []
    for path in (text, arrow):
        assert run(*flags, "--data", path) == 0
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
    assert run(*flags) == 0
    losses = [float(loss) for _, loss, _ in figures_of(capsys.readouterr().out)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.03


# ---- What it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tables", "static"], "invalid choice: 'static'"),
        (["--buckets", "0"], "argument --buckets: must be at least 1, got 0"),
        (["--bottom", "8,0"], "argument --bottom: must be at least 1, got 0"),
        (["--top", ""], "argument --top: invalid widths value: ''"),
        (["--lr", "0"], "argument --lr: must be a finite number above 0, got 0"),
        (["--filter", "0"], "argument --filter: must be at least 1, got 0"),
        (["--evict", "-1"], "argument --evict: must be at least 1, got -1"),
        (["--tiers", "TAPE"], "invalid choice: 'TAPE'"),
        (["--device", "moon"], "moon cannot be used"),
        (["--data", "x", "--samples", "9"], "--samples is of generated examples: it does not go with --data"),
        (["--data", "x", "--max-cardinality", "9"], "--max-cardinality is of generated examples"),
        (["--save-every", "9"], "--save-every needs --checkpoint"),
        (["--delta-every", "9"], "--delta-every needs --checkpoint"),
        (["--evict-every", "9"], "--evict-every needs --evict"),
        (["--hbm-rows", "9"], "--hbm-rows needs --tiers with more below HBM"),
        (["--dram-rows", "9", "--tiers", "HBM_DRAM"], "--dram-rows needs --tiers with SSD"),
        (["--ssd-path", "x", "--tiers", "DRAM"], "--ssd-path needs --tiers with SSD"),
        (["--tiers", "DRAM_SSD"], "--tiers DRAM_SSD needs --ssd-path or --checkpoint"),
        (["--tables", "hashed", "--filter", "2"], "--filter does not go with --tables hashed"),
        (["--tables", "hashed", "--evict", "2"], "--evict does not go with --tables hashed"),
        (["--tables", "hashed", "--tiers", "DRAM"], "--tiers does not go with --tables hashed"),
        (["--tables", "dynamic", "--buckets", "2"], "--buckets does not go with --tables dynamic"),
        (["--tables", "hashed", "--data", "none.txt"], "none.txt"),
    ],
)
def test_it_refuses_flags(flags, text, capsys):
    assert text in refused(capsys, *flags)


def test_hashed_tables_have_no_deltas(tmp_path, capsys):
    flags = [*flags_of("hashed"), "--checkpoint", tmp_path, "--delta-every", 3]
    assert "--delta-every does not go with --tables hashed" in refused(capsys, *flags)


def test_it_refuses_files_it_cannot_use(tmp_path, capsys):
    blocked = tmp_path / "file.txt"
    blocked.write_text("1\t2\n" * 9)
    assert "output folder" in refused(capsys, *HASHED, "--checkpoint", blocked / "runs")
    assert "at least 10 rows" in refused(capsys, *HASHED, "--data", blocked)
    write_text(blocked, 200)
    lines = blocked.read_text().split("\n")
    lines[150] = "x" + lines[150][1:]
    blocked.write_text("\n".join(lines))
    flags = [*NETWORK, *HASHED, "--batch-size", 20, "--held-out", 5]
    text = refused(capsys, *flags, "--data", blocked)
    assert text.startswith(f"python -m torchsparse_rec.examples.dlrm: error: {blocked}: line 151: ")
    lines[150] = "\t".join(["0", *[""] * 13, "not"])
    blocked.write_text("\n".join(lines))
    assert "column 'C1' must hold hexadecimal ids of up to 8 digits, got 'not'" in refused(
        capsys, *flags, "--data", blocked
    )


def test_a_full_disk_ends_training_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_training, "whole_file", lambda path: open("/dev/full", "wb"))
    flags = [*flags_of("hashed"), "--steps", 1, "--checkpoint", tmp_path]
    assert "No space left on device" in refused(capsys, *flags)


# ---- Dynamic tables --------------------------------------------------------------------------------------------------


def rows_of_statistics(printed):
    rows = re.findall(r"^(C\d+|all) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", printed, re.MULTILINE)
    return {name: [int(figure.replace(",", "")) for figure in figures] for name, *figures in rows}


def test_statistics_are_printed_of_each_table(capsys):
    assert run(*flags_of("dynamic")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("data: 8 batches of Generator(batch_size=128, max_cardinality=100, seed=0); 26 dynamic ")
    found = rows_of_statistics(printed)
    ids = torch.cat([batch.ids for batch in Generator(128, 100).batches(0, 8)], 1)
    distinct = [len(row.unique()) for row in ids]
    assert [found[f"C{n}"][0] for n in range(1, 27)] == distinct and found["all"][0] == sum(distinct)
    assert all(figures[1:3] == [0, 0] and figures[3] > 0 for figures in found.values())
    assert found["all"] == [sum(figures[k] for name, figures in found.items() if name != "all") for k in range(4)]
    (heading,) = [line for line in printed.splitlines() if line.startswith("table")]
    assert heading.split() == ["table", "keys", "filtered", "evicted", "bytes"]


def test_filter_and_eviction_are_seen_in_the_statistics(capsys):
    assert run(*flags_of("dynamic"), "--filter", 3, "--evict", 2, "--evict-every", 4) == 0
    found = rows_of_statistics(capsys.readouterr().out)
    batches = [batch.ids[2].tolist() for batch in Generator(128, 100).batches(0, 8)]
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
    assert run(*flags_of("dynamic"), "--tiers", "DRAM_SSD", "--ssd-path", tmp_path) == 0
    batches = list(Generator(128, 100).batches(1, 8))
    wanted = [(name, ids.tolist()) for batch in batches for name, ids in zip(tables.CATEGORIES, batch.ids, strict=True)]
    assert asked == wanted
    asked.clear()
    assert run(*flags_of("dynamic")) == 0
    assert asked == []


def test_without_safetensors_dynamic_tables_are_not_trained_for_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    text = refused(capsys, *flags_of("dynamic"), "--checkpoint", tmp_path)
    assert "--checkpoint of dynamic tables needs safetensors" in text
