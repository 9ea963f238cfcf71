"""Jobs of torchrun train the examples: they end as one process does, and go on where ranks were killed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchsparse_rec.checkpoint import CheckpointStore

# Here nothing of them is imported: every process that collects tests would wait for it.
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torchmetrics", "safetensors")),
    reason="torchmetrics or safetensors is not installed",
)

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LOCAL = [*TORCHRUN, "--standalone", "--nproc-per-node"]
SIZES = "--held-out 250 --batch-size 127 --embedding-dim 4"
HASHED = "--tables hashed --buckets 60"
DLRM = f"-m torchsparse_rec.examples.dlrm {SIZES} --max-cardinality 100 --bottom 8 --top 16"
EXAMPLES = {
    "hashed": f"{DLRM} {HASHED} --samples 3810 --evaluate-every 10 --save-every 10 --checkpoint",
    # The first part ends with a delta.
    "dynamic": f"{DLRM} --filter 2 --evict 9 --samples 3810 --evaluate-every 10 --save-every 20 --delta-every 5 "
    "--checkpoint",
    "ncf": "-m torchsparse_rec.examples.ncf --dataset generated --factors 4 --layers 16,8 --batch-size 50000 "
    "--epochs 2 --output-dir",
    "wide_deep": f"-m torchsparse_rec.examples.wide_deep {SIZES} --samples 1000 --rows 200 --mlp 16,8 --lr 0.5 "
    "--epochs 2 --output-dir",
}


def run(command: Sequence[Any], seconds: float = 600) -> str:
    """Run a command to its end, and return what it prints."""
    done = subprocess.run(
        list(map(str, command)), env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def running(command: Sequence[Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Let a command run, whose output goes to a file; end it and its processes at the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(list(map(str, command)), env=ENVIRONMENT, cwd=ROOT, stdout=file, stderr=file)
        try:
            yield process
        finally:
            for pid in [*children(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started: the ranks of an agent."""
    with contextlib.suppress(FileNotFoundError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def wait_for_version(process: subprocess.Popen[bytes], folder: Path, number: int, log: Path) -> None:
    """Wait until a job has written a version of its checkpoint."""
    while not (folder / f"{number:06d}" / "manifest.json").exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)


def end_of(folder: Path) -> dict[str, Any]:
    """Return the digest of the last version: checksums of tables, dense layers and states, and the run's records."""
    chain = CheckpointStore(folder).open()
    found = chain.version.metadata["extra"]
    found["run"].pop("seconds")
    for record in found["run"]["history"]:
        record.pop("samples_per_second")
    return {"files": sorted((shard.file, shard.crc32c) for _, shard in chain.shards()), **found}


def figures_of(printed: str) -> list[list[float]]:
    """Return the loss and the metrics of each record."""
    lines = [line for line in printed.splitlines() if line.startswith("epoch ")]
    return [[float(figure) for figure in re.findall(r"\d\.\d{4}", line)] for line in lines]


def test_jobs_end_as_one_process_and_resume_to_their_own_bits(tmp_path: Path) -> None:
    jobs = []
    for example, flags in EXAMPLES.items():
        _, module, *arguments = flags.split()
        part = ["--steps", "10"] if module.endswith("dlrm") else ["--epochs", "1"]
        # The second run of the folder "cut" goes on where the first has ended.
        for name, folder, more in (
            *(("alone", "alone", []), ("straight", "straight", [])),
            *(("part", "cut", part), ("rest", "cut", [])),
        ):
            arguments_of = [*arguments, str(tmp_path / example / folder), *more]
            log = str(tmp_path / f"{example}-{name}")
            jobs.append({"module": module, "arguments": arguments_of, "alone": name == "alone", "log": log})
    listed = tmp_path / "jobs.json"
    listed.write_text(json.dumps(jobs))
    # One job of torchrun runs all commands, each in ranks of its own: only imports are shared.
    done = subprocess.run(
        [*LOCAL, "2", str(Path(__file__).with_name("jobs.py")), str(listed)],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    logs = {path.name: path.read_text() for path in sorted(tmp_path.iterdir()) if path.is_file() and path != listed}
    said = "\n".join(f"== {name}\n{text}" for name, text in logs.items())
    assert done.returncode == 0, done.stdout + done.stderr + said
    for example in EXAMPLES:
        together = logs[f"{example}-straight"] + logs[f"{example}-straight.1"]
        # Metrics are printed with four digits.
        for one, other in zip(figures_of(logs[f"{example}-alone"]), figures_of(together), strict=True):
            assert one == pytest.approx(other, abs=1.01e-4), example
        assert re.search("^2 ranks: a step takes", together, re.MULTILINE), example
        assert (tmp_path / example / "straight" / "curves.png").exists() and together.count("last ") == 1, example
        ends = [end_of(tmp_path / example / name / "checkpoint") for name in ("straight", "cut")]
        assert ends[0] == ends[1], example


LONG = f"{DLRM} {HASHED} --samples {127 * 200} --evaluate-every 50 --save-every 10 --checkpoint".split()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_job_one_of_whose_ranks_is_killed_ends_with_the_bits_of_one_that_was_not(ranks: int, tmp_path: Path) -> None:
    run([*LOCAL, ranks, *LONG, tmp_path / "straight"])
    log, cut = tmp_path / "log", tmp_path / "cut"
    with running([*LOCAL, ranks, "--max-restarts", 3, *LONG, cut], log) as process:
        wait_for_version(process, cut / "checkpoint", 3, log)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        assert process.wait(600) == 0, log.read_text()
    assert re.search("^going on from step [1-9]", log.read_text(), re.MULTILINE), log.read_text()
    assert end_of(tmp_path / "straight" / "checkpoint") == end_of(cut / "checkpoint")


@pytest.mark.full
def test_a_job_one_of_whose_two_nodes_is_killed_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """Two agents stand for two nodes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def agent(is_host: bool) -> list[Any]:
        configuration = f"is_host={int(is_host)},last_call_timeout=20,keep_alive_interval=1"
        return [
            *(*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 3, "--rdzv-id", "job"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", configuration),
            *(*LONG, tmp_path / "cut"),
        ]

    alone = figures_of(run([sys.executable, *LONG, tmp_path / "alone"]))
    first, second = tmp_path / "first", tmp_path / "second"
    with running(agent(True), first) as one, running(agent(False), second) as other:
        wait_for_version(one, tmp_path / "cut" / "checkpoint", 3, first)
        for pid in [other.pid, *children(other.pid)]:  # first the agent, which would report its rank's end
            os.kill(pid, signal.SIGKILL)
        assert one.wait(600) == 0, first.read_text()
    text = first.read_text() + second.read_text()
    assert "2 ranks: a step takes" in text and "1 ranks: a step takes" in text, text
    assert re.search("^going on from step [1-9]", first.read_text(), re.MULTILINE), text
    # Two ranks, and later one, have trained on the batches of one process.
    history = end_of(tmp_path / "cut" / "checkpoint")["run"]["history"]
    assert [record["step"] for record in history] == [50, 100, 150, 200]
    for record, (loss, auc, log_loss) in zip(history, alone, strict=True):
        found = [record["loss"], record["auc"], record["log_loss"]]
        assert found == pytest.approx([loss, auc, log_loss], abs=1e-3)
