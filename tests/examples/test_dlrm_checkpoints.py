"""Checkpoints of ``python -m torchsparse_rec.examples.dlrm``: whatever ended a run, it resumes to the same bits."""

import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from examples.test_dlrm import write_text
from examples.test_dlrm_command import (
    GENERATED,
    NETWORK,
    curves,  # noqa: F401  (a fixture of every test)
    flags_of,
    refused,
    rows_of_statistics,
    run,
)

from torchsparse_rec.data.convert import convert
from torchsparse_rec.examples import _training
from torchsparse_rec.examples.dlrm import __main__ as command
from torchsparse_rec.examples.dlrm import checkpoints
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.nn.variable.checkpoint import CheckpointStore

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(Exception):
    """Stands for the death of the process."""


# ---- Going on --------------------------------------------------------------------------------------------------------


def end_of(folder):
    """Return everything that a checkpoint decides, by name; losses and metrics of each record are included."""
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


# Dynamic tables are tested with one source alone: examples come the same way whatever the tables are.
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
    # The interrupted run has more records: one at the end of each part.
    ends = [end_of(folder) for folder in (straight, cut)]
    metrics = [{step: metrics for _, step, _, metrics in end.pop("history")} for end in ends]
    assert metrics[0] == {step: metrics[1][step] for step in metrics[0]}
    for name, value in ends[0].items():
        other = ends[1][name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_a_checkpoint_between_records_keeps_their_losses(tmp_path, monkeypatch):
    """End after step 3, amid the interval of steps 1 to 5: the record after step 5 has the losses of all five."""
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
    # Flags that are not given keep their values.
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
        while not (path.exists() and path.stat().st_mtime_ns > before) and process.poll() is None:
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
    """Send SIGKILL at random moments, many of them while a checkpoint is written."""
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

SAVING = [*flags_of("dynamic"), "--save-every", "4", "--delta-every", "2"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return the folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "plot_curves", lambda *_: None)
        assert run(*SAVING, "--checkpoint", folder) == 0
    return folder


def dying(monkeypatch, owner, name, call):
    """Make a function raise in the call of this number, and in all later ones."""
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
    # Files from before the last full checkpoint are gone.
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["000000008"]


def test_deltas_are_of_what_has_changed(tmp_path):
    flags = [*flags_of("dynamic"), "--max-cardinality", 5000, "--save-every", 100, "--delta-every", 1]
    assert run(*flags, "--checkpoint", tmp_path) == 0
    # The first version is full; the last step writes a delta.
    folder = tmp_path / "tables" / "000000001" / "C3"
    kinds = [info.kind for info in CheckpointStore(folder).versions()]
    assert kinds == ["full", *["delta"] * 7]
    for version in (1, 8):
        *_, (_, _, rows) = CheckpointStore(folder).open(version)
        assert 0 < len(rows["keys"]) <= 2 * 128


@pytest.mark.parametrize("tiers", ["DRAM_SSD"])
def test_tiers_train_the_same_bits(tiers, tmp_path, capsys):
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
