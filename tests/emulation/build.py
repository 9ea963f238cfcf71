"""Compiles csrc/cuda/*.cu with the host's compiler into ``_C_emulated.so``, again whenever a source has changed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_NAMESPACE = "torchsparse_rec"

# Strict aliasing is off as in nvcc; contraction too, so that a result does not depend on the host's instructions.
_FLAGS = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-DTSR_EMULATED",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
]
# As in setup.py.
_SANITIZE = [
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,vptr",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
]
# g++ puts calls to functions of races.cpp before accesses; its own library is not linked.
_RACES = [
    "-g1",
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "--param=tsan-distinguish-volatile=1",
    "-Wno-tsan",
]


def sanitized() -> bool:
    """
    Say whether the kernels run under AddressSanitizer and UBSan (``TORCHSPARSE_REC_EMULATED_SANITIZE=1``).

    Python must then have been started with both sanitizers' runtimes and the C++ runtime preloaded.
    """
    return os.environ.get("TORCHSPARSE_REC_EMULATED_SANITIZE") == "1"


def racing() -> bool:
    """Say whether races between a kernel's threads are refused, see races.h (``TORCHSPARSE_REC_EMULATED_RACES=1``)."""
    return os.environ.get("TORCHSPARSE_REC_EMULATED_RACES") == "1"


def _sources() -> list[Path]:
    """Return the emulation's sources before the kernels': of a template that both instantiate, the first is linked."""
    return [
        *sorted(_HERE.glob("*.cpp")),
        _ROOT / "csrc/library.cpp",
        *sorted((_ROOT / "csrc/cuda").glob("*.cu")),
        *sorted(_HERE.glob("*.cu")),
    ]


def _is_touched(source: Path) -> bool:
    """Say whether a sanitizer looks at a source: of csrc's kernels at those in TORCHSPARSE_REC_ONLY, if it is set."""
    only = os.environ.get("TORCHSPARSE_REC_ONLY")
    return only is None or source.parent.name != "cuda" or str(source.relative_to(_ROOT)) in only.split()


def _folder(sanitized: bool, racing: bool) -> Path:
    key = hashlib.sha256(f"{torch.__version__} {sanitized} {racing}".encode()).hexdigest()[:8]
    return _ROOT / ".cache/emulated" / key


def _ninja_file() -> str:
    """Return a build file with one rule per source; the compiler's dependency files tell ninja about headers."""
    torch_folder = Path(torch.__file__).parent
    includes = [f"-I{_HERE}", f"-I{_HERE / 'cccl'}", f"-I{_ROOT / 'csrc'}", f"-isystem {torch_folder / 'include'}"]
    flags = [*_FLAGS, *(_SANITIZE if sanitized() else ["-g0"]), *includes]
    link_flags = _SANITIZE if sanitized() else [] if racing() else ["-s"]
    libraries = f"-L{torch_folder / 'lib'} -Wl,-rpath,{torch_folder / 'lib'} -ltorch_cpu -lc10"
    lines = [
        f"flags = {' '.join(flags)}",
        "rule compile",
        f"  command = {os.environ.get('CXX', 'g++')} $flags $more -MMD -MF $out.d -x c++ -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {os.environ.get('CXX', 'g++')} -shared {' '.join(link_flags)} $in {libraries} -o $out",
    ]
    objects, ordinary = [], []
    for source in _sources():
        name = f"{source.parent.name}.{source.name}.o"
        if (sanitized() or racing()) and not _is_touched(source):
            ordinary.append(str(_folder(sanitized=False, racing=False) / name))
            continue
        objects.append(name)
        lines += [f"build {name}: compile {source}"]
        if source.name == "library.cpp":
            # The same schemas in a namespace of their own.
            lines += [f"  more = -D{_NAMESPACE}={_NAMESPACE}_emulated"]
        elif racing() and source.suffix == ".cu":
            lines += [f"  more = {' '.join(_RACES)}"]
    return "\n".join([*lines, f"build _C_emulated.so: link {' '.join(objects + ordinary)}", ""])


def build() -> Path:
    """
    Build what is out of date. Return the library's path, under ``.cache`` in the repository's root.

    With a sanitizer and TORCHSPARSE_REC_ONLY, other kernels are taken from the ordinary build, which must be there.
    """
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if ninja is None:
        raise RuntimeError("ninja is needed to compile the emulated CUDA kernels: pip install ninja")
    folder = _folder(sanitized(), racing())
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # the tests may run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_in(folder, ninja)


def _build_in(folder: Path, ninja: str) -> Path:
    text = _ninja_file()
    if not (folder / "build.ninja").exists() or (folder / "build.ninja").read_text() != text:
        (folder / "build.ninja").write_text(text)
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
    # Without make's flags: they name a job server that only make may use.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    result = subprocess.run([ninja, "-C", folder, "-j", jobs], env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"compiling the emulated CUDA kernels failed:\n{result.stdout}{result.stderr}")
    if "warning:" in result.stdout:
        raise RuntimeError(f"the emulated CUDA kernels compile with warnings:\n{result.stdout}")
    return folder / "_C_emulated.so"
