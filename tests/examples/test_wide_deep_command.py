"""The command ``python -m torchsparse_rec.examples.wide_deep``: flags, output and files, on each kind of data."""

import os
import re
from pathlib import Path

import pytest
import torch
from examples.cases import assert_same_end, damage_criteo, refused, run, settings_of, write_criteo

from torchsparse_rec import checkpoint
from torchsparse_rec.examples import _common
from torchsparse_rec.examples import wide_deep as command

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")

FLAGS = "--rows 200 --samples 1000 --held-out 300 --batch-size 256 --embedding-dim 4 --mlp 16,8 --lr 0.5".split()
SAMPLE = Path(os.environ.get("TORCHSPARSE_REC_DATA", "")) / "criteo-sample" / "train.txt"


def train(*flags):
    return run(command, *FLAGS, *flags)


# ---- What it prints and writes ---------------------------------------------------------------------------------------


def test_steps_end_it_and_no_checkpoint_writes_none(tmp_path, capsys):
    assert train("--steps", 3, "--evaluate-every", 2, "--no-checkpoint", "--output-dir", tmp_path) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"step (\d+)  loss", printed) == ["2", "3"]
    assert "checkpoint: none, curves:" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_table_gb_chooses_rows(tmp_path, capsys):
    flags = ["--table-gb", "0.001", *FLAGS[2:], "--steps", "1", "--no-checkpoint", "--output-dir", tmp_path]
    assert run(command, *flags) == 0
    # 40 tables of rows of 4 + 1 float32.
    assert "rows=1250" in capsys.readouterr().out
    parser = command.make_parser()
    rows = command.settings_of(parser, parser.parse_args(["--table-gb", "9.1"]), None).rows
    assert abs(rows * 40 * 17 * 4 - 9.1e9) < 40 * 17 * 4
    assert command.settings_of(parser, parser.parse_args(["--table-gb", "1e-9"]), None).rows == 1


def test_table_gb_of_a_resumed_run_is_of_its_rows(tmp_path, capsys):
    flags = ["--table-gb", "0.001", *FLAGS[2:], "--output-dir", tmp_path]
    assert run(command, *flags, "--steps", "1") == 0
    resumed = ["--resume", tmp_path / "checkpoint", "--table-gb", "0.001", "--no-checkpoint", "--steps"]
    assert run(command, *resumed, "2") == 0
    resumed[3] = "0.002"
    assert "--rows is 2500, but" in refused(capsys, command, *resumed, "2")
    resumed[3] = "0.001"
    text = refused(capsys, command, *resumed, "1")
    assert "has 0 epochs and 1 steps already: more must be asked for" in text


def test_held_out_examples_of_one_class_have_no_auc(tmp_path, capsys):
    path = tmp_path / "train.txt"
    write_criteo(path, 100)
    lines = path.read_text().split("\n")
    lines[9::10] = ["1" + line[1:] for line in lines[9::10]]
    path.write_text("\n".join(lines))
    flags = "--rows 50 --batch-size 30 --embedding-dim 4 --mlp 8 --lr 0.05".split()
    flags += ["--criteo", path, "--output-dir", tmp_path]
    assert run(command, *flags, "--epochs", "2") == 0
    printed = capsys.readouterr().out
    assert printed.count("held out: AUC n/a log loss 0.") == 2 and "0.0000" not in printed
    assert re.search(r"last step 6: AUC n/a log loss \S+, best step [36]: AUC n/a log loss", printed)
    resumed = ["--resume", tmp_path / "checkpoint", "--criteo", path, "--epochs", "3"]
    assert run(command, *resumed) == 0


def test_the_picture_names_the_data(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(_common, "draw", lambda history, folder, title, *_: titles.append(title))
    write_criteo(tmp_path / "train.txt", 20)
    flags = ["--steps", "1", "--no-checkpoint", "--output-dir", tmp_path]
    assert train(*flags, "--columns", "hashed") == 0
    assert run(command, *flags, "--rows", "9", "--criteo", tmp_path / "train.txt", "--lr", "0.01") == 0
    assert titles == ["Wide & Deep, hashed columns", "Wide & Deep, Criteo"]


# ---- What it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--table-gb", "nan"], "argument --table-gb: must be positive and finite, got nan"),
        (["--table-gb", "1", "--rows", "5"], "does not go with --rows"),
        (["--distribution", "normal"], "invalid choice: 'normal'"),
        (["--mlp", "8,0"], "argument --mlp: must be at least 1 and below 2 ** 63, got 0"),
        (["--mlp", ""], "argument --mlp: invalid widths value: ''"),
        (["--criteo", "x", "--columns", "hashed"], "--criteo does not go with --columns"),
        (["--criteo", "x", "--samples", "9"], "--criteo does not go with --samples"),
        (["--criteo", "x", "--distribution", "zipf"], "--criteo does not go with --distribution"),
        (["--criteo", "x", "--prebatched", "y"], "--criteo does not go with --prebatched"),
        (["--compare", "tensorflow", "--criteo", "x"], "does not go with --criteo"),
        (["--compare", "tensorflow", "--optimizer", "adam"], "gradient descent, got --optimizer adam"),
        (["--compare", "tensorflow", "--epochs", "2"], "does not go with --epochs"),
        (["--compare", "tensorflow", "--held-out", "9"], "does not go with --held-out"),
        (["--compare", "tensorflow", "--evaluate-every", "2"], "does not go with --evaluate-every"),
        (["--compare", "tensorflow", "--output-dir", "x"], "does not go with --output-dir"),
        (["--compare", "tensorflow", "--no-checkpoint"], "does not go with --no-checkpoint"),
    ],
)
def test_it_refuses_flags(flags, text, capsys):
    assert text in refused(capsys, command, *flags)


