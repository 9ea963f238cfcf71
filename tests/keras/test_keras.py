"""
``torchsparse_rec.keras``, whose tests run in a process of their own: Keras is on torch there, elsewhere on TensorFlow.

A process reads the files beside this one, whose names begin with ``cases_``, as pytest does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# Keras's own, with this NumPy.
_WARNINGS = ["-W", "ignore:__array__ implementation:DeprecationWarning"]


def run(*arguments: str) -> None:
    """Run pytest on the cases, in a process whose Keras is on torch."""
    _require_keras()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_WARNINGS, *arguments]
    environment = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    cases = [str(path) for path in sorted(FOLDER.glob("cases_*.py"))]
    done = subprocess.run([*command, *cases], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _require_keras() -> None:
    """Skip the test without Keras 3.15, which the extra asks for; to import it here would fix its backend."""
    try:
        version = metadata.version("keras")
    except metadata.PackageNotFoundError:
        pytest.skip("Keras is not installed")
    if tuple(map(int, version.split(".")[:2])) < (3, 15):
        pytest.skip(f"Keras is {version}: the extra asks for 3.15")


@pytest.mark.always("all that is daily of Keras: one process for them all")
def test_the_short_cases() -> None:
    run("-m", "not slow")


def test_the_long_cases() -> None:
    run("-m", "slow")


@pytest.mark.parametrize("backend", [None, "tensorflow", "jax"])
def test_another_backend_is_one_error(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised before Keras, and the framework of its backend, are imported."""
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if backend is not None:
        monkeypatch.setenv("KERAS_BACKEND", backend)
    for name in [name for name in sys.modules if name.startswith(("keras", "torchsparse_rec.keras"))]:
        monkeypatch.delitem(sys.modules, name)
    wanted = f"needs Keras's torch backend, got KERAS_BACKEND={backend!r}: set os.environ.*'torch' before keras is"
    with pytest.raises(ImportError, match=wanted):
        import torchsparse_rec.keras  # noqa: F401
    assert "keras" not in sys.modules


def test_a_keras_that_runs_elsewhere_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = SimpleNamespace(config=SimpleNamespace(backend=lambda: "jax"))
    monkeypatch.setitem(sys.modules, "keras", elsewhere)  # type: ignore[arg-type]
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with pytest.raises(ImportError, match="needs Keras's torch backend, got 'jax': set os.environ"):
        import torchsparse_rec.keras  # noqa: F401
