"""
The build of torchsparse_rec/_C.so (schemas and CPU kernels) and, for a torch with CUDA, torchsparse_rec/_C_cuda.so.

TORCHSPARSE_REC_CUDA=0|1|auto   whether to build the CUDA library. auto, the default: if nvcc is found and torch has
                                CUDA, since no other torch can load it. 1: whatever torch has; fail without nvcc
TORCH_CUDA_ARCH_LIST            the CUDA library's architectures, as for torch (default: this machine's GPUs; where
                                there are none, a release's that the toolkit knows, "8.0;9.0;10.0;12.0+PTX")
TORCHSPARSE_REC_SANITIZE=1      build only _C.so, under AddressSanitizer and UBSan, in build/sanitized/torchsparse_rec
TORCHSPARSE_REC_ONLY            sources, separated by spaces: nvcc, and a sanitizer, compile no others. CI names those
                                that a change reaches. A sanitized library takes the others from build/temp; the CUDA
                                library lacks them, so it belongs in a --build-lib of its own
CUDA_HOME                       the CUDA toolkit (default: that of nvcc on the PATH, then /usr/local/cuda)
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
    sys.exit(
        "error: torchsparse_rec runs on Linux: on x86-64, and built from source, tried in emulation, on aarch64; this"
        f" is {sys.platform} on {platform.machine()}"
    )

import setuptools

# Without build isolation nobody else looks.
if int(setuptools.__version__.partition(".")[0]) < 77:
    sys.exit(f"error: the build needs setuptools 77 or later, got {setuptools.__version__}: pip install -U setuptools")
try:
    import torch
except ImportError:
    sys.exit("error: the build needs torch 2.10 or later: install the one that torchsparse_rec is to run with")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    sys.exit(f"error: the build needs torch 2.10 or later, got {torch.__version__}")
from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.errors import PlatformError
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent
# Take the ninja beside this Python, of requirements/build.txt. The PATH may have none: torch then compiles one file
# after the other. Or it has another one, which does not know what this one has compiled.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
# A parallel make sets it: its job server is closed to all but make, and this ninja would look for it.
os.environ.pop("MAKEFLAGS", None)
# The oldest torch whose stable ABI is used: 2.10. See csrc/abi.h.
TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
COMMON_FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", TARGET]
SANITIZE = os.environ.get("TORCHSPARSE_REC_SANITIZE") == "1"
# Left out: what AddressSanitizer finds anyhow, or nothing here has. That saves an eighth of the time to compile.
NOT_SANITIZED = "-fno-sanitize=null,object-size,vptr"
SANITIZE_FLAGS = ["-O1", "-g1", "-fsanitize=address,undefined", NOT_SANITIZED, "-fno-sanitize-recover=undefined"]


def find_cuda_home() -> str | None:
    """Find the CUDA toolkit's folder. torch's own search answers None if torch has no CUDA, even where nvcc is."""
    nvcc = shutil.which("nvcc")
    places = [
        os.environ.get("CUDA_HOME"),
        cpp_extension.CUDA_HOME,
        "/usr/local/cuda",
        str(Path(nvcc).resolve().parent.parent) if nvcc else None,
    ]
    return next((p for p in places if p and Path(p, "bin/nvcc").exists() and Path(p, "lib64").is_dir()), None)


def present_architectures() -> list[str]:
    """Return the architectures of the GPUs that torch can use; none where it has no CUDA, or no driver."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = {torch.cuda.get_device_capability(k) for k in range(torch.cuda.device_count())}
    except Exception:  # a driver that is missing, too old or out of order: every torch has its own words for it
        return []
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def released_architectures(home: str) -> list[str]:
    """Return a release's architectures that the toolkit knows: CUDA 12.8 is the first that knows them all."""
    nvcc = [str(Path(home, "bin/nvcc")), "--list-gpu-arch"]
    known = subprocess.run(nvcc, capture_output=True, text=True, check=True).stdout.split()
    *others, newest = (a for a in ("8.0", "9.0", "10.0", "12.0") if f"compute_{a.replace('.', '')}" in known)
    return [*others, f"{newest}+PTX"]


