"""The compiled libraries, loaded when this module is imported: the only import with a side effect."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
import os
import platform
import re
import warnings
from pathlib import Path

import torch

from ._torch import has_cuda_context
from ._version import __version__

_FOLDER = Path(__file__).resolve().parent
_CPU_LEVELS = ("baseline", "avx2", "avx512")


def _toolkit_of(library: Path) -> int | None:
    """Return the CUDA toolkit that a library was built with, as 1000 * major + 10 * minor; None if it is unknown."""
    # The text is among the first tenth of tens of megabytes: the rest is the GPUs' code, and is not read.
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = re.search(rb"torchsparse_rec CUDA toolkit (\d+)", content)
        return int(found[1]) if found else None


def _driver() -> int:
    """Return the newest CUDA that this machine's driver supports, as 1000 * major + 10 * minor; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def _too_old(driver: int, toolkit: int | None) -> str | None:
    """Say why a driver cannot run a toolkit's code; None if it can: within a major version every driver can."""
    if driver == 0 or toolkit is None or driver // 1000 >= toolkit // 1000:
        return None
    return (
        f"it was built with CUDA {toolkit // 1000}.{toolkit % 1000 // 10}, and this machine's driver knows CUDA"
        f" {driver // 1000}.{driver % 1000 // 10} at most: install a newer driver, or build with CUDA {driver // 1000}"
    )


def _cuda_library() -> tuple[Path, str]:
    """Return ``_C_cuda.so`` and its version: the one built beside ``_C.so``, or the package torchsparse_rec_cuda's."""
    library = _FOLDER / "_C_cuda.so"
    if library.exists() or importlib.util.find_spec("torchsparse_rec_cuda") is None:
        return library, __version__
    package = importlib.import_module("torchsparse_rec_cuda")
    return Path(package.__path__[0], library.name), package.__version__


def _load_cuda(library: Path, version: str = __version__) -> str:
    """Load ``_C_cuda.so`` if it is of this version and the machine can run it; return in words what became of it."""
    if not library.exists():
        return "not built"
    if torch.version.cuda is None:
        return "built, not loaded: this torch has no CUDA"
    problem = _too_old(_driver(), _toolkit_of(library))
    if version != __version__:
        # Its kernels would be called with the arguments of other operators.
        problem = f"it is of version {version}, not {__version__}: pip install torchsparse_rec_cuda=={__version__}"
    if problem is None:
        try:
            torch.ops.load_library(str(library))
            return "loaded"
        except OSError as error:
            problem = str(error)
    warnings.warn(f"torchsparse_rec runs on CPU only: {library} could not be loaded: {problem}", stacklevel=3)
    return f"built, not loaded: {problem}"


def _load() -> str:
    """Load ``_C.so``, and ``_C_cuda.so`` where torch has CUDA; return in words what became of the latter."""
    # A test may name another build of it (`make sanitize`).
    library = Path(os.environ.get("TORCHSPARSE_REC_LIBRARY", _FOLDER / "_C.so"))
    if not library.exists():
        raise ImportError(
            f"torchsparse_rec is not built: {library} is missing. Build it with `pip install -e .` in the source folder"
        )
    torch.ops.load_library(str(library))
    return _load_cuda(*_cuda_library())


_CUDA_LIBRARY = _load()


def cpu_level() -> str:
    """Return the CPU's instruction set: ``baseline``, ``avx2`` or ``avx512``; ``TORCHSPARSE_REC_CPU`` lowers it."""
    return _CPU_LEVELS[torch.ops.torchsparse_rec.cpu_level.default()]


def check_errors(device: torch.device | str | None = None) -> None:
    """
    Wait for CUDA devices, and raise the first bad id that their kernels have recorded.

    CPU operators raise at once, so there this does nothing. CUDA kernels skip a bad id and record it; later operator
    calls raise it without waiting. Call this after replaying a CUDA graph, or before trusting a result.

    Args:
        device: the device to ask; default: every CUDA device that this process has used.

    Raises:
        IndexError: naming the operator, the position, the value and its bound.
    """
    if device is not None:
        devices = [torch.device(device)]
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        # The others have no context, and to ask them would make one, on every GPU of the machine.
        used = filter(has_cuda_context, range(torch.cuda.device_count()))
        devices = [torch.device("cuda", index) for index in used]
    else:
        devices = []
    for each in devices:
        if each.type == "cuda":
            torch.cuda.synchronize(each)
        torch.ops.torchsparse_rec.check_errors.default(torch.empty(0, device=each))


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def config() -> dict[str, str]:
    """Return what :func:`show_config` prints, as a dictionary. Naming GPUs initialises CUDA: call it after any fork."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torchsparse_rec": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "instruction set": cpu_level(),
        "threads": str(torch.get_num_threads()),
        "CUDA library": _CUDA_LIBRARY,
        "torch CUDA": torch.version.cuda or "none",
        "GPUs": ", ".join(gpus) or "none",
    }


def show_config() -> None:
    """
    Print the versions, the processor, its instruction set, threads and CUDA's state, one per line.

    ``python -m torchsparse_rec`` prints them too, and lists the extras that are installed and the commands.
    """
    for name, value in config().items():
        print(f"{name}: {value}")
