"""The command ``python -m torchsparse_rec.examples.wide_deep``: flags, output and files, on each kind of data."""

import gzip
import os
import random
import re
from pathlib import Path

import pytest
import torch

from torchsparse_rec.examples import _training
from torchsparse_rec.examples.wide_deep import __main__ as command
from torchsparse_rec.examples.wide_deep import metrics, sources, train

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")

FLAGS = "--rows 200 --samples 1000 --held-out 300 --batch-size 256 --embedding-dim 4 --mlp 16,8 --lr 0.5".split()
SAMPLE = Path(os.environ.get("TORCHSPARSE_REC_DATA", "")) / "criteo-sample" / "train.txt"


def run(*flags):
    return command.main([str(flag) for flag in (*FLAGS, *flags)])


def refused(capsys, *flags):
    with pytest.raises(SystemExit) as stopped:
        command.main([str(flag) for flag in flags])
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# ---- What it prints and writes ---------------------------------------------------------------------------------------


def test_it_prints_records_and_writes_curves_and_checkpoint(tmp_path, capsys):
    output = tmp_path / "new" / "folder"
    assert run("--epochs", 2, "--output-dir", output) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == (
        "data: 4 batches of Generator(rows=200, batch_size=256, distribution='uniform', seed=0); 40 tables, 0.00016 GB"
    )
    number = r"[01]\.\d{4}"
    for epoch in (1, 2):
        pattern = (
            rf"epoch {epoch}/2 step {4 * epoch}  loss {number}  held out: AUC {number} log loss {number}  "
            r"[\d,]+ samples/s"
        )
        assert re.fullmatch(pattern, lines[epoch])
    assert lines[3] == f"checkpoint: {output}/checkpoint.pt, curves: {output}/curves.png"
    figures = rf"AUC {number} log loss {number}"
    assert re.fullmatch(rf"last step 8: {figures}, best step [48]: {figures}", lines[4]) and len(lines) == 5
    assert captured.err == ""  # no progress bar where nobody watches
    assert sorted(path.name for path in output.iterdir()) == ["checkpoint.pt", "curves.png"]
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_steps_end_it_and_no_checkpoint_writes_none(tmp_path, capsys):
    assert run("--steps", 3, "--evaluate-every", 2, "--no-checkpoint", "--output-dir", tmp_path) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"step (\d+)  loss", printed) == ["2", "3"]
    assert "checkpoint: none, curves:" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_table_gb_chooses_rows(tmp_path, capsys):
    flags = ["--table-gb", "0.001", *FLAGS[2:], "--steps", "1", "--no-checkpoint", "--output-dir", str(tmp_path)]
    assert command.main(flags) == 0
    # 40 tables of rows of 4 + 1 float32.
    assert "rows=1250" in capsys.readouterr().out
    arguments = command.make_parser().parse_args(["--table-gb", "9.1"])
    rows = command.given_settings(arguments)["rows"]
    assert abs(rows * 40 * 17 * 4 - 9.1e9) < 40 * 17 * 4
    arguments = command.make_parser().parse_args(["--table-gb", "1e-9"])
    assert command.given_settings(arguments)["rows"] == 1


def test_table_gb_of_a_resumed_run_is_of_its_rows(tmp_path, capsys):
    flags = ["--table-gb", "0.001", *FLAGS[2:], "--output-dir", str(tmp_path)]
    assert command.main([*flags, "--steps", "1"]) == 0
    resumed = ["--resume", str(tmp_path / "checkpoint.pt"), "--table-gb", "0.001", "--no-checkpoint", "--steps"]
    assert command.main([*resumed, "2"]) == 0
    resumed[3] = "0.002"
    assert "--rows is 2500, but" in refused(capsys, *resumed, "2")


def test_the_greatest_seed_trains(tmp_path):
    assert run("--seed", (1 << 63) - 1, "--steps", 1, "--no-checkpoint", "--output-dir", tmp_path) == 0


