"""What the commands of all examples do alike: what they print and write, what they refuse, and how they go on."""

import errno
import re
import shlex
import sys
from functools import cache

import pytest
import torch
from examples.cases import assert_same_end, history_of, refused, run, said_in, write_criteo

from torchsparse_rec import checkpoint
from torchsparse_rec.examples import _common, dlrm, ncf, sasrec, wide_deep

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")

NUMBER = r"[01]\.\d\d\d\d"
FIGURES = rf"AUC {NUMBER} log loss {NUMBER}"
CLICKS = rf"epoch {{epoch}}/2 step {{step}}  loss {NUMBER}  held out: {FIGURES}  [\d,]+ samples/s"
RANKING = rf"HR@10 {NUMBER} NDCG@10 {NUMBER}"
LAST = rf"test-HR@10 {NUMBER} test-NDCG@10 {NUMBER}"
SPLITS = rf"valid-HR@10 {NUMBER} valid-NDCG@10 {NUMBER} {LAST}"
small = cache(lambda: ncf.generated(150, 300, 4500, seed=1))


class Example:
    """A command with flags of a small run, 8 steps an epoch; where it writes, and how it goes on from there."""

    def __init__(self, command, flags, output, first, line, last):
        self.command, self.flags, self.output = command, flags.split(), output
        self.first, self.line, self.last = first, line, last
        self.name = command.__name__.rpartition(".")[2]

    def into(self, folder, *flags):
        return [*self.flags, self.output, folder, *flags]

    def on_from(self, folder, *flags):
        where = [self.output, folder] if self.command is dlrm else ["--resume", folder / "checkpoint"]
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
    "sasrec": Example(
        sasrec,
        "--dim 8 --positions 10 --blocks 1 --batch-size 19",
        "--output-dir",
        "data: small data: 150 users, 300 items, 4,500 interactions",
        rf"epoch {{epoch}}/2  {SPLITS} loss \d\.\d\d\d\d [\d,]+ users/s",
        rf"last epoch 2: {LAST}, best epoch [12] by valid-NDCG@10: {LAST}",
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
    monkeypatch.setattr(ncf, "load", lambda *_: (small(), "small data"))
    return EXAMPLES[request.param]


# Those that train over ranks, and beside TensorFlow.
OVER_RANKS = pytest.mark.parametrize("example", ["ncf", "wide_deep", "dlrm"], indirect=True)


@pytest.fixture
def undrawn(monkeypatch):
    """Draw no curves, which takes longer than training here."""
    monkeypatch.setattr(_common, "draw", lambda *_: "no curves")


# ---- What they print and write ---------------------------------------------------------------------------------------


def test_it_prints_records_and_writes_curves_and_checkpoint(example, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert run(example.command, *example.into(folder), "--epochs", 2) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == example.first and len(lines) == 5
    for epoch in (1, 2):
        assert re.fullmatch(example.line.format(epoch=epoch, step=8 * epoch), lines[epoch])
    assert lines[3] == f"checkpoint: {folder}/checkpoint, curves: {folder}/curves.png"
    assert re.fullmatch(example.last, lines[4])
    assert captured.err == ""  # no progress bar where nobody watches
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "curves.png"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_so(example, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchmetrics")  # which imports it, if it is there
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(example.command, *example.into(tmp_path), "--epochs", 1) == 0
    printed = capsys.readouterr().out
    assert f"checkpoint: {tmp_path}/checkpoint, no curves: they need matplotlib (" in printed


def test_a_bar_is_shown_where_someone_watches(example, tmp_path, monkeypatch, undrawn):
    shown = []

    def bar(items, title, unit, show, total, leave):
        shown.append((title, unit, show, total, leave))
        return iter(items)

    monkeypatch.setattr(_common, "progress_bar", bar)
    assert run(example.command, *example.into(tmp_path), "--epochs", 2) == 0
    assert shown == [("epoch 1", "batches", None, 8, False), ("epoch 2", "batches", None, 8, False)]


def test_threads_are_torchs(example, tmp_path, restore_threads, undrawn):
    assert run(example.command, *example.into(tmp_path), "--threads", 2, "--epochs", 1) == 0
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("package", ["torchmetrics", "safetensors"])
def test_without_a_package_nothing_is_trained(example, package, tmp_path, monkeypatch, capsys):
    if package != "torchmetrics" or example.command not in (ncf, sasrec):
        monkeypatch.setitem(sys.modules, package, None)
        text = refused(capsys, example.command, *example.into(tmp_path))
        assert text.endswith(f"the example needs {package}: pip install 'torchsparse_rec[examples]'")
        assert list(tmp_path.iterdir()) == []


# ---- What they refuse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--batch-size 0", "argument --batch-size: must be at least 1 and below 2 ** 63, got 0"),
        ("--epochs -1", "argument --epochs: must be at least 1 and below 2 ** 63, got -1"),
        ("--lr 0", "argument --lr: must be positive and finite, got 0"),
        ("--lr nan", "argument --lr: must be positive and finite, got nan"),
        ("--seed x", "argument --seed: invalid number value: 'x'"),
        ("--seed -1", "argument --seed: must be at least 0 and below 2 ** 63, got -1"),
        (f"--seed {1 << 63}", "argument --seed: must be at least 0 and below 2 ** 63, got 9223372036854775808"),
        ("--grad-mode lazy", "invalid choice: 'lazy'"),
        ("--optimizer rowwise", "invalid choice: 'rowwise'"),
        ("--device moon", "argument --device: device must be cpu or cuda, got 'moon'"),
        ("--device meta", "argument --device: device must be cpu or cuda, got 'meta'"),
    ],
)
def test_it_refuses_flags(example, flags, text, capsys):
    assert text in refused(capsys, example.command, *flags.split())


@OVER_RANKS
def test_it_compares_in_one_process_and_anew(example, tmp_path, capsys, monkeypatch):
    compare = [*(["--tables", "hashed"] if example.command is dlrm else []), "--compare", "tensorflow"]
    goes_on = "--checkpoint" if example.command is dlrm else "--resume"
    assert f"--compare does not go with {goes_on}" in refused(capsys, example.command, *compare, goes_on, tmp_path)
    assert "invalid choice: 'jax'" in refused(capsys, example.command, "--compare", "jax")
    monkeypatch.setattr(_common, "is_under_torchrun", lambda: True)
    monkeypatch.setattr(_common, "join", lambda device: device)
    text = refused(capsys, example.command, *compare)
    assert text.endswith("--compare runs in one process on the CPU: it goes neither with torchrun nor with cuda")


@OVER_RANKS
def test_without_tensorflow_compare_says_so(example, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    flags = ["--tables", "hashed"] if example.command is dlrm else []
    text = refused(capsys, example.command, *flags, "--compare", "tensorflow")
    assert text.endswith("--compare tensorflow needs tensorflow: pip install 'torchsparse_rec[tensorflow]'")
    monkeypatch.setattr(_common, "extra_module", lambda *_: None)
    monkeypatch.setitem(sys.modules, "benchmarks", None)
    text = refused(capsys, example.command, *flags, "--compare", "tensorflow")
    assert text.endswith("of the repository: run it in the folder of a checkout")


@OVER_RANKS
def test_a_flag_of_ranks_needs_torchrun(example, tmp_path, capsys):
    text = refused(capsys, example.command, *example.into(tmp_path), "--plan", "row_wise")
    assert text.endswith("--plan is of tables over ranks: start the command under torchrun")


def test_it_refuses_folders_and_checkpoints_it_cannot_use(example, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert "Not a directory" in refused(capsys, example.command, *example.into(blocked / "runs"))
    saved = tmp_path / "checkpoint"
    if example.command is not dlrm:
        assert f"there is no checkpoint {saved}" in refused(capsys, example.command, *example.on_from(tmp_path))
    checkpoint.save(saved, torch.nn.Linear(1, 1), extra={"program": "another"})
    text = refused(capsys, example.command, *example.on_from(tmp_path))
    assert text.endswith(f"error: {saved} is not a checkpoint of {example.command.PROGRAM}")
    (saved / "000001" / "manifest.json").write_text("garbled")
    assert "manifest.json" in refused(capsys, example.command, *example.on_from(tmp_path))


def test_a_full_disk_ends_training_with_one_line(example, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    text = refused(capsys, example.command, *example.into(tmp_path), "--epochs", 1)
    assert "No space left on device" in text


def test_a_loss_that_is_no_number_ends_training_with_one_line(example, tmp_path, monkeypatch, capsys):
    step = _common.step
    monkeypatch.setattr(_common, "step", lambda *given: step(*given) * torch.nan)
    with pytest.raises(SystemExit) as stopped:
        run(example.command, *example.into(tmp_path), "--epochs", 1)
    assert stopped.value.code == 1
    assert "the loss up to step 8 is nan: a smaller learning rate may help" in capsys.readouterr().err


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
    saved, on = tmp_path / "checkpoint", example.on_from(tmp_path)
    assert run(example.command, *example.into(tmp_path), "--epochs", 1) == 0
    said = said_in(tmp_path)
    for flag, name, value in (("--lr", "lr", 0.25), ("--batch-size", "batch_size", 5)):
        text = refused(capsys, example.command, *on, flag, value)
        assert text.endswith(f"{flag} is {value}, but {saved} was trained with {said['settings'][name]}")
    text = refused(capsys, example.command, *on, "--epochs", 1)
    assert text.endswith(f"{saved} has 1 epochs and 8 steps already: more must be asked for")
    other = on
    if example.command in (ncf, sasrec):
        monkeypatch.setattr(ncf, "load", lambda *_: (ncf.generated(150, 300, 4500, seed=2), "other data"))
    else:
        write_criteo(tmp_path / "train.txt", 20)
        other = [*on, "--criteo" if example.command is wide_deep else "--data", tmp_path / "train.txt"]
    text = refused(capsys, example.command, *other, "--epochs", 2)
    assert f"{saved} was trained on other data, {said['data']}, got " in text


def test_ctrl_c_draws_the_curves_and_says_how_to_go_on(example, tmp_path, monkeypatch, capsys):
    straight, cut, step = tmp_path / "straight", tmp_path / "cut", _common.step
    flags = list(map(str, example.into(cut, "--epochs", 2)))
    monkeypatch.setattr(sys, "argv", ["example", *flags])
    steps = iter(range(100))

    def interrupted(*given):
        if next(steps) == 8 + 3:
            raise KeyboardInterrupt
        return step(*given)

    monkeypatch.setattr(_common, "step", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(example.command, *flags)
    if example.command is dlrm:
        assert str(stopped.value) == f"curves: {cut}/curves.png; no checkpoint has been written from which to go on"
    else:
        flags += ["--resume", str(cut / "checkpoint")]
        assert f"curves: {cut}/curves.png; to go on from step 8: " in str(stopped.value)
        assert str(stopped.value).endswith(f" {shlex.join(flags)}")
    assert (cut / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert run(example.command, *flags) == 0
    assert ("going on from step 8 of " in capsys.readouterr().out) == (example.command is not dlrm)
    assert run(example.command, *example.into(straight, "--epochs", 2)) == 0
    assert_same_end(straight, cut)


@pytest.mark.parametrize("example", ["ncf", "sasrec", "wide_deep"], indirect=True)
def test_resume_without_a_path_is_of_the_runs_folder(example, tmp_path, monkeypatch, capsys, undrawn):
    monkeypatch.chdir(tmp_path)
    assert f"there is no checkpoint runs/{example.name}/checkpoint" in refused(capsys, example.command, "--resume")
    assert run(example.command, *example.flags, "--epochs", 1) == 0
    for folder in ([], ["--output-dir", tmp_path / "runs" / example.name]):
        text = refused(capsys, example.command, *folder, "--resume", "--epochs", 1)
        assert f"runs/{example.name}/checkpoint has 1 epochs and 8 steps already" in text


def test_a_command_with_another_value_of_a_flag(monkeypatch):
    for given, then in (
        ("--a 1", "--a 1 --resume new"),
        ("--resume", "--resume new"),
        ("--resume --a 1", "--a 1 --resume new"),
        ("--resume old --a 1", "--a 1 --resume new"),
        ("--a 1 --resume new", "--a 1 --resume new"),
    ):
        monkeypatch.setattr(sys, "argv", ["program", *given.split()])
        assert _common.command_line("--resume", "new").endswith(f" {then}")
        assert _common.command_line().endswith(f" {given}")


# ---- Records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", ["wide_deep", "dlrm"], indirect=True)
def test_records_within_epochs_and_an_end_after_steps_change_no_bits(example, tmp_path, undrawn):
    often, once = tmp_path / "often", tmp_path / "once"
    flags = ["--epochs", 5, "--steps", 19]
    assert run(example.command, *example.into(often), *flags, "--evaluate-every", 3) == 0
    assert run(example.command, *example.into(once), *flags) == 0
    # Epochs have 8 batches; every third step, every epoch's end, and the last step.
    found = [(record["epoch"], record["step"]) for record in history_of(often)]
    assert found == [(1, 3), (1, 6), (1, 8), (2, 9), (2, 12), (2, 15), (2, 16), (3, 18), (3, 19)]
    (first, _, last), ours = history_of(once), history_of(often)
    assert first["loss"] == pytest.approx((3 * ours[0]["loss"] + 3 * ours[1]["loss"] + 2 * ours[2]["loss"]) / 8)
    for one, other in ((first, ours[2]), (last, ours[-1])):
        assert (one["auc"], one["log_loss"]) == (other["auc"], other["log_loss"])
