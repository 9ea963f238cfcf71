"""
Build the wheel into a folder (default: dist), and have auditwheel check that its name says what it needs.

torchsparse_rec has the CPU's kernels. It is named after PLATFORM: where a library in it asks for a symbol of a newer C
library, there is no wheel, but an error that says so. With TORCHSPARSE_REC_CUDA=1, and nvcc, there is a second one
beside it, torchsparse_rec_cuda, which holds ``_C_cuda.so`` alone, for the architectures of TORCH_CUDA_ARCH_LIST; it is
named after the platform that it turns out to need.
"""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from wheel.wheelfile import WheelFile

ROOT = Path(__file__).resolve().parent.parent
MACHINE = platform.machine()
PLATFORM = f"manylinux_2_28_{MACHINE}"
VERSION: str = runpy.run_path(str(ROOT / "torchsparse_rec/_version.py"))["__version__"]
# Of torch, which loads them before ours.
NOT_TAKEN_IN = ("libc10.so", "libtorch.so", "libtorch_cpu.so")

METADATA = f"""\
Metadata-Version: 2.4
Name: torchsparse_rec_cuda
Version: {VERSION}
Summary: The CUDA kernels of torchsparse_rec, which loads them
License-Expression: Apache-2.0
License-File: LICENSE
License-File: NOTICE
Requires-Python: >=3.10
Requires-Dist: torchsparse_rec=={VERSION}
"""
PACKAGE = f'''\
"""The CUDA kernels of torchsparse_rec, which loads them if they are of its version."""

__version__ = "{VERSION}"
'''


def run(*command: str | Path, **environment: str) -> None:
    """Run this Python with the given arguments and additions to the environment; what it installs is on the PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    variables = {**os.environ, "PATH": path, **environment}
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=variables, check=True)


def audited(wheel: Path, named: str, folder: Path) -> None:
    """Write a wheel into a folder, under the name of the platform that it is for."""
    left = [f"--exclude={library}" for library in NOT_TAKEN_IN]
    run("-m", "auditwheel", "repair", "--plat", named, "--only-plat", *left, "--wheel-dir", folder, wheel)


def build_cpu(folder: Path) -> None:
    """Build the wheel of torchsparse_rec. Objects that are up to date are linked, not compiled again."""
    with tempfile.TemporaryDirectory() as made:
        # Not build/lib, where files of an older state of the folder may lie.
        settings = Path(made, "setup.cfg")
        settings.write_text(f"[build]\nbuild_lib = {made}/lib\n")
        options = ("-q", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
        run(
            *("-m", "pip", "wheel", *options, "--wheel-dir", made, ROOT),
            TORCHSPARSE_REC_CUDA="0",
            DIST_EXTRA_CONFIG=str(settings),
        )
        (wheel,) = Path(made).glob("*.whl")
        audited(wheel, PLATFORM, folder)


def pack_cuda(library: Path, folder: Path) -> None:
    """Write the wheel of torchsparse_rec_cuda around a library."""
    with tempfile.TemporaryDirectory() as made:
        tag = f"py3-none-linux_{MACHINE}"
        path = Path(made, f"torchsparse_rec_cuda-{VERSION}-{tag}.whl")
        described = f"torchsparse_rec_cuda-{VERSION}.dist-info"
        with WheelFile(path, "w") as wheel:
            wheel.write(str(library), "torchsparse_rec_cuda/_C_cuda.so")
            wheel.writestr("torchsparse_rec_cuda/__init__.py", PACKAGE)
            for licence in ("LICENSE", "NOTICE"):
                wheel.write(str(ROOT / licence), f"{described}/licenses/{licence}")
            wheel.writestr(f"{described}/METADATA", METADATA)
            wheel.writestr(f"{described}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        audited(path, "auto", folder)


def build_cuda(folder: Path) -> None:
    """Build the wheel of torchsparse_rec_cuda."""
    with tempfile.TemporaryDirectory() as made:
        run("setup.py", "-q", "build_ext", "--build-lib", made, TORCHSPARSE_REC_CUDA="1")
        pack_cuda(Path(made, "torchsparse_rec/_C_cuda.so"), folder)


def main() -> int:
    """Build what the environment asks for, and print the wheels in the folder."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    try:
        build_cpu(folder)
        if os.environ.get("TORCHSPARSE_REC_CUDA") == "1":
            build_cuda(folder)
    except subprocess.CalledProcessError as error:
        return error.returncode  # the command has said why
    for wheel in sorted(folder.glob("*.whl")):
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
