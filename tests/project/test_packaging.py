"""The build and what it installs: settings, flags, the wheel, and the package imported from another folder."""

import contextlib
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from project.scripts import loaded

import torchsparse_rec

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "torchsparse_rec/_C.so"


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run this Python with the given arguments and additions to the environment."""
    # Threads of a second torch would only slow down this process.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=variables, capture_output=True, text=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let one process build at a time: builds share folders, and the tests run in several processes."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def installed_from_here() -> bool:
    """Say whether the package is this folder's editable install, as `make test` makes it."""
    found = run("-c", "import torchsparse_rec; print(torchsparse_rec.__file__)", cwd=Path("/"), PYTHONPATH="")
    return found.stdout.strip() == str(ROOT / "torchsparse_rec/__init__.py")


# ---- The package, from elsewhere ------------------------------------------------------------------------------------


def test_editable_install_from_another_folder(tmp_path):
    if not installed_from_here():
        pytest.skip("torchsparse_rec is not installed from this folder with `pip install -e .`")
    program = "import torchsparse_rec.compat.tensorflow as tf_names, torchsparse_rec; print(tf_names.__file__)"
    found = run("-c", program, cwd=tmp_path, PYTHONPATH="")
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).is_relative_to(ROOT / "compat")


def test_compat_is_no_package_of_its_own():
    with pytest.raises(ImportError):
        import compat  # noqa: F401

    from_root = run("-c", "import compat")
    assert from_root.returncode != 0
    assert "torchsparse_rec.compat" in from_root.stderr


def test_import_and_a_lookup_load_nothing_optional_and_no_compiler():
    """torch._dynamo and what it imports would take four times as long as all else that the import does."""
    optional = ["tensorflow", "keras", "pyarrow", "matplotlib", "tqdm", "safetensors"]
    compilers = ["torch._dynamo", "torch._inductor", "sympy"]
    program = (
        "import sys, torch; before = set(sys.modules); import torchsparse_rec; "
        "torchsparse_rec.nn.EmbeddingBag(9, 4).eval()(torch.tensor([[1, 2]])); "
        f"print({{*{compilers}}} & {{*sys.modules}} | {{*{optional}}} & ({{*sys.modules}} - before)); "
        "print('serving' in dir(torchsparse_rec), torchsparse_rec.serving.ServedModel.__name__)"
    )
    found = run("-c", program)
    assert found.stdout.splitlines() == ["set()", "True ServedModel"], found.stderr


def test_missing_library_says_how_to_build(tmp_path):
    copy = tmp_path / "torchsparse_rec"
    copy.mkdir()
    for name in ("__init__.py", "_library.py", "_torch.py", "_version.py"):
        (copy / name).write_text((ROOT / "torchsparse_rec" / name).read_text())
    (copy / "__init__.py").write_text("from . import _library\n")
    found = run("-c", "import torchsparse_rec", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "ImportError: torchsparse_rec is not built" in found.stderr
    assert "pip install -e ." in found.stderr


# ---- The build's settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["yes", ""])
def test_invalid_cuda_setting(value):
    found = run("setup.py", "--version", TORCHSPARSE_REC_CUDA=value)
    assert found.returncode != 0
    assert f"ValueError: TORCHSPARSE_REC_CUDA must be 0, 1 or auto, got {value!r}" in found.stderr


# setup.py on a machine where no file is called nvcc.
WITHOUT_NVCC = """
import pathlib, runpy, shutil, sys
shutil.which = lambda *arguments, **options: None
exists = pathlib.Path.exists
pathlib.Path.exists = lambda self, **options: self.name != "nvcc" and exists(self, **options)
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.parametrize("setting", ["0", "auto", "1"])
def test_without_nvcc(setting):
    found = run("-c", WITHOUT_NVCC, TORCHSPARSE_REC_CUDA=setting)
    if setting == "1":
        assert found.returncode != 0
        assert "TORCHSPARSE_REC_CUDA=1, but no CUDA toolkit with bin/nvcc was found: set CUDA_HOME" in found.stderr
    else:
        assert found.returncode == 0, found.stderr


OTHER_PACKAGES = """
import runpy, sys, types, setuptools
torch, setuptools.__version__ = sys.argv[1:]
sys.modules["torch"] = types.ModuleType("torch") if torch else None
if torch:
    sys.modules["torch"].__version__ = torch
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("torch_version", "setuptools_version", "why"),
    [
        ("", "77.0.3", "torch 2.10 or later: install the one that torchsparse_rec is to run with"),
        ("2.9.1+cu128", "77.0.3", "torch 2.10 or later, got 2.9.1+cu128"),
        ("2.10.0", "65.5.0", "setuptools 77 or later, got 65.5.0: pip install -U setuptools"),
    ],
)
def test_without_what_the_build_needs(torch_version, setuptools_version, why):
    found = run("-c", OTHER_PACKAGES, torch_version, setuptools_version)
    assert (found.returncode, found.stderr) == (1, f"error: the build needs {why}\n")


