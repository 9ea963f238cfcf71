"""What the commands of all examples do alike: what they print and write, what they refuse, and how they go on."""

import re
import sys
from functools import cache

import pytest
import torch
from examples.cases import assert_same_end, refused, run, write_criteo

from torchsparse_rec.examples import _checkpoints, _command, _comparison, _records, _trainer
from torchsparse_rec.examples.dlrm import __main__ as dlrm
from torchsparse_rec.examples.ncf import __main__ as ncf
from torchsparse_rec.examples.ncf import data
from torchsparse_rec.examples.wide_deep import __main__ as wide_deep

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")

NUMBER = r"[01]\.\d\d\d\d"
FIGURES = rf"AUC {NUMBER} log loss {NUMBER}"
CLICKS = rf"epoch {{epoch}}/2 step {{step}}  loss {NUMBER}  held out: {FIGURES}  [\d,]+ samples/s"
RANKING = rf"HR@10 {NUMBER} NDCG@10 {NUMBER}"
small = cache(lambda: data.generate(150, 300, 4500, seed=1))


class Example:
    """A command with flags of a small run, 8 steps an epoch; where it writes, and how it goes on from there."""

    def __init__(self, command, flags, output, first, line, last):
        self.command, self.flags, self.output = command, flags.split(), output
        self.first, self.line, self.last = first, line, last

    def into(self, folder, *flags):
        return [*self.flags, self.output, folder, *flags]

    def on_from(self, folder, *flags):
        where = [self.output, folder] if self.command is dlrm else ["--resume", folder / "checkpoint.pt"]
        return [*where, *flags]


EXAMPLES = {
    "ncf": Example(
        ncf,
        "--factors 4 --layers 16,8 --batch-size 2719",
        "--output-dir",
        "data: small data: 150 users, 300 items, 4,500 interactions",
        rf"epoch {{epoch}}/2  {RANKING} full-HR@10 {NUMBER} full-NDCG@10 {NUMBER} loss {NUMBER} [\d,]+ samples/s",
        rf"last epoch 2: {RANKING}, best epoch [12]: {RANKING}",
    ),
    "wide_deep": Example(
        wide_deep,
        "--rows 200 --samples 1024 --held-out 256 --batch-size 128 --embedding-dim 4 --mlp 16,8 --lr 0.5",
        "--output-dir",
        "data: 8 batches of Generator(rows=200, batch_size=128, distribution='uniform', seed=0); 40 tables, 0.00016 GB",
        CLICKS,
        rf"last step 16: {FIGURES}, best step (8|16): {FIGURES}",
    ),
    "dlrm": Example(
        dlrm,
        "--tables hashed --buckets 60 --samples 1024 --held-out 256 --batch-size 128 --max-cardinality 100 "
        "--embedding-dim 4 --bottom 8 --top 16",
        "--checkpoint",
        "data: 8 batches of Generator(batch_size=128, max_cardinality=100, seed=0); "
        "26 hashed tables of 60 rows and dim 4",
        CLICKS,
        rf"last step 16: {FIGURES}, best step (8|16): {FIGURES}",
    ),
}


@pytest.fixture(params=EXAMPLES)
def example(request, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *_: (small(), "small data"))
    return EXAMPLES[request.param]


@pytest.fixture
def undrawn(monkeypatch):
    """Draw no curves, which takes longer than training here. Return the titles and paths of those asked for."""
    asked = []
    monkeypatch.setattr(_command, "plot_curves", lambda history, title, path: asked.append((title, path)))
    return asked


# ---- What they print and write ---------------------------------------------------------------------------------------