def test_it_refuses_files_it_cannot_use(tmp_path, capsys):
    blocked = tmp_path / "file"
    assert "none.txt" in refused(capsys, command, "--criteo", tmp_path / "none.txt", "--output-dir", tmp_path)
    blocked.write_text("1\t2\n" * 9)
    assert "at least 10 rows" in refused(capsys, command, "--criteo", blocked, "--output-dir", tmp_path)
    blocked.write_text("1\t2\nx\t3\n" * 9)
    assert "line 2" in refused(capsys, command, "--criteo", blocked, "--output-dir", tmp_path)


def test_files_damaged_further_in_end_training_with_one_line(tmp_path, capsys):
    path, output = tmp_path / "train.txt", ["--output-dir", tmp_path / "runs"]
    write_criteo(path, 200)
    damage_criteo(path, 150)
    flags = "--rows 50 --batch-size 20 --held-out 5 --embedding-dim 4 --mlp 8 --lr 0.05".split()
    text = refused(capsys, command, *flags, "--criteo", path, *output)
    assert text.startswith(f"python -m torchsparse_rec.examples.wide_deep: error: {path}: line 151: ")
    path = tmp_path / "train.arrow"
    assert train("--steps", 1, "--no-checkpoint", "--prebatched", path, *output) == 0
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    text = refused(capsys, command, *FLAGS, "--prebatched", path, *output)
    assert f"error: {path}: byte " in text


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def weights_of(folder, flags):
    """Return the network of a run, loaded from its checkpoint."""
    parser = command.make_parser()
    settings = parser.settings(vars(parser.parse_args([str(flag) for flag in flags])))
    model = command.make_model(command.make_transform(settings), settings)
    checkpoint.load(folder / "checkpoint", model)
    return dict(model.state_dict())


@pytest.mark.parametrize("source", ["generated", "prebatched", "criteo"])
def test_resume_within_an_epoch_continues_bit_for_bit(source, tmp_path, capsys):
    if source == "criteo":
        write_criteo(tmp_path / "train.txt", 400)
        where = ["--criteo", tmp_path / "train.txt"]
        flags = ["--rows", "50", "--batch-size", "50", "--embedding-dim", "4", "--mlp", "8", "--lr", "0.05", *where]
    else:
        where = ["--prebatched", tmp_path / "train.arrow"] if source == "prebatched" else []
        flags = [*FLAGS, *where]
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    flags += ["--evaluate-every", "2"]
    assert run(command, *flags, "--epochs", "2", "--output-dir", straight) == 0
    assert run(command, *flags, "--steps", "2", "--output-dir", cut) == 0
    resumed = ["--resume", cut / "checkpoint", "--evaluate-every", "2", "--epochs", "2", *where]
    assert run(command, *resumed) == 0
    assert_same_end(straight, cut)


def test_resume_within_an_epoch_of_rows_that_wait_needs_the_same_evaluations(tmp_path, capsys):
    # Most of 3,000 rows are not in a batch: Adam flushes them later, and for a checkpoint.
    flags = "--rows 3000 --samples 640 --held-out 64 --batch-size 64 --embedding-dim 4 --mlp 8 --optimizer adam".split()
    flags += ["--grad-mode", "fused", "--lr", "0.05"]
    straight, cut, other = (tmp_path / name for name in ("straight", "cut", "other"))
    assert run(command, *flags, "--epochs", "1", "--evaluate-every", "3", "--output-dir", straight) == 0
    assert run(command, *flags, "--steps", "3", "--evaluate-every", "3", "--output-dir", cut) == 0
    assert run(command, "--resume", cut / "checkpoint", "--evaluate-every", "3", "--epochs", "1") == 0
    assert_same_end(straight, cut)
    assert run(command, *flags, "--epochs", "1", "--evaluate-every", "5", "--output-dir", other) == 0
    torch.testing.assert_close(weights_of(straight, flags), weights_of(other, flags), rtol=0, atol=2e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "ftrl"])