ELSEWHERE = """
import platform, runpy, sys
sys.platform, machine = sys.argv[1:]
platform.machine = lambda: machine
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.parametrize("system", [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "ppc64le")])
def test_elsewhere_the_install_stops(system):
    found = run("-c", ELSEWHERE, *system)
    where = "torchsparse_rec runs on Linux: on x86-64, and built from source, tried in emulation, on aarch64"
    assert (found.returncode, found.stderr) == (1, f"error: {where}; this is {system[0]} on {system[1]}\n")


def test_without_a_compiler(tmp_path):
    """A machine without one is told so in a few lines, before anything is copied or compiled."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
    with alone():
        built = run(
            *("-m", "pip", "wheel", *options, "--wheel-dir", tmp_path, ROOT),
            **{"PATH": str(tmp_path), "CXX": "c++", "TORCHSPARSE_REC_CUDA": "0"},
        )
    told = built.stdout + built.stderr
    assert built.returncode != 0
    assert "error: no C++ compiler: c++ is not on the PATH. Install g++ 9 or later" in told
    assert "Traceback" not in told and len(told.splitlines()) < 30, told


# What setup.py would build, where a toolkit is found, for each case of a setting, TORCH_CUDA_ARCH_LIST, torch's CUDA
# and the GPUs that it sees (null: one whose driver fails).
CHOICE = """
import json, os, runpy, sys
import torch
def get_device_capability(k):
    if gpus[k] is None:
        raise RuntimeError("no driver")
    return tuple(gpus[k])
torch.cuda.get_device_capability = get_device_capability
torch.cuda.device_count = lambda: len(gpus)
sys.argv = ["setup.py", "--version"]
setup = runpy.run_path("setup.py")
for setting, named, torch.version.cuda, gpus in json.loads(os.environ["CASES"]):
    os.environ["TORCHSPARSE_REC_CUDA"] = setting
    os.environ["TORCH_CUDA_ARCH_LIST"] = named
    if setting == "default":
        del os.environ["TORCHSPARSE_REC_CUDA"]
    home, summary = setup["choose_cuda"]()
    flags = [] if home is None else setup["arch_flags"](home)
    print(json.dumps([home, summary, [f for f in flags if f.startswith("-gencode=")]]))
"""


@pytest.mark.parametrize(
    ("known", "released", "their_codes"),
    [
        ("75 80 86 90 100 120", "8.0 9.0 10.0 12.0+PTX", ["80", "90", "100", "120", "120+PTX"]),
        ("75 80 86 90", "8.0 9.0+PTX", ["80", "90", "90+PTX"]),
    ],
)
def test_what_is_built(known, released, their_codes, tmp_path):
    for folder in ("bin", "lib64"):
        (tmp_path / folder).mkdir()
    nvcc = tmp_path / "bin/nvcc"
    nvcc.write_text(f"#!/bin/sh\nfor number in {known}; do echo compute_$number; done\n")
    nvcc.chmod(0o755)
    without_cuda = "this torch has no CUDA (TORCHSPARSE_REC_CUDA=1 builds it)"
    cases = [
        (("default", "", None, []), without_cuda, None),
        (("auto", "9.0", None, []), without_cuda, None),
        (("0", "", "12.8", [[9, 0]]), "TORCHSPARSE_REC_CUDA=0", None),
        (("1", "", None, []), released, their_codes),
        (("1", "9.0", None, []), "9.0", ["90"]),
        (("default", "", "12.8", []), released, their_codes),
        (("default", "", "12.8", [None]), released, their_codes),
        (("auto", "", "12.8", [[9, 0], [8, 6], [9, 0]]), "8.6 9.0", ["86", "90"]),
        (("auto", "7.5 8.6+PTX", "12.8", [[9, 0]]), "7.5 8.6+PTX", ["75", "86", "86+PTX"]),
    ]
    given = json.dumps([case for case, _, _ in cases])
    found = run("-c", CHOICE, CUDA_HOME=str(tmp_path), TORCHSPARSE_REC_CUDA="0", CASES=given)
    assert found.returncode == 0, found.stderr
    for line, (case, words, built) in zip(found.stdout.splitlines()[-len(cases) :], cases, strict=True):
        home, summary, flags = json.loads(line)
        if built is None:
            assert (home, summary) == (None, f"built _C.so; not _C_cuda.so: {words}"), case
            continue
        told = f"built _C.so, and _C_cuda.so for {words} (TORCH_CUDA_ARCH_LIST names others)"
        assert (home, summary) == (str(tmp_path), told), case
        numbers = [n.removesuffix("+PTX") for n in built]
        codes = [f"compute_{n}" if n != code else f"sm_{n}" for n, code in zip(numbers, built, strict=True)]
        assert flags == [f"-gencode=arch=compute_{n},code={code}" for n, code in zip(numbers, codes, strict=True)]


