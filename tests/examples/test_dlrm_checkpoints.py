"""Checkpoints of ``python -m torchsparse_rec.examples.dlrm``: whatever ended a run, it resumes to the same bits."""

import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from examples.cases import assert_same, assert_same_end, end_of, run, write_criteo
from examples.test_dlrm_command import GENERATED, NETWORK, flags_of, rows_of_statistics

from torchsparse_rec.checkpoint import CheckpointStore
from torchsparse_rec.data.convert import convert
from torchsparse_rec.examples import _command
from torchsparse_rec.examples._checkpoints import Checkpoint
from torchsparse_rec.examples.dlrm import __main__ as command
from torchsparse_rec.examples.dlrm import checkpoints
from torchsparse_rec.nn import EmbeddingVariable

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Draw no curves, which takes longer than training here."""
    monkeypatch.setattr(_command, "plot_curves", lambda *_: None)


class Killed(Exception):
    """Stands for the death of the process."""


# ---- Going on --------------------------------------------------------------------------------------------------------


# Dynamic tables are tested with one source alone: examples come the same way whatever the tables are.
@pytest.mark.parametrize(
    ("kind", "source"), [("dynamic", "generated"), *(("hashed", x) for x in ("generated", "text", "prebatched"))]
)
def test_going_on_gives_the_uninterrupted_runs_bits(kind, source, tmp_path, capsys):
    flags = flags_of(kind)
    if source != "generated":
        write_criteo(tmp_path / "train.txt", 1000)
        convert(tmp_path / "train.txt", tmp_path / "train.arrow", progress=False)
        name = "train.txt" if source == "text" else "train.arrow"
        flags = [*NETWORK, *flags[len(GENERATED) :], "--data", tmp_path / name]
    flags += ["--evaluate-every", 2, "--save-every", 3]
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert run(command, *flags, "--epochs", 3, "--checkpoint", straight) == 0
    for steps in (4, 5, 9):
        assert run(command, *flags, "--epochs", 3, "--steps", steps, "--checkpoint", cut) == 0
    capsys.readouterr()
    assert run(command, *flags, "--epochs", 3, "--checkpoint", cut) == 0
    assert f"going on from step 9 of {cut}/checkpoint.pt" in capsys.readouterr().out
    # The interrupted run has more records: one at the end of each part.
    ends = [end_of(folder) for folder in (straight, cut)]
    metrics = [{step: metrics for _, step, _, metrics in end.pop("history")} for end in ends]
    assert metrics[0] == {step: metrics[1][step] for step in metrics[0]}
    assert_same(*ends)


def test_a_checkpoint_between_records_keeps_their_losses(tmp_path, monkeypatch):
    """End after step 3, amid the interval of steps 1 to 5: the record after step 5 has the losses of all five."""
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    flags = [*flags_of("hashed"), "--evaluate-every", 5, "--save-every", 3]
    assert run(command, *flags, "--checkpoint", straight) == 0

    write = checkpoints.Checkpoints.write

    def write_and_end(self, *arguments):
        write(self, *arguments)
        raise Killed

    monkeypatch.setattr(checkpoints.Checkpoints, "write", write_and_end)
    with pytest.raises(Killed):
        run(command, *flags, "--checkpoint", cut)
    monkeypatch.undo()
    assert torch.load(cut / "checkpoint.pt", weights_only=True)["position"]["step"] == 3
    assert run(command, *flags, "--checkpoint", cut) == 0
    assert_same_end(straight, cut)


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
    assert run(command, *flags, "--checkpoint", straight) == 0
    chosen, killed = random.Random(0), 0
    for _ in range(kills):
        killed += kill_at_random([*flags, "--checkpoint", cut], cut, chosen) == -signal.SIGKILL
    step = torch.load(cut / "checkpoint.pt", weights_only=True)["position"]["step"]
    assert killed > 0.7 * kills and 0 < step < steps
    assert run(command, *flags, "--checkpoint", cut) == 0
    assert_same_end(straight, cut)


# ---- Dynamic tables --------------------------------------------------------------------------------------------------

SAVING = [*flags_of("dynamic"), "--save-every", "4", "--delta-every", "2"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return the folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_command, "plot_curves", lambda *_: None)
        assert run(command, *SAVING, "--checkpoint", folder) == 0
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
        (Checkpoint, "write", 2),  # all tables have their deltas, and nothing names them
        (Checkpoint, "write", 3),
        (checkpoints.Checkpoints, "_remove_other_chains", 3),
    ],
)
def test_a_checkpoint_is_of_one_step_wherever_its_writer_dies(straight, owner, name, call, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        dying(patched, owner, name, call)
        with pytest.raises(Killed):
            run(command, *SAVING, "--checkpoint", tmp_path)
    assert run(command, *SAVING, "--checkpoint", tmp_path) == 0
    assert_same_end(straight, tmp_path)
    # Files from before the last full checkpoint are gone.
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["000000008"]


def test_deltas_are_of_what_has_changed(tmp_path):
    flags = [*flags_of("dynamic"), "--max-cardinality", 5000, "--save-every", 100, "--delta-every", 1]
    assert run(command, *flags, "--checkpoint", tmp_path) == 0
    # The first version is full; the last step writes a delta.
    folder = tmp_path / "tables" / "000000001" / "C3"
    kinds = [info.kind for info in CheckpointStore(folder).versions()]
    assert kinds == ["full", *["delta"] * 7]
    for version in (1, 8):
        *_, (_, _, rows) = CheckpointStore(folder).open(version)
        assert 0 < len(rows["keys"]) <= 2 * 128


def test_tiers_train_the_same_bits(tmp_path, capsys):
    flags = [*flags_of("dynamic"), "--max-cardinality", 1000, "--evaluate-every", 2]
    placed = ["--tiers", "DRAM_SSD", "--dram-rows", 150]
    one, other = tmp_path / "one", tmp_path / "other"
    assert run(command, *flags, "--checkpoint", one) == 0
    assert run(command, *flags, *placed, "--checkpoint", other) == 0
    assert_same_end(one, other)
    # In the middle the rows move to other tiers, and back.
    moving = tmp_path / "moving"
    assert run(command, *flags, *placed, "--steps", 3, "--checkpoint", moving) == 0
    assert run(command, *flags, "--steps", 5, "--checkpoint", moving) == 0
    capsys.readouterr()
    assert run(command, *flags, *placed, "--ssd-path", tmp_path / "rows", "--checkpoint", moving) == 0
    found = rows_of_statistics(capsys.readouterr().out)
    assert found["C3"][0] > 2 * 150
    metrics = [{step: metrics for _, step, _, metrics in end_of(folder).pop("history")} for folder in (one, moving)]
    assert metrics[0].items() <= metrics[1].items()
