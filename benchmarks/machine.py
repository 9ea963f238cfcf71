"""The machine and the versions with which figures are taken. Importing this module needs no torch."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def machine(device: str, threads: int) -> dict[str, str]:
    """Return the processor or GPU, and every version that matters."""
    import torch

    import torchsparse_rec

    versions = {}
    for package in ("tensorflow", "keras", "fbgemm-gpu-cpu", "torchrec", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    config = torchsparse_rec.config()
    return {
        "processor": config["processor"],
        "cores": config["cores"],
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "threads": str(threads),
        "device": "cpu",
        **(gpu() if device == "cuda" else {}),
        "instruction set": config["instruction set"],
        "python": platform.python_version(),
        "torchsparse_rec": config["torchsparse_rec"],
        "torch": torch.__version__,
        **versions,
        "commit": commit(),
        "date": now(),
    }


def gpu() -> dict[str, str]:
    """Return the GPU, its driver, and the CUDA version with which torch was built."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory / 1e9:.0f} GB",
        "driver": _driver(),
        "torch CUDA": torch.version.cuda or "none",
    }


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
        return printed.splitlines()[0].strip()
    except (OSError, IndexError, subprocess.SubprocessError):
        return "unknown"


def memory(name: str) -> int:
    """Return the bytes of a line of /proc/self/status: ``VmRSS``, what is mapped now, or ``VmHWM``, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def begin_peak_anew() -> None:
    """Set the peak of this process's memory to what is mapped now."""
    Path("/proc/self/clear_refs").write_text("5")


def now() -> str:
    """Return the time, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def commit() -> str:
    """Return the commit of this tree, and say whether files were changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