def test_nothing_is_compiled_for_this_machine_alone():
    build_files = [ROOT / "setup.py", ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"]
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.is_file()]
    native = "-march=" + "native"
    assert [p for p in build_files + sources if native in p.read_text()] == []


def test_every_requirement_is_pinned_and_agrees_with_the_project():
    pins = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            if line and not line.startswith(("#", "-c ", "-r ")):
                match = re.fullmatch(r'([a-z0-9-]+)==([0-9.]+(?:b[0-9]+)?)(; python_version [=>]= "3\.1\d")?', line)
                assert match, f"{path.name}: {line}"
                pins.setdefault(match[1], []).append((path.name, match[2], match[3]))
    assert all(len(set(marker for _, _, marker in places)) == len(places) for places in pins.values()), pins
    assert [(name, marker) for name, _, marker in pins["torch"]] == [("build.txt", None)]


def test_a_version_has_one_number_and_one_date():
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    version, date = re.fullmatch(r"## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)", heading).groups()
    assert version == torchsparse_rec.__version__
    assert f"\nversion: {version}\ndate-released: {date}\n" in (ROOT / "CITATION.cff").read_text()


def test_any_torch_of_the_stable_abi_will_do():
    settings = (ROOT / "pyproject.toml").read_text()
    wanted = [re.search(rf'{key} = \[.*"(torch[^"]*)"', settings)[1] for key in ("requires", "dependencies")]
    assert wanted == ["torch>=2.10", "torch>=2.10"]
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in (ROOT / "setup.py").read_text()  # 2.10


# ---- The library ----------------------------------------------------------------------------------------------------

# What a library may ask for where its wheel is manylinux_2_28: glibc 2.28, and the libstdc++ and libgcc of GCC 8.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8,)}
# Weak: whoever has them may be asked.
OF_THE_LINKER = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}


