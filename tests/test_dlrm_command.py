"""The command ``python -m torchsparse_rec.examples.dlrm``: flags, output, checkpoints, going on after a kill."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_dlrm import KINDS, write_text

from torchsparse_rec.data.convert import convert
from torchsparse_rec.examples import _figures, _training
from torchsparse_rec.examples.dlrm import __main__ as command
from torchsparse_rec.examples.dlrm import checkpoints, tables
from torchsparse_rec.examples.dlrm.data import Generator
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.nn.variable.checkpoint import CheckpointStore

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")

NETWORK = "--embedding-dim 4 --bottom 8 --top 16 --batch-size 128 --held-out 256".split()
GENERATED = [*NETWORK, *"--samples 1024 --max-cardinality 100".split()]
HASHED = "--tables hashed --buckets 60".split()
SAMPLE = Path(os.environ.get("TORCHSPARSE_REC_DATA", "")) / "criteo-sample" / "train.txt"


@pytest.fixture(autouse=True)
def curves(monkeypatch):
    """The function that draws them. It does not but where it is asked for: it takes longer than the training here."""
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


# ---- Going on --------------------------------------------------------------------------------------------------------


def end_of(folder):
    """All that a checkpoint decides, by name; losses and metrics of each record among it."""
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    history = [(r["epoch"], r["step"], r["loss"], tuple(r["metrics"].values())) for r in content["history"]]
    found = {"history": history, "position": content["position"]}
    states = [("layers", content["layers"]), ("of_layers", content["of_layers"]["state"])]
    if "bags" in content["tables"]:
        states += [("bags", content["tables"]["bags"]), ("of_tables", content["tables"]["of_tables"]["state"])]
    else:
        states += [("tables", _tables(folder, **content["tables"]))]
    for name, state in states:
        found |= {f"{name} {key}": value for key, value in _leaves(state)}
    return found


def _tables(folder, chain, versions):
    """Of each table keys, rows, optimizer state, frequencies, steps and what a filter has counted, in order of keys."""
    found = {}
    for name, version in versions.items():
        content = {"rows": {}, "candidates": {}}
        for _, part, tensors in CheckpointStore(folder / "tables" / chain / name).open(version):
            columns = {key: x for key, x in tensors.items() if key != "keys"}
            for n, key in enumerate(tensors["keys"].tolist()):
                if part == "erased":
                    content["rows"].pop(key, None)
                else:
                    content[part][key] = {column: x[n] for column, x in columns.items()}
                    if part == "rows":
                        content["candidates"].pop(key, None)
        found[name] = content
    return found


def _leaves(state, name=""):
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves(value, f"{name}.{key}")
    else:
        yield name, state


def assert_same_end(one, other):
    one, other = end_of(one), end_of(other)
    assert one.keys() == other.keys() and len(one["history"]) > 0
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


# Examples come the same way whatever the tables are.
@pytest.mark.parametrize(
    ("kind", "source"), [("dynamic", "generated"), *(("hashed", x) for x in ("generated", "text", "prebatched"))]
)
def test_going_on_gives_the_uninterrupted_runs_bits(kind, source, tmp_path, capsys):
    flags = flags_of(kind)
    if source != "generated":
        write_text(tmp_path / "train.txt", 1000)
        convert(tmp_path / "train.txt", tmp_path / "train.arrow", progress=False)
        name = "train.txt" if source == "text" else "train.arrow"
        flags = [*NETWORK, *flags[len(GENERATED) :], "--data", tmp_path / name]
    flags += ["--evaluate-every", 2, "--save-every", 3]
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert run(*flags, "--epochs", 3, "--checkpoint", straight) == 0
    for steps in (4, 5, 9):
        assert run(*flags, "--epochs", 3, "--steps", steps, "--checkpoint", cut) == 0
    capsys.readouterr()
    assert run(*flags, "--epochs", 3, "--checkpoint", cut) == 0
    assert f"going on from step 9 of {cut}/checkpoint.pt" in capsys.readouterr().out
    # The ends of the parts are records that the run in one piece has not.
    ends = [end_of(folder) for folder in (straight, cut)]
    metrics = [{step: metrics for _, step, _, metrics in end.pop("history")} for end in ends]
    assert metrics[0] == {step: metrics[1][step] for step in metrics[0]}
    for name, value in ends[0].items():
        other = ends[1][name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_a_checkpoint_between_records_keeps_their_losses(tmp_path, monkeypatch):
    """Killed after step 3, within the interval of steps 1 to 5: the record after step 5 has the losses of all five."""
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    flags = [*flags_of("hashed"), "--evaluate-every", 5, "--save-every", 3]
    assert run(*flags, "--checkpoint", straight) == 0

    write = checkpoints.Checkpoints.write

    def write_and_end(self, *arguments):
        write(self, *arguments)
        raise Killed

    monkeypatch.setattr(checkpoints.Checkpoints, "write", write_and_end)
    with pytest.raises(Killed):
        run(*flags, "--checkpoint", cut)
    monkeypatch.undo()
    assert torch.load(cut / "checkpoint.pt", weights_only=True)["position"]["step"] == 3
    assert run(*flags, "--checkpoint", cut) == 0
    assert_same_end(straight, cut)


def test_it_refuses_to_go_on_with_other_settings_data_and_nothing_to_do(tmp_path, capsys):
    flags = [*flags_of("hashed"), "--checkpoint", tmp_path]
    assert run(*flags) == 0
    saved = tmp_path / "checkpoint.pt"
    # What is not given is as it was.
    assert run("--checkpoint", tmp_path, "--epochs", 2, "--steps", 9) == 0
    assert f"--embedding-dim is 5, but {saved} was trained with 4" in refused(capsys, *flags, "--embedding-dim", 5)
    assert f"--lr is 0.5, but {saved} was trained with 0.01" in refused(capsys, *flags, "--lr", 0.5)
    assert "has 1 epochs and 9 steps already: --epochs or --steps must be larger" in refused(capsys, *flags)
    write_text(tmp_path / "train.txt", 20)
    text = refused(capsys, "--checkpoint", tmp_path, "--epochs", 2, "--data", tmp_path / "train.txt")
    assert "was trained on other data, 8 batches of Generator" in text
    content = saved.read_bytes()
    saved.write_bytes(content[:-1000])
    assert "not a checkpoint of this program, or is truncated" in refused(capsys, *flags)
    torch.save({"format": "wide_deep 1"}, saved)
    assert refused(capsys, *flags).endswith(f"{saved} is not a checkpoint of this program")


def test_a_checkpoint_of_another_device_is_refused(tmp_path, capsys, monkeypatch):
    flags = [*flags_of("hashed"), "--checkpoint", tmp_path]
    assert run(*flags, "--steps", 1) == 0
    content = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    torch.save({**content, "device": "cuda"}, tmp_path / "checkpoint.pt")
    assert "was trained on cuda, got device cpu" in refused(capsys, *flags)


def kill_at_random(flags, folder, chosen):
    """Start the command, and kill it some time after it has written a checkpoint."""
    path = folder / "checkpoint.pt"
    before = path.stat().st_mtime_ns if path.exists() else 0
    process = subprocess.Popen(
        [sys.executable, "-m", "torchsparse_rec.examples.dlrm", *map(str, flags), "--threads", "1"],
        stdout=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 60
        while not (path.exists() and path.stat().st_mtime_ns > before) and process.poll() is None:
            assert time.monotonic() < end, "no checkpoint in a minute"
            time.sleep(0.002)
        time.sleep(chosen.random() * 0.1)
    finally:
        process.send_signal(signal.SIGKILL)
    return process.wait()


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("dynamic", 1),
        pytest.param("dynamic", 20, marks=pytest.mark.full),
        pytest.param("hashed", 20, marks=pytest.mark.full),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(kind, kills, tmp_path):
    """SIGKILL at random moments, many of them while a checkpoint is written."""
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    steps = 60 * kills
    flags = [*flags_of(kind), "--samples", 128 * steps, "--held-out", 128, "--evaluate-every", 7, "--save-every", 10]
    if kind == "dynamic":
        flags += ["--delta-every", 5, "--filter", 2, "--evict", 20, "--evict-every", 9]
    assert run(*flags, "--checkpoint", straight) == 0
    chosen, killed = random.Random(0), 0
    for _ in range(kills):
        killed += kill_at_random([*flags, "--checkpoint", cut], cut, chosen) == -signal.SIGKILL
    step = torch.load(cut / "checkpoint.pt", weights_only=True)["position"]["step"]
    assert killed > 0.7 * kills and 0 < step < steps
    assert run(*flags, "--checkpoint", cut) == 0
    assert_same_end(straight, cut)


# ---- Dynamic tables --------------------------------------------------------------------------------------------------


class Killed(Exception):
    """The process is gone."""


SAVING = [*flags_of("dynamic"), "--save-every", "4", "--delta-every", "2"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run in one piece."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "plot_curves", lambda *_: None)
        assert run(*SAVING, "--checkpoint", folder) == 0
    return folder


def dying(monkeypatch, owner, name, call):
    """Let a function raise in its so manieth call, and in all later ones."""
    calls, function = [], getattr(owner, name)

    def counted(*arguments, **named):
        calls.append(None)
        if len(calls) >= call:
            raise Killed
        return function(*arguments, **named)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (EmbeddingVariable, "save", 7),  # in the middle of the first checkpoint
        (EmbeddingVariable, "save_delta", 7),  # of the second one
        (EmbeddingVariable, "save", 26 + 7),  # of the next full one
        (_training, "write_checkpoint", 2),  # all tables have their deltas, and nothing names them
        (_training, "write_checkpoint", 3),
        (checkpoints.Checkpoints, "_remove_other_chains", 3),
    ],
)
def test_a_checkpoint_is_of_one_step_wherever_its_writer_dies(straight, owner, name, call, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        dying(patched, owner, name, call)
        with pytest.raises(Killed):
            run(*SAVING, "--checkpoint", tmp_path)
    assert run(*SAVING, "--checkpoint", tmp_path) == 0
    assert_same_end(straight, tmp_path)
    # Nothing is left of what came before the last full checkpoint.
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["000000008"]


def test_deltas_are_of_what_has_changed(tmp_path):
    flags = [*flags_of("dynamic"), "--max-cardinality", 5000, "--save-every", 100, "--delta-every", 1]
    assert run(*flags, "--checkpoint", tmp_path) == 0
    # The first is full; and the end is a step of deltas.
    folder = tmp_path / "tables" / "000000001" / "C3"
    kinds = [info.kind for info in CheckpointStore(folder).versions()]
    assert kinds == ["full", *["delta"] * 7]
    for version in (1, 8):
        *_, (_, _, rows) = CheckpointStore(folder).open(version)
        assert 0 < len(rows["keys"]) <= 2 * 128


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
            # Keys that had a row, then all that are too old, those that were only counted among them.
            gone = [key for key in last if step - last[key] > 2]
            evicted += sum(counts[key] >= 3 for key in gone)
            for key in gone:
                del counts[key], last[key]
        for key in batch:
            counts[key], last[key] = counts.get(key, 0) + 1, step
        filtered += sum(counts[key] < 3 for key in batch)
    assert found["C3"][:3] == [sum(count >= 3 for count in counts.values()), filtered, evicted]
    assert filtered > 0 and evicted > 0


@pytest.mark.parametrize("tiers", ["DRAM_SSD"])
def test_tiers_train_the_same_bits(tiers, tmp_path, capsys):
    pytest.importorskip("lmdb")
    flags = [*flags_of("dynamic"), "--max-cardinality", 1000, "--evaluate-every", 2]
    placed = ["--tiers", tiers, "--dram-rows", 150]
    one, other = tmp_path / "one", tmp_path / "other"
    assert run(*flags, "--checkpoint", one) == 0
    assert run(*flags, *placed, "--checkpoint", other) == 0
    assert_same_end(one, other)
    # In the middle the rows move to other tiers, and back.
    moving = tmp_path / "moving"
    assert run(*flags, *placed, "--steps", 3, "--checkpoint", moving) == 0
    assert run(*flags, "--steps", 5, "--checkpoint", moving) == 0
    capsys.readouterr()
    assert run(*flags, *placed, "--ssd-path", tmp_path / "rows", "--checkpoint", moving) == 0
    found = rows_of_statistics(capsys.readouterr().out)
    assert found["C3"][0] > 2 * 150
    metrics = [{step: metrics for _, step, _, metrics in end_of(folder).pop("history")} for folder in (one, moving)]
    assert metrics[0].items() <= metrics[1].items()


def test_rows_of_the_next_batch_are_read_ahead(tmp_path, monkeypatch):
    pytest.importorskip("lmdb")
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