def test_it_prints_records_and_writes_curves_and_checkpoint(example, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert run(example.command, *example.into(folder), "--epochs", 2) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == example.first and len(lines) == 5
    for epoch in (1, 2):
        assert re.fullmatch(example.line.format(epoch=epoch, step=8 * epoch), lines[epoch])
    assert lines[3] == f"checkpoint: {folder}/checkpoint.pt, curves: {folder}/curves.png"
    assert re.fullmatch(example.last, lines[4])
    assert captured.err == ""  # no progress bar where nobody watches
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.pt", "curves.png"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_so(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(example.command, *example.into(tmp_path), "--epochs", 1) == 0
    printed = capsys.readouterr().out
    assert f"checkpoint: {tmp_path}/checkpoint.pt; no curves: they need matplotlib (" in printed


def test_a_bar_is_shown_where_someone_watches(example, tmp_path, monkeypatch, undrawn):
    shown = []

    def progress(batches, title, total, done=0):
        shown.append((title, total, done))
        return batches

    monkeypatch.setattr(_trainer, "progress", progress)
    assert run(example.command, *example.into(tmp_path), "--epochs", 2) == 0
    assert shown == [("epoch 1", 8, 0), ("epoch 2", 8, 0)]


@pytest.mark.parametrize("tqdm", [False, True])
def test_progress_is_shown_to_a_person_alone(tqdm, monkeypatch, capsys):
    assert _trainer.progress(batches := [3, 4, 5], "epoch 1", 3) is batches
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
    if tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        assert _trainer.progress(batches, "epoch 1", None) is batches
    assert list(_trainer.progress(batches, "epoch 1", 8, 5)) == batches
    shown = capsys.readouterr().err
    assert "epoch 1:" in shown and "62" in shown  # the first of three is the sixth of eight


@pytest.mark.parametrize("example", ["wide_deep", "dlrm"], indirect=True)
def test_threads_are_torchs(example, tmp_path, restore_threads, undrawn):
    assert run(example.command, *example.into(tmp_path), "--threads", 2, "--steps", 1) == 0
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("example", ["wide_deep", "dlrm"], indirect=True)
def test_without_torchmetrics_it_says_so(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    text = refused(capsys, example.command, *example.into(tmp_path))
    assert "AUC and log loss need torchmetrics: pip install 'torchsparse-rec[examples]'" in text


# ---- What they refuse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--batch-size 0", "argument --batch-size: must be at least 1, got 0"),
        ("--epochs -1", "argument --epochs: must be at least 1, got -1"),
        ("--lr 0", "argument --lr: must be a finite number above 0, got 0"),
        ("--lr nan", "argument --lr: must be a finite number above 0, got nan"),
        ("--seed x", "argument --seed: invalid seed value: 'x'"),
        ("--seed -1", "argument --seed: must be at least 0 and below 2^63, got -1"),
        (f"--seed {1 << 63}", "argument --seed: must be at least 0 and below 2^63, got 9223372036854775808"),
        ("--grad-mode lazy", "invalid choice: 'lazy'"),
        ("--optimizer rowwise", "invalid choice: 'rowwise'"),
        ("--device moon", "moon cannot be used"),
        ("--device meta", "argument --device: must be cpu or cuda, got meta"),
    ],
)
def test_it_refuses_flags(example, flags, text, capsys):
    assert text in refused(capsys, example.command, *flags.split())


def test_it_compares_on_the_cpu_alone_and_anew(example, tmp_path, capsys, monkeypatch):
    compare = [*example.flags, "--compare", "tensorflow"]
    goes_on = "--checkpoint" if example.command is dlrm else "--resume"
    assert f"does not go with {goes_on}" in refused(capsys, example.command, *compare, goes_on, tmp_path)
    assert "invalid choice: 'jax'" in refused(capsys, example.command, "--compare", "jax")
    monkeypatch.setattr(example.command, "device", torch.device)
    text = "--compare runs on the CPU, got --device cuda:1"
    assert text in refused(capsys, example.command, *compare, "--device", "cuda:1")