def architectures(home: str) -> list[str]:
    """Return the architectures to compile _C_cuda.so for; who builds for other machines, as CI does, names them."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";").split(";")
    return [arch for arch in named if arch] or present_architectures() or released_architectures(home)


def arch_flags(home: str) -> list[str]:
    """Return the architectures' -gencode flags: explicit, because torch's own look at the GPU fails without one."""
    flags = []
    for arch in architectures(home):
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def sources(folder: str, suffix: str) -> list[str]:
    """List a folder's sources by paths relative to the root, as setuptools wants them, in a fixed order."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / folder).glob(f"*{suffix}"))


def touched(found: list[str]) -> list[str]:
    """Return the sources that TORCHSPARSE_REC_ONLY names, or all."""
    only = os.environ.get("TORCHSPARSE_REC_ONLY")
    return found if only is None else [source for source in found if source in only.split()]


def headers() -> list[str]:
    """List the headers, on which the objects depend beside their sources."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cuh"})


def cpu_extension() -> CppExtension:
    """
    Describe _C.so: the schemas and CPU kernels.

    -ffp-contract=off: the same bits at every instruction set (csrc/cpu/isa_foreach.h). -fno-math-errno and
    -fno-trapping-math: square roots and choices are vectorised; values are the same. -Wno-maybe-uninitialized: g++ 12
    warns of its own AVX-512 header.
    """
    everything = sources("csrc", ".cpp") + sources("csrc/cpu", ".cpp")
    compiled = touched(everything) if SANITIZE else everything
    return CppExtension(
        "torchsparse_rec._C",
        compiled,
        extra_objects=[f"build/temp/{Path(x).with_suffix('.o')}" for x in everything if x not in compiled],
        depends=headers(),
        py_limited_api=True,
        extra_compile_args=[
            *COMMON_FLAGS,
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-Wno-maybe-uninitialized",
            *(SANITIZE_FLAGS if SANITIZE else ["-g0"]),
        ],
        extra_link_args=SANITIZE_FLAGS if SANITIZE else ["-s"],
    )


# Headers in place of large ones of which little is needed, known to suffice for this torch.
LEAN_HEADERS = [str(ROOT / "csrc/cuda/lean")] if torch.__version__.startswith("2.13.") else []


def cuda_extension(home: str) -> CppExtension:
    """Describe _C_cuda.so: a CppExtension too, since CUDAExtension links libraries that a CPU-only torch lacks."""
    return CppExtension(
        "torchsparse_rec._C_cuda",
        touched(sources("csrc/cuda", ".cu") + sources("csrc/cuda", ".cpp")),
        depends=headers(),
        py_limited_api=True,
        include_dirs=[*LEAN_HEADERS, f"{home}/include"],
        library_dirs=[f"{home}/lib64"],
        libraries=["cudart_static", "dl", "rt", "pthread"],
        extra_compile_args={
            "cxx": [*COMMON_FLAGS, "-DUSE_CUDA", "-g0"],
            "nvcc": [
                "-O3",
                "-std=c++17",
                "-DUSE_CUDA",
                TARGET,
                "--expt-relaxed-constexpr",
                "-Xptxas=-warn-spills",
                "-Xfatbin=-compress-all",  # an eighth of the size: the driver unpacks what it loads
                *arch_flags(home),
            ],
        },
        # libtorch.so pulls in libtorch_cuda.so, where torch's CUDA shims live.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch", "-s"],
    )


def choose_cuda() -> tuple[str | None, str]:
    """Return the toolkit to build _C_cuda.so with, or None; and the message that says what was built, and why."""
    wish = "0" if SANITIZE else os.environ.get("TORCHSPARSE_REC_CUDA", "auto")
    if wish not in {"0", "1", "auto"}:
        raise ValueError(f"TORCHSPARSE_REC_CUDA must be 0, 1 or auto, got {wish!r}")
    if wish == "0":
        return None, "built _C.so; not _C_cuda.so: " + ("it is not sanitized" if SANITIZE else "TORCHSPARSE_REC_CUDA=0")
    home = find_cuda_home()
    if home is None:
        why = "no CUDA toolkit with bin/nvcc was found: set CUDA_HOME"
        if wish == "1":
            raise RuntimeError(f"TORCHSPARSE_REC_CUDA=1, but {why}")
        return None, f"built _C.so; not _C_cuda.so: {why}"
    if wish == "auto" and torch.version.cuda is None:
        return None, "built _C.so; not _C_cuda.so: this torch has no CUDA (TORCHSPARSE_REC_CUDA=1 builds it)"
    return home, f"built _C.so, and _C_cuda.so for {' '.join(architectures(home))} (TORCH_CUDA_ARCH_LIST names others)"


CUDA_HOME, SUMMARY = choose_cuda()


EXPECTED = "building _C.so: about 2 minutes on two cores" + (
    ", and _C_cuda.so: 6 to 7 more for one architecture, twice that for four" if CUDA_HOME else ""
)


def extensions() -> list[CppExtension]:
    """List the libraries to build: _C always, _C_cuda where a toolkit was chosen."""
    if CUDA_HOME is None:
        return [cpu_extension()]
    cpp_extension.CUDA_HOME = CUDA_HOME
    return [cpu_extension(), cuda_extension(CUDA_HOME)]


def packages() -> list[str]:
    """List torchsparse_rec and its subpackages, and those of the folder compat/ as torchsparse_rec.compat."""
    compat = [f"torchsparse_rec.compat.{name}" for name in find_packages("compat")]
    own = find_packages(include=["torchsparse_rec", "torchsparse_rec.*"], exclude=["torchsparse_rec.compat*"])
    return [*own, "torchsparse_rec.compat", *compat]


def require_compiler() -> None:
    """Raise an error of one line if there is no C++ compiler: setuptools tells it without a traceback."""
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        raise PlatformError(
            f"no C++ compiler: {command[0]} is not on the PATH. Install g++ 9 or later (Debian and Ubuntu: apt install"
            " g++), or set CXX"
        )


def is_short(source: str) -> bool:
    """Say whether a file compiles in a few seconds: files compiled once per instruction set take the longest."""
    return "isa_foreach.h" not in Path(source).read_text()


class BuildLibraries(BuildExtension.with_options(no_python_abi_suffix=True)):
    """A build with one folder of objects for pip, wheels and setup.py: unchanged files are not compiled again."""

    def finalize_options(self) -> None:
        """Set the usual options, but not the temporary folder that pip would choose; sanitized libraries stay apart."""
        super().finalize_options()
        # No header of Python's is used: none need be there, and another Python's build has the same objects.
        self.include_dirs = []
        self.build_temp = "build/sanitized/temp" if SANITIZE else "build/temp"
        if SANITIZE:
            self.build_lib, self.inplace = "build/sanitized", False

    def run(self) -> None:
        """Look for the compiler before anything else is done."""
        require_compiler()
        super().run()

    def build_extensions(self) -> None:
        """Compile .cu files again when a header has changed: torch's ninja file only sees to it if torch has CUDA."""
        newest = max(Path(header).stat().st_mtime for header in headers() if "csrc/cpu" not in header)
        for compiled in Path(self.build_temp, "csrc/cuda").glob("*.o"):
            if compiled.stat().st_mtime < newest:
                compiled.unlink()
        if not SANITIZE:
            # Not a log message, which -q would swallow.
            print(f"{EXPECTED}; what is compiled already is not compiled again", flush=True)
        super().build_extensions()
        print(SUMMARY)

    def swig_sources(self, sources: list[str], extension: CppExtension) -> list[str]:
        """Return the sources in the order to compile them: the slowest first, else all cores but one wait for them."""
        return sorted(sources, key=is_short)


class PortableWheel(bdist_wheel):
    """A wheel for every Python 3, py3-none: torch loads the libraries, which use no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the platform's tag, with those of Python and the ABI left open."""
        return "py3", "none", super().get_tag()[2]

    def run(self) -> None:
        """Look for the compiler first: else its error comes below the names of all files that were copied."""
        require_compiler()
        super().run()


setup(
    packages=packages(),
    package_dir={"torchsparse_rec.compat": "compat"},
    package_data={"torchsparse_rec": ["py.typed"], "torchsparse_rec.compat": ["*.md"]},
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PortableWheel},
    ext_modules=extensions(),
)
