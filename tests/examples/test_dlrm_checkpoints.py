"""Checkpoints of ``python -m torchsparse_rec.examples.dlrm``: whatever ended a run, it resumes to the same bits."""

import random
import signal
import subprocess
import sys
import time

import pytest
from examples.cases import assert_same_end, end_of, history_of, run, said_in, write_criteo
from examples.test_dlrm_command import GENERATED, NETWORK, flags_of, rows_of_statistics

from torchsparse_rec import checkpoint
from torchsparse_rec.checkpoint import CheckpointStore
from torchsparse_rec.data.convert import convert
from torchsparse_rec.examples import _common
from torchsparse_rec.examples import dlrm as command

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Draw no curves, which takes longer than training here."""
    monkeypatch.setattr(_common, "draw", lambda *_: "no curves")


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
    assert f"going on from step 9 of {cut}/checkpoint" in capsys.readouterr().out
    assert end_of(straight) == end_of(cut)
    # The interrupted run has more records: one at the end of each part.
    ours = {record["step"]: record for record in history_of(cut)}
    for record in history_of(straight):
        assert (record["auc"], record["log_loss"]) == (ours[record["step"]]["auc"], ours[record["step"]]["log_loss"])


def test_a_checkpoint_between_records_keeps_their_losses(tmp_path, monkeypatch):
    """End after step 3, amid the interval of steps 1 to 5: the record after step 5 has the losses of all five."""
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    flags = [*flags_of("hashed"), "--evaluate-every", 5, "--save-every", 3]
    assert run(command, *flags, "--checkpoint", straight) == 0

    save = checkpoint.save

    def save_and_end(*arguments, **named):
        save(*arguments, **named)
        raise Killed

    monkeypatch.setattr(checkpoint, "save", save_and_end)
    with pytest.raises(Killed):
        run(command, *flags, "--checkpoint", cut)
    monkeypatch.setattr(checkpoint, "save", save)
    assert said_in(cut)["run"]["step"] == 3
    assert run(command, *flags, "--checkpoint", cut) == 0
    assert_same_end(straight, cut)


def kill_at_random(flags, folder, chosen):
    """Start the command, and kill it some time after it has written a checkpoint."""
    store = CheckpointStore(folder / "checkpoint")
    before = store.versions()
    process = subprocess.Popen(
        [sys.executable, "-m", "torchsparse_rec.examples.dlrm", *map(str, flags), "--threads", "1"],
        stdout=subprocess.DEVNULL,
    )
    try:
        while store.versions()[-1:] == before[-1:] and process.poll() is None:
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
    step = said_in(cut)["run"]["step"]
    assert killed > 0.7 * kills and 0 < step < steps
    assert run(command, *flags, "--checkpoint", cut) == 0
    assert_same_end(straight, cut)


# ---- Dynamic tables --------------------------------------------------------------------------------------------------


def test_deltas_are_of_what_has_changed(tmp_path, monkeypatch):
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *given, keep, **more: save(*given, **more))  # all versions stay
    flags = [*flags_of("dynamic"), "--max-cardinality", 5000, "--save-every", 4, "--delta-every", 1]
    assert run(command, *flags, "--checkpoint", tmp_path) == 0
    store = CheckpointStore(tmp_path / "checkpoint")
    assert [info.kind for info in store.versions()] == [
        "full",
        "delta",
        "delta",
        "full",
        "delta",
        "delta",
        "delta",
        "full",
    ]
    *_, of_c3 = [part for _, name, part in store.open(3) if name == "rows" and len(part["keys"])]
    assert 0 < len(of_c3["keys"]) <= 2 * 128


def test_tiers_train_the_same_bits(tmp_path, capsys):
    flags = [*flags_of("dynamic"), "--max-cardinality", 1000, "--evaluate-every", 2]
    placed = ["--tiers", "DRAM_SSD", "--dram-rows", 150]
    one, other = tmp_path / "one", tmp_path / "other"
    assert run(command, *flags, "--checkpoint", one) == 0
    assert run(command, *flags, *placed, "--checkpoint", other) == 0
    assert history_of(one) == history_of(other)  # rows of a tier are written in its own order
    # In the middle the rows move to other tiers, and back.
    moving = tmp_path / "moving"
    assert run(command, *flags, *placed, "--steps", 3, "--checkpoint", moving) == 0
    assert run(command, *flags, "--steps", 5, "--checkpoint", moving) == 0
    capsys.readouterr()
    assert run(command, *flags, *placed, "--ssd-path", tmp_path / "rows", "--checkpoint", moving) == 0
    found = rows_of_statistics(capsys.readouterr().out)
    assert found["C3"][0] > 2 * 150
    ours = {record["step"]: record["auc"] for record in history_of(moving)}
    assert all(ours[record["step"]] == record["auc"] for record in history_of(one))