def test_without_tensorflow_compare_says_so(example, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    flags = ["--tables", "hashed"] if example.command is dlrm else []
    text = refused(capsys, example.command, *flags, "--compare", "tensorflow")
    assert text.endswith("--compare tensorflow needs tensorflow: pip install 'torchsparse_rec[tensorflow]'")


def test_flags_of_ranks_and_of_one_process_do_not_mix(example, tmp_path, monkeypatch, capsys):
    text = refused(capsys, example.command, *example.into(tmp_path), "--plan", "row_wise")
    assert text.endswith("--plan is of tables over ranks: start the command under torchrun")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    text = refused(capsys, example.command, *example.flags, "--compare", "tensorflow")
    assert text.endswith("--compare runs in one process: it does not go with torchrun")


def test_it_refuses_folders_and_checkpoints_it_cannot_use(example, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert "the output folder" in refused(capsys, example.command, *example.into(blocked / "runs"))
    saved = tmp_path / "checkpoint.pt"
    if example.command is not dlrm:
        assert f"there is no checkpoint {saved}" in refused(capsys, example.command, *example.on_from(tmp_path))
    wrong = f"error: {saved} is not a checkpoint of this program"
    saved.write_bytes(b"garbled")
    assert refused(capsys, example.command, *example.on_from(tmp_path)).endswith(f"{wrong}, or is truncated")
    torch.save({"format": "another 1"}, saved)
    assert refused(capsys, example.command, *example.on_from(tmp_path)).endswith(wrong)
    saved.unlink()
    saved.mkdir()
    text = refused(capsys, example.command, *example.on_from(tmp_path))
    assert text.endswith(f"{wrong}, or is truncated: Is a directory")


def test_a_full_disk_ends_training_with_one_line(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_checkpoints, "whole_file", lambda path: open("/dev/full", "wb"))
    text = refused(capsys, example.command, *example.into(tmp_path), "--epochs", 1)
    assert "No space left on device" in text


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "kept"
    path.write_text("old")

    class Broken:
        """Stands for a step whose state cannot be pickled, and for metrics that cannot be drawn."""

        device = torch.device("cpu")

        def state(self):
            return {"weight": torch.ones(9), "late": lambda: None}

        @staticmethod
        def draw(history, left, right):
            left.plot([1, 2])
            raise RuntimeError

    with pytest.raises(AttributeError):
        _checkpoints.Checkpoint(path, "x").write({}, Broken())
    with pytest.raises(RuntimeError):
        _records.plot_curves([_records.Record(1, 1, 0.5, Broken(), 1.0)], "title", path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# ---- Going on --------------------------------------------------------------------------------------------------------


def test_it_goes_on_bit_for_bit_with_settings_left_out(example, tmp_path, undrawn):
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert run(example.command, *example.into(straight), "--seed", 7, "--epochs", 3) == 0
    assert run(example.command, *example.into(cut), "--seed", 7, "--epochs", 1) == 0
    assert run(example.command, *example.on_from(cut), "--epochs", 3) == 0
    assert_same_end(straight, cut)


def test_it_refuses_to_go_on_with_other_settings_data_and_nothing_to_do(
    example, tmp_path, monkeypatch, capsys, undrawn
):
    saved, on = tmp_path / "checkpoint.pt", example.on_from(tmp_path)
    assert run(example.command, *example.into(tmp_path), "--epochs", 1) == 0
    content = torch.load(saved, weights_only=True)
    rate = {"ncf": 0.001, "wide_deep": 0.5, "dlrm": 0.01}[example.command.__package__.split(".")[-1]]
    text = refused(capsys, example.command, *on, "--lr", 0.25)
    assert text.endswith(f"--lr is 0.25, but {saved} was trained with {rate}")
    text = refused(capsys, example.command, *on, "--batch-size", 5)
    assert text.endswith(f"--batch-size is 5, but {saved} was trained with {content['settings']['batch_size']}")
    text = refused(capsys, example.command, *on, "--epochs", 1)
    assert f"{saved} has 1 epochs " in text and "--epochs " in text and "must be larger" in text
    if example.command is ncf:
        monkeypatch.setattr(data, "load", lambda *_: (data.generate(150, 300, 4500, seed=2), "other data"))
        other = on
    else:
        write_criteo(tmp_path / "train.txt", 20)
        other = [*on, "--criteo" if example.command is wide_deep else "--data", tmp_path / "train.txt"]
    text = refused(capsys, example.command, *other, "--epochs", 2)
    assert f"the checkpoint was trained on other data, {content['source']}, got " in text
    monkeypatch.setattr(data, "load", lambda *_: (small(), "small data"))
    torch.save({**content, "device": "cuda"}, saved)
    text = refused(capsys, example.command, *on, "--epochs", 2)
    assert "the checkpoint was trained on cuda, got device cpu" in text
    saved.write_bytes(saved.read_bytes()[:-1000])
    assert "is not a checkpoint of this program, or is truncated" in refused(capsys, example.command, *on)


def test_losses_that_are_no_numbers_count_as_different():
    assert _comparison.largest_difference([0.5, 0.25], [0.5, 0.375]) == 0.125
    for wrong in (float("nan"), float("inf")):
        assert _comparison.largest_difference([0.5, wrong, 0.4], [0.5, 0.4, 0.4]) == float("inf")
        assert _comparison.largest_difference([0.5, 0.4, 0.4], [wrong, 0.4, 0.4]) == float("inf")


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        (lambda: 3, 3, ""),
        (lambda: sys.exit(None), 0, ""),
        (lambda: sys.exit(4), 4, ""),
        (lambda: sys.exit("no such file"), 1, "no such file\n"),
        (lambda: int("x"), 1, "ValueError: invalid literal for int()"),
    ],
)
def test_a_rank_ends_as_python_does(end, code, says, monkeypatch, capsys):
    class Left(BaseException):
        pass

    codes = []

    def leave(code):
        codes.append(code)
        raise Left

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setattr(_command, "leave", leave)
    with pytest.raises(Left):
        _command.run(end)
    assert codes[0] == code and says in capsys.readouterr().err
