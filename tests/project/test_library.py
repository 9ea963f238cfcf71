"""Loading the compiled libraries: the warnings and errors where the CUDA library cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import torchsparse_rec
from torchsparse_rec import _library

CUDA_LIBRARY = Path(torchsparse_rec.__file__).parent / "_C_cuda.so"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Return a file that names the toolkit as ``_C_cuda.so`` does, and is no library."""
    path = tmp_path / "_C_cuda.so"
    path.write_bytes(b"\x7fELF\0other text\0torchsparse_rec CUDA toolkit 13000\0more")
    return path


def _with_cuda(monkeypatch: pytest.MonkeyPatch, driver: int) -> list[str]:
    """Let torch have CUDA on a machine with this driver. Return the list that names each library when it is loaded."""
    loaded: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_library, "_driver", lambda: driver)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    return loaded


@pytest.mark.parametrize("driver", [13000, 13010, 14000, 0], ids=["same", "minor", "major", "none"])
def test_a_driver_that_can_run_the_library(library: Path, driver: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _with_cuda(monkeypatch, driver)
    assert _library._load_cuda(library) == "loaded"
    assert loaded == [str(library)]


def test_a_driver_too_old_is_told_in_one_line(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _with_cuda(monkeypatch, 12080)
    with pytest.warns(UserWarning) as caught:
        state = _library._load_cuda(library)
    assert loaded == []
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("torchsparse_rec runs on CPU only: ")
    assert text.endswith(
        "it was built with CUDA 13.0, and this machine's driver knows CUDA 12.8 at most: install a newer driver, or"
        " build with CUDA 12"
    )
    assert "\n" not in text
    assert state.startswith("built, not loaded: it was built with CUDA 13.0")


def test_a_library_that_cannot_be_opened_is_told(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_cuda(monkeypatch, 13000)

    def fail(path: str) -> None:
        raise OSError(f"{path}: undefined symbol")

    monkeypatch.setattr(torch.ops, "load_library", fail)
    with pytest.warns(UserWarning, match="runs on CPU only.*undefined symbol"):
        assert "undefined symbol" in _library._load_cuda(library)


def test_without_the_library_or_cuda_nothing_is_loaded(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _with_cuda(monkeypatch, 13000)
    assert _library._load_cuda(library.with_name("missing.so")) == "not built"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert _library._load_cuda(library) == "built, not loaded: this torch has no CUDA"
    assert loaded == []


@pytest.mark.parametrize("version", [torchsparse_rec.__version__, "0.0.9"])
def test_the_package_of_the_cuda_kernels(library: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load its library where none was built, if it is of this version: kernels of another may have other arguments."""
    loaded = _with_cuda(monkeypatch, 13000)
    package = library.parent / "torchsparse_rec_cuda"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    packed = library.rename(package / library.name)
    monkeypatch.syspath_prepend(library.parent)
    monkeypatch.setattr(_library, "_FOLDER", library.parent)
    try:
        found = _library._cuda_library()
    finally:
        sys.modules.pop("torchsparse_rec_cuda", None)
    assert found == (packed, version)
    if version == torchsparse_rec.__version__:
        assert _library._load_cuda(*found) == "loaded"
        assert loaded == [str(packed)]
        return
    with pytest.warns(UserWarning, match="runs on CPU only: .*it is of version 0.0.9") as caught:
        _library._load_cuda(*found)
    (warning,) = caught
    told = str(warning.message)
    assert told.endswith(f"pip install torchsparse_rec_cuda=={torchsparse_rec.__version__}") and "\n" not in told
    assert loaded == []


def test_a_library_that_was_built_here_comes_before_the_package(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_FOLDER", library.parent)
    assert _library._cuda_library() == (library, torchsparse_rec.__version__)


@pytest.mark.skipif(not CUDA_LIBRARY.exists(), reason="the CUDA library is not built here")
def test_the_built_library_names_its_toolkit() -> None:
    toolkit = _library._toolkit_of(CUDA_LIBRARY)
    assert toolkit is not None and 11000 <= toolkit < 20000


def test_of_a_large_library_only_the_beginning_is_read(library: Path) -> None:
    """Skip the code of many GPUs that follows: here a hole of 64 GB, which no machine of ours could read."""
    with library.open("ab") as file:
        file.truncate(2**36)
    assert _library._toolkit_of(library) is not None