def test_other_evaluations_keep_the_bits_where_no_rows_wait(optimizer, tmp_path, capsys):
    flags = "--rows 3000 --samples 640 --held-out 64 --batch-size 64 --embedding-dim 4 --mlp 8 --epochs 1".split()
    flags += ["--optimizer", optimizer]
    one, other = tmp_path / "one", tmp_path / "other"
    assert run(command, *flags, "--evaluate-every", "3", "--output-dir", one) == 0
    assert run(command, *flags, "--output-dir", other) == 0
    torch.testing.assert_close(weights_of(one, flags), weights_of(other, flags), rtol=0, atol=0)


# ---- Prebatched ------------------------------------------------------------------------------------------------------


def test_prebatched_trains_the_same_bits_and_is_written_once(tmp_path, capsys):
    path = tmp_path / "train.arrow"
    one, other, third = (tmp_path / name for name in ("one", "other", "third"))
    assert train("--epochs", 2, "--output-dir", one) == 0
    assert train("--epochs", 2, "--output-dir", other, "--prebatched", path) == 0
    written = path.stat().st_mtime_ns
    assert train("--epochs", 2, "--output-dir", third, "--prebatched", path) == 0
    assert path.stat().st_mtime_ns == written
    assert_same_end(one, other)
    assert_same_end(one, third)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["one", "other", "third", "train.arrow"]


def test_prebatched_files_of_other_examples_are_refused(tmp_path, capsys):
    path = tmp_path / "train.arrow"
    assert train("--steps", 1, "--no-checkpoint", "--output-dir", tmp_path, "--prebatched", path) == 0
    capsys.readouterr()
    for flags in (["--seed", 1], ["--samples", 2000], ["--batch-size", 100], ["--distribution", "zipf"], ["--rows", 9]):
        flags = [*FLAGS, "--prebatched", path, "--output-dir", tmp_path, *flags]
        assert "batches of other examples than" in refused(capsys, command, *flags)
    # Hashed columns read the same raw ids.
    where = ["--output-dir", tmp_path, "--prebatched", path]
    assert train("--columns", "hashed", "--steps", 1, "--no-checkpoint", *where) == 0
    path.write_bytes(path.read_bytes()[:-7])
    assert str(path) in refused(capsys, command, *FLAGS, "--prebatched", path, "--output-dir", tmp_path)


# ---- Criteo ----------------------------------------------------------------------------------------------------------


def losses_of(printed):
    return [float(x) for x in re.findall(r"  loss (\d\.\d{4})  held", printed)]


def test_criteo_rows_are_held_out_one_in_ten(tmp_path):
    write_criteo(tmp_path / "train.txt", 437)
    source = command.criteo_examples(settings_of(command, batch_size=50, held_out=30), tmp_path / "train.txt")
    lines = (tmp_path / "train.txt").read_text().split("\n")
    wanted = [line for row, line in enumerate(lines) if row % 10 != 9]

    def labels(batches):
        return [int(x) for batch in batches for x in batch.labels]

    for _ in range(2):
        batches = list(source.batches(0))
        assert labels(batches) == [int(line[0]) for line in wanted]
        assert all(batch.size in (50, 51) for batch in batches[:-1])
    first = [str(x) if x is not None else "" for x in batches[0].columns.column("C1").to_pylist()]
    assert first[:3] == [line.split("\t")[14] for line in wanted[:3]]
    assert labels(source.held_out) == [int(line[0]) for line in lines[9::10][:30]]
    assert labels(source.batches(3)) == labels(batches[3:])


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_criteo_trains(name, tmp_path, capsys):
    write_criteo(tmp_path / name, 1500)
    flags = ["--criteo", tmp_path / name, "--rows", "100", "--batch-size", "100", "--embedding-dim", "4", "--mlp", "16"]
    flags += ["--lr", "0.05", "--epochs", "4", "--output-dir", tmp_path / "runs"]
    assert run(command, *flags) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"data: {name} of ") and "26 tables" in printed
    losses = losses_of(printed)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert float(re.findall(r"AUC (\d\.\d{4})", printed)[-1]) > 0.8


@pytest.mark.skipif(not SAMPLE.is_file(), reason="$TORCHSPARSE_REC_DATA has no criteo-sample/train.txt")
def test_criteo_sample_trains_end_to_end(tmp_path, capsys):
    flags = ["--criteo", SAMPLE, "--rows", "1000", "--batch-size", "100", "--lr", "0.02", "--epochs", "5"]
    assert run(command, *flags, "--output-dir", tmp_path) == 0
    losses = losses_of(capsys.readouterr().out)
    assert len(losses) == 5 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.03