def test_held_out_examples_of_one_class_have_no_auc(tmp_path, capsys):
    path = tmp_path / "train.txt"
    write_criteo_rows(path, 100)
    lines = path.read_text().split("\n")
    lines[9::10] = ["1" + line[1:] for line in lines[9::10]]
    path.write_text("\n".join(lines))
    flags = "--rows 50 --batch-size 30 --embedding-dim 4 --mlp 8 --lr 0.05".split()
    flags += ["--criteo", str(path), "--output-dir", str(tmp_path)]
    assert command.main([*flags, "--epochs", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("held out: AUC n/a log loss 0.") == 2 and "0.0000" not in printed
    assert re.search(r"last step 6: AUC n/a log loss \S+, best step [36]: AUC n/a log loss", printed)
    resumed = ["--resume", str(tmp_path / "checkpoint.pt"), "--criteo", str(path), "--epochs", "3"]
    assert command.main(resumed) == 0


def test_the_picture_names_the_data(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(command, "plot_curves", lambda history, title, path: titles.append(title))
    write_criteo_rows(tmp_path / "train.txt", 20)
    flags = ["--steps", "1", "--no-checkpoint", "--output-dir", str(tmp_path)]
    assert run(*flags, "--columns", "hashed") == 0
    assert command.main([*flags, "--rows", "9", "--criteo", str(tmp_path / "train.txt"), "--lr", "0.01"]) == 0
    assert titles == ["Wide & Deep, hashed columns", "Wide & Deep, Criteo"]


def test_threads_are_torchs(tmp_path, capsys, restore_threads):
    assert run("--threads", 2, "--steps", 1, "--no-checkpoint", "--output-dir", tmp_path) == 0
    assert torch.get_num_threads() == 2


def test_without_matplotlib_or_torchmetrics_it_says_so(tmp_path, monkeypatch, capsys):
    def missing(*_):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(command, "plot_curves", missing)
    assert run("--steps", 1, "--output-dir", tmp_path) == 0
    assert "no curves: they need matplotlib" in capsys.readouterr().out
    monkeypatch.setitem(__import__("sys").modules, "torchmetrics", None)
    assert "pip install 'torchsparse-rec[examples]'" in refused(capsys, "--steps", 1, "--output-dir", tmp_path)
    with pytest.raises(ImportError, match=r"AUC and log loss need torchmetrics"):
        metrics.torchmetrics()


def test_without_tensorflow_compare_says_so(monkeypatch, capsys):
    found = command.importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda n: None if n == "tensorflow" else found(n))
    assert "pip install 'torchsparse-rec[tensorflow]'" in refused(capsys, "--compare", "tensorflow")


# ---- What it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--columns", "raw"], "invalid choice: 'raw'"),
        (["--rows", "0"], "argument --rows: must be at least 1, got 0"),
        (["--table-gb", "nan"], "argument --table-gb: must be a finite number above 0, got nan"),
        (["--table-gb", "1", "--rows", "5"], "not allowed with argument"),
        (["--samples", "-1"], "argument --samples: must be at least 1, got -1"),
        (["--held-out", "0"], "argument --held-out: must be at least 1, got 0"),
        (["--batch-size", "0"], "argument --batch-size: must be at least 1, got 0"),
        (["--distribution", "normal"], "invalid choice: 'normal'"),
        (["--embedding-dim", "0"], "argument --embedding-dim: must be at least 1, got 0"),
        (["--mlp", "8,0"], "argument --mlp: must be at least 1, got 0"),
        (["--mlp", ""], "argument --mlp: invalid widths value: ''"),
        (["--grad-mode", "lazy"], "invalid choice: 'lazy'"),
        (["--optimizer", "rowwise"], "invalid choice: 'rowwise'"),
        (["--lr", "0"], "argument --lr: must be a finite number above 0, got 0"),
        (["--seed", "x"], "argument --seed: invalid seed value: 'x'"),
        (["--seed", "-1"], "argument --seed: must be at least 0 and below 2^63, got -1"),
        (["--seed", str(1 << 63)], "argument --seed: must be at least 0 and below 2^63, got 9223372036854775808"),
        (["--epochs", "0"], "argument --epochs: must be at least 1, got 0"),
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--evaluate-every", "0"], "argument --evaluate-every: must be at least 1, got 0"),
        (["--device", "moon"], "moon cannot be used"),
        (["--device", "meta"], "argument --device: must be cpu or cuda, got meta"),
        (["--threads", "0"], "argument --threads: must be at least 1, got 0"),
        (["--compare", "jax"], "invalid choice: 'jax'"),
        (["--criteo", "x", "--columns", "hashed"], "--columns is of generated examples: it does not go with --criteo"),
        (["--criteo", "x", "--samples", "9"], "--samples is of generated examples"),
        (["--criteo", "x", "--distribution", "zipf"], "--distribution is of generated examples"),
        (["--criteo", "x", "--prebatched", "y"], "--prebatched is of generated examples"),
        (["--compare", "tensorflow", "--resume", "x"], "does not go with --resume or --criteo"),
        (["--compare", "tensorflow", "--criteo", "x"], "does not go with --resume or --criteo"),
        (["--compare", "tensorflow", "--optimizer", "adam"], "gradient descent, got --optimizer adam"),
        (["--compare", "tensorflow", "--epochs", "2"], "does not go with --epochs"),
        (["--compare", "tensorflow", "--held-out", "9"], "does not go with --held-out"),
        (["--compare", "tensorflow", "--evaluate-every", "2"], "does not go with --evaluate-every"),
        (["--compare", "tensorflow", "--output-dir", "x"], "does not go with --output-dir"),
        (["--compare", "tensorflow", "--no-checkpoint"], "does not go with --no-checkpoint"),
    ],
)
def test_it_refuses_flags(flags, text, capsys):
    assert text in refused(capsys, *flags)


