"""Every instruction set gives the same bits, and can be chosen; _C.so needs no C++ symbol of torch."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import torchsparse_rec

LEVELS = ("baseline", "avx2", "avx512")


def _run(level: str | None, *arguments: str) -> str:
    """Return what Python prints for ``arguments`` in a process whose loops were asked to use ``level``."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHSPARSE_REC_CPU"}
    if level is not None:
        environment["TORCHSPARSE_REC_CPU"] = level
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def _best_level() -> str:
    """Return the best level of this machine, whatever level this process was asked to use."""
    if "TORCHSPARSE_REC_CPU" not in os.environ:
        return torchsparse_rec.cpu_level()
    return _run(None, "-c", "import torchsparse_rec; print(torchsparse_rec.cpu_level())").strip()


def _or_what_there_is(level: str) -> str:
    return LEVELS[min(LEVELS.index(level), LEVELS.index(_best_level()))]


@pytest.mark.parametrize("level", LEVELS)
def test_show_config_prints_the_level(level: str) -> None:
    """Fall back to the machine's best level for a level that the machine lacks."""
    printed = _run(level, "-c", "import torchsparse_rec; torchsparse_rec.show_config()")
    assert f"instruction set: {_or_what_there_is(level)}\n" in printed


def test_show_config_prints_everything() -> None:
    printed = _run(None, "-c", "import torchsparse_rec; torchsparse_rec.show_config()")
    names = [line.split(": ")[0] for line in printed.splitlines()]
    assert names == list(torchsparse_rec.config())
    assert f"torch: {torch.__version__}" in printed
    assert f"instruction set: {_best_level()}" in printed


def _digests(other_machines: bool = False) -> dict[str, str]:
    """
    Return a digest of the bits of every sample's results.

    Those for other machines stand beside a digest of the inputs, since torch's normal numbers depend on the machine, as
    the sign of a NaN does, which is left out.
    """
    from calls import call
    from samples.large import MIDDLE_SAMPLES
    from samples.operators import SAMPLES
    from samples.sample import Sample, tensors_of

    def digest(tensors: Iterable[torch.Tensor]) -> str:
        total = hashlib.sha256()
        for x in tensors:
            if other_machines and x.is_floating_point():
                x = x.masked_fill(x.isnan(), torch.nan)
            total.update(f"{x.dtype}{tuple(x.shape)}".encode())
            total.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def row(name: str, sample: Sample) -> tuple[str, str]:
        given = sample.to("cpu")
        inputs = digest(x for argument in given.arguments for x in tensors_of(argument)) if other_machines else ""
        return f"{name} {inputs}".rstrip(), digest(call(given))

    small = [row(str(sample), sample) for samples in SAMPLES.values() for sample in samples]
    return dict([*small, *(row(build.name, build()) for build in MIDDLE_SAMPLES)])


@functools.cache
def _digests_of(level: str) -> dict[str, str]:
    return json.loads(_run(level, __file__))


@pytest.mark.parametrize(
    "level", [pytest.param("avx2", marks=pytest.mark.always("the only one that compares instruction sets")), "avx512"]
)
def test_same_bits_at_every_level(level: str) -> None:
    if _or_what_there_is(level) != level:
        pytest.skip(f"this machine has no {level}")
    wanted, actual = _digests_of("baseline"), _digests_of(level)
    assert len(wanted) > 500
    assert [name for name in wanted if wanted[name] != actual[name]] == []


def test_library_needs_no_cpp_symbol_of_torch() -> None:
    """Allow only torch's C shims, so that one build loads on every torch from 2.10 on."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    library = Path(torchsparse_rec.__file__).parent / "_C.so"
    command = ["nm", "--dynamic", "--undefined-only", "--demangle", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert any("aoti_torch" in symbol for symbol in symbols)
    assert [symbol for symbol in symbols if re.search(r"\b(at|c10|torch|caffe2)::", symbol)] == []


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    print(json.dumps(_digests("--other-machines" in sys.argv)))