def imported(library: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return, for each symbol that a library takes from others, of which library's which version it must be."""
    listed = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\*UND\*\s+[0-9a-f]+\s+(?:\(?([A-Z]+)_([0-9.]+)\)?|Base)?\s+(\S+)$", listed, re.MULTILINE)
    return {name: (of, tuple(map(int, filter(None, version.split("."))))) for of, version, name in found}


def test_the_library_serves_older_systems_than_this_one():
    symbols = {name: asked for name, asked in imported(LIBRARY).items() if asked[0]}
    assert {"memcpy", "pow", "exp", "log", "__cxa_throw"} <= set(symbols)
    assert {name: asked for name, asked in symbols.items() if asked[1] > NEWEST[asked[0]]} == {}


def test_the_library_needs_no_python_and_of_torch_what_is_stable():
    """Symbols without a version are torch's, in C: of its C++ and of Python nothing is asked."""
    names = {name for name, (of, _) in imported(LIBRARY).items() if not of}
    assert len(names) > 50
    assert {name for name in names if not name.startswith(("aoti_torch_", "torch_"))} <= OF_THE_LINKER


def test_the_library_shows_nothing_of_the_c_library():
    listed = subprocess.run(["objdump", "-T", LIBRARY], capture_output=True, text=True, check=True).stdout
    shown = {line.split()[-1] for line in listed.splitlines() if ".text" in line or ".bss" in line}
    assert shown and not shown & {"pow", "exp", "log", "__libc_single_threaded"}


# ---- The wheel ------------------------------------------------------------------------------------------------------


def files_of(wheel: Path) -> list[str]:
    """Return the names of the files in a wheel, without its folders."""
    return [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel as `make wheel` does. Objects that are up to date are linked, not compiled again."""
    folder = tmp_path_factory.mktemp("wheel")
    with alone():
        built = run(".ci/make_wheel.py", folder, TORCHSPARSE_REC_CUDA="0")
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.full
def test_wheel_serves_every_python(wheel):
    tag = f"py3-none-manylinux_2_28_{platform.machine()}"
    assert re.fullmatch(rf"torchsparse_rec-[0-9.]+-{tag}\.whl", wheel.name), wheel.name
    archive = zipfile.ZipFile(wheel)
    (described,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
    assert re.findall(r"^Tag: (.*)$", archive.read(described).decode(), re.MULTILINE) == [tag]


def test_wheel_is_small_and_holds_the_package_and_nothing_else(wheel):
    assert wheel.stat().st_size < 4e6
    names = files_of(wheel)
    inside = {name.removeprefix("torchsparse_rec/") for name in names if ".dist-info/" not in name}
    assert {"_C.so", "py.typed", "compat/__init__.py", "compat/PARITY.md", "examples/ncf.py"} <= inside
    here = {p.relative_to(ROOT / "torchsparse_rec").as_posix() for p in (ROOT / "torchsparse_rec").rglob("*.py")}
    there = {p.relative_to(ROOT).as_posix() for p in (ROOT / "compat").rglob("*.py")}
    assert {name for name in inside if name.endswith(".py")} == here | there
    assert {Path(name).suffix for name in inside} == {".py", ".so", ".typed", ".md"}
    assert [name for name in inside if name.endswith(".so")] == ["_C.so"]
    licences = [n.rsplit("/", 1)[-1] for n in names if "/licenses/" in n]
    assert sorted(licences) == ["LICENSE", "NOTICE"]


def test_wheel_works_where_it_is_unpacked(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import torch, torchsparse_rec, torchsparse_rec.compat.tensorflow; print(torchsparse_rec.__file__); "
        "print(torchsparse_rec.ops.unique(torch.tensor([5, 3, 5]))[0].tolist())"
    )
    found = run("-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert found.stdout.splitlines() == [str(tmp_path / "torchsparse_rec/__init__.py"), "[5, 3]"], found.stderr


def test_the_cuda_kernels_in_a_wheel_of_their_own(wheel, tmp_path):
    """Any library stands in for them: what matters is that the package finds it, and that both name one version."""
    library, folder = tmp_path / "_C_cuda.so", tmp_path / "wheels"
    subprocess.run(["c++", "-shared", "-x", "c++", "/dev/null", "-o", library], check=True)
    loaded(".ci/make_wheel.py").pack_cuda(library, folder)
    (packed,) = folder.glob("*.whl")
    version = wheel.name.split("-")[1]
    assert re.fullmatch(rf"torchsparse_rec_cuda-{version}-py3-none-manylinux[\w.]+\.whl", packed.name), packed.name
    with zipfile.ZipFile(packed) as archive:
        described = f"torchsparse_rec_cuda-{version}.dist-info"
        assert f"\nRequires-Dist: torchsparse_rec=={version}\n" in archive.read(f"{described}/METADATA").decode()
        names = {"torchsparse_rec_cuda/__init__.py", "torchsparse_rec_cuda/_C_cuda.so"}
        assert {name for name in files_of(packed) if not name.startswith(f"{described}/")} == names
        archive.extractall(tmp_path / "there")
    zipfile.ZipFile(wheel).extractall(tmp_path / "there")
    program = "from torchsparse_rec import _library; print(*_library._cuda_library())"
    found = run("-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path / "there"))
    assert found.stdout.split() == [str(tmp_path / "there/torchsparse_rec_cuda/_C_cuda.so"), version], found.stderr


# ---- From source ----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_install_of_the_readme_takes_the_torch_that_is_there(tmp_path):
    """Run README's line in an environment to which this one's packages are lent, and without a network."""
    command = "pip install --no-build-isolation ."
    assert f"`{command}`" in (ROOT / "README.md").read_text()
    made = run("-m", "venv", "--without-pip", tmp_path / "environment")
    assert made.returncode == 0, made.stderr
    (packages,) = (tmp_path / "environment/lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    settings = tmp_path / "setup.cfg"
    settings.write_text(f"[build]\nbuild_lib = {tmp_path / 'lib'}\n")
    python = str(tmp_path / "environment/bin/python")
    variables = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{"TORCHSPARSE_REC_CUDA": "0", "DIST_EXTRA_CONFIG": str(settings), "PIP_NO_INDEX": "1"},
    }
    with alone():
        install = [python, "-m", *command.split()]
        installed = subprocess.run(install, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    program = "import torch, torchsparse_rec; print(torch.__version__, torchsparse_rec.__file__)"
    found = subprocess.run([python, "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert found.stdout.split() == [torch.__version__, str(packages / "torchsparse_rec/__init__.py")], found.stderr
