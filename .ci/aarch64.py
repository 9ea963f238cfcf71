"""
Try the library on aarch64, from x86-64: a cross compiler builds it, and an emulator of the processor runs it.

usage: aarch64.py [ARGUMENT ...]    ARGUMENT: of pytest, in the place of TESTS

It needs Debian's qemu-user-static and g++-12-aarch64-linux-gnu, and fills 1.5 GB of build/aarch64 with Debian's Python,
torch, what the tests import, and the library. What is there is not made again.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "build/aarch64"
COMPILER = "aarch64-linux-gnu-g++-12"
EMULATOR = "qemu-aarch64-static"
# The oldest that the library supports, and the newest without CUDA: PyPI's builds for aarch64 from 2.11 on need it.
TORCH = "2.10.0"
# What the tests import, and torch itself: pip would ask this machine's processor what torch needs.
PACKAGES = {
    *("numpy", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing-extensions"),
    *("pytest", "iniconfig", "packaging", "pluggy", "pygments", "hypothesis", "sortedcontainers", "expecttest"),
    *("pyarrow", "safetensors"),
}
# Every operator beside its reference, in all layouts, its registrations, and what TensorFlow has answered.
FAMILIES = "bucketize candidates hash hash_cross hash_functions operators quantized record record_encoding".split()
FAMILIES += "record_examples route scores sums table table_rows top_k unique unique_rows".split()
TESTS = [
    *(f"tests/ops/test_{family}.py" for family in FAMILIES),
    "tests/compat/test_compat.py",
    "-m=(representative or daily) and not slow and not tensorflow or touched",
    # The last one wants the repository's root on Python's path, where this machine's library is.
    "-k=not emulat and not compile and not inductor and not top_level_package",
    "--touched=compat/test_compat.py",
]
USES = "import wheel_environments as uses; uses.use_operators(); uses.use_modules()"
# As distutils and torch's BuildExtension compile, beside what setup.py asks for.
FLAGS = "-DNDEBUG -fwrapv -Wall -fPIC -DPy_LIMITED_API=0x030A0000 -DTORCH_API_INCLUDE_EXTENSION_H".split()
NINJA = """\
rule compile
  command = {compiler} -MMD -MF $out.d {flags} -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = {compiler} -shared $in -o $out {libraries}
"""
# A Python that starts others by its own name. The emulator would grant any memory, and fill the machine's.
PYTHON = """\
#!/bin/sh
ulimit -v 16000000
exec {emulator} -L {root} -0 "$0" {root}/usr/bin/python3.11 "$@"
"""


def run(*command: str | Path, **environment: str) -> None:
    """Run a command in the root of the repository with additions to the environment."""
    subprocess.run([*map(str, command)], cwd=ROOT, env={**os.environ, **environment}, check=True)


def make_root(folder: Path) -> None:
    """Unpack Debian 12's Python, and all libraries that it and torch load, into a folder."""
    apt, key = HERE / "apt", "/usr/share/keyrings/debian-archive-keyring.gpg"
    for made in ("lists/partial", "archives/partial"):
        (apt / made).mkdir(parents=True, exist_ok=True)
    (apt / "status").write_text("")  # nothing is installed
    (apt / "sources.list").write_text(f"deb [signed-by={key}] http://deb.debian.org/debian bookworm main\n")
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State::Lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "-",
    }
    options = ["-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    run("apt-get", *options, "update")
    wanted = ("python3", "libstdc++6", "libgomp1", "zlib1g")
    run("apt-get", *options, "--yes", "--download-only", "--no-install-recommends", "install", *wanted)
    for package in apt.glob("archives/*.deb"):
        run("dpkg-deb", "--extract", package, folder)


def install_packages(folder: Path) -> None:
    """Install torch, and what else is needed at the versions of requirements/, into a folder."""
    lines = {line for file in ROOT.glob("requirements/*.txt") for line in file.read_text().splitlines()}
    pinned = [f"torch=={TORCH}", *sorted(line for line in lines if line.partition("==")[0] in PACKAGES)]
    platforms = [f"--platform={name}_aarch64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    options = ("-qq", "--no-deps", "--only-binary=:all:", "--python-version=3.11", *platforms, f"--target={folder}")
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, *pinned)


def build(library: Path, packages: Path) -> None:
    """Compile _C.so as setup.py describes it, against the other torch, and copy the Python files to it."""
    sys.argv[1:] = ["--version"]
    with contextlib.redirect_stdout(None):
        extension = runpy.run_path("setup.py")["cpu_extension"]()
    torch = packages / "torch"
    flags = [*FLAGS, f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", *extension.extra_compile_args]
    libraries = [f"-L{torch}/lib", "-lc10", "-ltorch", "-ltorch_cpu", *extension.extra_link_args]
    rules = NINJA.format(compiler=COMPILER, flags=" ".join(flags), libraries=" ".join(libraries))
    objects = {source: HERE / "objects" / Path(source).with_suffix(".o") for source in extension.sources}
    lines = [f"build {made}: compile {ROOT / source}" for source, made in objects.items()]
    linked = library / "torchsparse_rec/_C.so"
    lines.append(f"build {linked}: link {' '.join(map(str, objects.values()))}\n")
    (HERE / "build.ninja").write_text(rules + "\n".join(lines))
    run(sys.executable, "-m", "ninja", "--quiet", "-C", HERE, f"-j{os.environ.get('MAX_JOBS', os.cpu_count())}")
    for source, target in (("torchsparse_rec", "."), ("compat", "compat")):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / source, linked.parent / target, ignore=ignored, dirs_exist_ok=True)


def compare(python: Path, environment: dict[str, str]) -> None:
    """Compare the bits of every sample's results with those of this machine, where both have the same inputs."""
    answers = []
    for command, more in ((sys.executable, {}), (python, environment)):
        program = (str(command), "tests/ops/test_instruction_sets.py", "--other-machines")
        answers.append(json.loads(subprocess.check_output(program, env={**os.environ, **more})))
    here, there = answers
    both = sorted(here.keys() & there.keys())
    differ = [name for name in both if here[name] != there[name]]
    print(f"{len(both)} of {len(here)} samples have the same inputs as here; of these {len(differ)} give other bits")
    if differ or len(both) < 0.9 * len(here):
        sys.exit("\n".join(differ) or "too few have the same inputs")


def main() -> int:
    """Make what is not there yet, use the library, run the tests, and return the exit status."""
    arguments = sys.argv[1:] or TESTS
    os.chdir(ROOT)
    root, packages, library, python = (HERE / name for name in ("root", "packages", "library", "root/usr/bin/python"))
    if missing := [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]:
        print(f"no {' and no '.join(missing)} on the PATH: apt install qemu-user-static g++-12-aarch64-linux-gnu")
        return 2
    paths = ":".join(map(str, (library, packages, ROOT / ".ci")))
    environment = {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for folder, make in ((root, make_root), (packages, install_packages)):
            if not folder.exists():
                shutil.rmtree(unfinished := folder.with_suffix(".new"), ignore_errors=True)
                make(unfinished)
                unfinished.rename(folder)
        build(library, packages)
        python.write_text(PYTHON.format(emulator=EMULATOR, root=root))
        python.chmod(0o755)
        run(python, "-c", f"import torchsparse_rec; torchsparse_rec.show_config(); {USES}", **environment)
        if arguments == TESTS:
            compare(python, environment)
        run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, **environment)
    except subprocess.CalledProcessError as error:
        return error.returncode  # the command has said why
    return 0


if __name__ == "__main__":
    sys.exit(main())
