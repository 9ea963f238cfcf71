"""The check of what ptxas reports about the CUDA kernels: .ci/check_spills.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from project.scripts import ROOT, loaded

GOOD = """
ptxas info    : Compiling entry function '_ZN3tsr4goodEv' for 'sm_80'
ptxas info    : Function properties for _ZN3tsr4goodEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 416 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN3tsr4goodEv' for 'sm_90'
ptxas info    : Function properties for _ZN3tsr4goodEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 254 registers, used 1 barriers
"""


@pytest.fixture(scope="module")
def check_spills() -> ModuleType:
    return loaded(".ci/check_spills.py")


def _logs(folder: Path, last: str) -> list[str]:
    """Write one log per CUDA source, the last of them as given. Return the arguments of the script."""
    sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    for source in sources:
        (folder / f"{source.stem}.o.ptxas").write_text(last if source is sources[-1] else GOOD)
    return [str(folder), "sm_80", "sm_90"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "0 bytes spill loads\nptxas info    : Used 254",
            "8 bytes spill loads\nptxas info    : Used 254",
            "8 bytes spi",
        ),
        ("    0 bytes stack frame", "    16 bytes stack frame", "16 bytes of stack"),
        ("for 'sm_90'", "for 'sm_89'", "none for sm_90"),
        ("_ZN3tsr4goodEv", "_ZN3tsr23four_blocks_bags_kernelEv", "254 registers, 64 at most: tsr::four_blocks_bags"),
    ],
)
def test_memory_of_a_kernel_fails(
    check_spills: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    assert check_spills.main(_logs(tmp_path, GOOD.replace(old, new))) == 1
    assert message in capsys.readouterr().out


def test_cubs_kernels_may_use_memory(check_spills: ModuleType, tmp_path: Path) -> None:
    log = GOOD.replace("_ZN3tsr4goodEv", "_ZN3cub4sortEv").replace("0 bytes stack", "64 bytes stack")
    assert check_spills.main(_logs(tmp_path, log)) == 0


def test_a_missing_log_fails(check_spills: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = _logs(tmp_path, GOOD)
    next(tmp_path.iterdir()).unlink()
    assert check_spills.main(arguments) == 1
    assert "is missing" in capsys.readouterr().out