def test_it_refuses_to_compare_elsewhere_than_on_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr(command, "device", torch.device)
    text = "--compare runs on the CPU, got --device cuda:1"
    assert text in refused(capsys, "--compare", "tensorflow", "--device", "cuda:1")


def test_it_refuses_files_it_cannot_use(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert "output folder" in refused(capsys, "--output-dir", blocked / "runs")
    assert "none.txt" in refused(capsys, "--criteo", tmp_path / "none.txt", "--output-dir", tmp_path)
    blocked.write_text("1\t2\n" * 9)
    assert "at least 10 rows" in refused(capsys, "--criteo", blocked, "--output-dir", tmp_path)
    blocked.write_text("1\t2\nx\t3\n" * 9)
    assert "line 2" in refused(capsys, "--criteo", blocked, "--output-dir", tmp_path)
    assert "there is no checkpoint" in refused(capsys, "--resume", tmp_path / "none.pt")
    wanted = f": error: {blocked} is not a checkpoint of this program, or is truncated"
    assert refused(capsys, "--resume", blocked).endswith(wanted)
    assert refused(capsys, "--resume", tmp_path).endswith("or is truncated: Is a directory")
    torch.save({"format": 1}, tmp_path / "other.pt")
    assert "not a checkpoint of this program" in refused(capsys, "--resume", tmp_path / "other.pt")


def test_files_damaged_further_in_end_training_with_one_line(tmp_path, capsys):
    path, output = tmp_path / "train.txt", ["--output-dir", tmp_path / "runs"]
    write_criteo_rows(path, 200)
    lines = path.read_text().split("\n")
    lines[150] = "x" + lines[150][1:]
    path.write_text("\n".join(lines))
    flags = "--rows 50 --batch-size 20 --held-out 5 --embedding-dim 4 --mlp 8 --lr 0.05".split()
    text = refused(capsys, *flags, "--criteo", path, *output)
    assert text.startswith(f"python -m torchsparse_rec.examples.wide_deep: error: {path}: line 151: ")
    path = tmp_path / "train.arrow"
    assert run("--steps", 1, "--no-checkpoint", "--prebatched", path, *output) == 0
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    text = refused(capsys, *FLAGS, "--prebatched", path, *output)
    assert f"error: {path}: byte " in text


def test_a_full_disk_ends_training_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_training, "whole_file", lambda path: open("/dev/full", "wb"))
    assert "No space left on device" in refused(capsys, *FLAGS, "--steps", 1, "--output-dir", tmp_path)


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def same_end(one, other):
    ends = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (one, other)]
    for name, value in ends[0]["model"].items():
        assert torch.equal(value, ends[1]["model"][name]), name
    states = [end["optimizer"]["state"] for end in ends]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][index][key]))
    assert ends[0]["position"] == ends[1]["position"]
    figures = [[(r["epoch"], r["step"], r["loss"], r["metrics"]) for r in end["history"]] for end in ends]
    assert figures[0] == figures[1]


def same_weights(one, other, rtol, atol):
    models = [torch.load(folder / "checkpoint.pt", weights_only=True)["model"] for folder in (one, other)]
    torch.testing.assert_close(dict(models[0]), dict(models[1]), rtol=rtol, atol=atol)


@pytest.mark.parametrize("grad_mode", ["fused", "sparse", "dense", "auto"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_resume_continues_bit_for_bit(grad_mode, optimizer, tmp_path, capsys):
    flags = [*FLAGS[:-2], "--grad-mode", grad_mode, "--optimizer", optimizer, "--seed", "7"]
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert command.main([*flags, "--epochs", "3", "--output-dir", str(straight)]) == 0
    assert command.main([*flags, "--epochs", "1", "--output-dir", str(cut)]) == 0
    assert command.main(["--resume", str(cut / "checkpoint.pt"), "--epochs", "3"]) == 0
    same_end(straight, cut)


@pytest.mark.parametrize("source", ["generated", "prebatched", "criteo"])
def test_resume_within_an_epoch_continues_bit_for_bit(source, tmp_path, capsys):
    if source == "criteo":
        write_criteo_rows(tmp_path / "train.txt", 400)
        where = ["--criteo", str(tmp_path / "train.txt")]
        flags = ["--rows", "50", "--batch-size", "50", "--embedding-dim", "4", "--mlp", "8", "--lr", "0.05", *where]
    else:
        where = ["--prebatched", str(tmp_path / "train.arrow")] if source == "prebatched" else []
        flags = [*FLAGS, *where]
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    flags += ["--evaluate-every", "2"]
    assert command.main([*flags, "--epochs", "2", "--output-dir", str(straight)]) == 0
    assert command.main([*flags, "--steps", "2", "--output-dir", str(cut)]) == 0
    resumed = ["--resume", str(cut / "checkpoint.pt"), "--evaluate-every", "2", "--epochs", "2", *where]
    assert command.main(resumed) == 0
    same_end(straight, cut)


def test_resume_within_an_epoch_of_rows_that_wait_needs_the_same_evaluations(tmp_path, capsys):
    # Most of 3,000 rows are not in a batch: Adam flushes them later, and for a checkpoint.
    flags = "--rows 3000 --samples 640 --held-out 64 --batch-size 64 --embedding-dim 4 --mlp 8 --optimizer adam".split()
    flags += ["--grad-mode", "fused", "--lr", "0.05"]
    straight, cut, other = (tmp_path / name for name in ("straight", "cut", "other"))
    assert command.main([*flags, "--epochs", "1", "--evaluate-every", "3", "--output-dir", str(straight)]) == 0
    assert command.main([*flags, "--steps", "3", "--evaluate-every", "3", "--output-dir", str(cut)]) == 0
    assert command.main(["--resume", str(cut / "checkpoint.pt"), "--evaluate-every", "3", "--epochs", "1"]) == 0
    same_end(straight, cut)
    assert command.main([*flags, "--epochs", "1", "--evaluate-every", "5", "--output-dir", str(other)]) == 0
    same_weights(straight, other, rtol=0, atol=2e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "ftrl"])
def test_other_evaluations_keep_the_bits_where_no_rows_wait(optimizer, tmp_path, capsys):
    flags = "--rows 3000 --samples 640 --held-out 64 --batch-size 64 --embedding-dim 4 --mlp 8 --epochs 1".split()
    flags += ["--optimizer", optimizer]
    one, other = tmp_path / "one", tmp_path / "other"
    assert command.main([*flags, "--evaluate-every", "3", "--output-dir", str(one)]) == 0
    assert command.main([*flags, "--output-dir", str(other)]) == 0
    same_weights(one, other, rtol=0, atol=0)


def test_resume_refuses_other_settings_data_and_nothing_to_do(tmp_path, capsys):
    saved = tmp_path / "checkpoint.pt"
    assert run("--epochs", 1, "--output-dir", tmp_path) == 0
    capsys.readouterr()
    assert f"--embedding-dim is 5, but {saved} was trained with 4" in refused(
        capsys, "--resume", saved, "--embedding-dim", 5
    )
    assert "--rows is 201, but" in refused(capsys, "--resume", saved, "--rows", 201)
    assert "has 1 epochs already: --epochs must be larger, got 1" in refused(capsys, "--resume", saved, "--epochs", 1)
    assert "has 4 steps already: --steps must be larger, got 2" in refused(capsys, "--resume", saved, "--steps", 2)
    write_criteo_rows(tmp_path / "train.txt", 20)
    text = refused(capsys, "--resume", saved, "--criteo", tmp_path / "train.txt")
    assert "trained on other data, 4 batches of Generator" in text
    saved.write_bytes(saved.read_bytes()[:-1000])
    assert "truncated" in refused(capsys, "--resume", saved)


def test_a_checkpoint_of_another_device_is_refused(tmp_path):
    settings = train.Settings(rows=20, samples=64, held_out=64, batch_size=32, embedding_dim=2, mlp=(4,))
    trainer = train.Trainer(settings, sources.make_source(settings), command.make_columns(settings, None))
    trainer.save(tmp_path / "checkpoint.pt")
    _, checkpoint = train.read_checkpoint(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="was trained on cuda, got device cpu"):
        trainer.load({**checkpoint, "device": "cuda"})


# ---- Prebatched ------------------------------------------------------------------------------------------------------


def test_prebatched_trains_the_same_bits_and_is_written_once(tmp_path, capsys):
    path = tmp_path / "train.arrow"
    one, other, third = (tmp_path / name for name in ("one", "other", "third"))
    assert run("--epochs", 2, "--output-dir", one) == 0
    assert run("--epochs", 2, "--output-dir", other, "--prebatched", path) == 0
    written = path.stat().st_mtime_ns
    assert run("--epochs", 2, "--output-dir", third, "--prebatched", path) == 0
    assert path.stat().st_mtime_ns == written
    same_end(one, other)
    same_end(one, third)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["one", "other", "third", "train.arrow"]


def test_prebatched_files_of_other_examples_are_refused(tmp_path, capsys):
    path = tmp_path / "train.arrow"
    assert run("--steps", 1, "--no-checkpoint", "--output-dir", tmp_path, "--prebatched", path) == 0
    capsys.readouterr()
    for flags in (["--seed", 1], ["--samples", 2000], ["--batch-size", 100], ["--distribution", "zipf"], ["--rows", 9]):
        flags = [str(flag) for flag in (*FLAGS, "--prebatched", path, "--output-dir", tmp_path, *flags)]
        assert "batches of other examples than" in refused(capsys, *flags)
    # Hashed columns read the same raw ids.
    assert (
        run("--columns", "hashed", "--steps", 1, "--no-checkpoint", "--output-dir", tmp_path, "--prebatched", path) == 0
    )
    path.write_bytes(path.read_bytes()[:-7])
    assert str(path) in refused(capsys, *FLAGS, "--prebatched", path, "--output-dir", tmp_path)


# ---- Criteo ----------------------------------------------------------------------------------------------------------


def write_criteo_rows(path, rows):
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


def losses_of(printed):
    return [float(x) for x in re.findall(r"  loss (\d\.\d{4})  held", printed)]


def test_criteo_rows_are_held_out_one_in_ten(tmp_path):
    write_criteo_rows(tmp_path / "train.txt", 437)
    source = sources.CriteoSource(tmp_path / "train.txt", 50, held_out=30)
    lines = (tmp_path / "train.txt").read_text().split("\n")
    wanted = [line for row, line in enumerate(lines) if row % 10 != 9]

    def labels(batches):
        return [int(x) for batch in batches for x in batch.labels]

    for _ in range(2):
        batches = list(source.batches())
        assert labels(batches) == [int(line[0]) for line in wanted]
        assert all(batch.size in (50, 51) for batch in batches[:-1]) and source.epoch_length() == len(batches)
    first = [str(x) if x is not None else "" for x in batches[0].columns.column("C1").to_pylist()]
    assert first[:3] == [line.split("\t")[14] for line in wanted[:3]]
    assert labels(source.held_out()) == [int(line[0]) for line in lines[9::10][:30]]
    assert labels(source.batches(3)) == labels(batches[3:])


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_criteo_trains(name, tmp_path, capsys):
    write_criteo_rows(tmp_path / name, 1500)
    flags = ["--criteo", tmp_path / name, "--rows", "100", "--batch-size", "100", "--embedding-dim", "4", "--mlp", "16"]
    flags += ["--lr", "0.05", "--epochs", "4", "--output-dir", tmp_path / "runs"]
    assert command.main([str(flag) for flag in flags]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"data: {name} of ") and "26 tables" in printed
    losses = losses_of(printed)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert float(re.findall(r"AUC (\d\.\d{4})", printed)[-1]) > 0.8


@pytest.mark.skipif(not SAMPLE.is_file(), reason="$TORCHSPARSE_REC_DATA has no criteo-sample/train.txt")
def test_criteo_sample_trains_end_to_end(tmp_path, capsys):
    flags = ["--criteo", SAMPLE, "--rows", "1000", "--batch-size", "100", "--lr", "0.02", "--epochs", "5"]
    assert command.main([str(flag) for flag in (*flags, "--output-dir", tmp_path)]) == 0
    losses = losses_of(capsys.readouterr().out)
    assert len(losses) == 5 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.03
