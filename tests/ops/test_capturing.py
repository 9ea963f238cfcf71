"""What docs/cuda.md says of waiting: which operator reads back what; every other can be captured into a CUDA graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulation import fixture
from samples.cuda_cases import read_back
from samples.operators import SAMPLES
from samples.sample import Sample

PAGE = Path(__file__).resolve().parents[2] / "docs/cuda.md"
REPRESENTATIVE = [sample for samples in SAMPLES.values() for sample in samples if sample.representative]


def _read_backs() -> dict[str, str]:
    """Return, for each operator of the page's table, what is read back by its calls that read back anything."""
    rows = re.findall(r"^\| `(\w+)`(.*?) \| (.*?) \| (yes|no) \|$", PAGE.read_text(), flags=re.MULTILINE)
    for name, _, what, captured in rows:
        assert (what == "nothing") == (captured == "yes"), name
    found = {name: what for name, _, what, _ in rows}
    return found | {name: what for name, _, what, _ in rows if what != "nothing"}


def _reads_back(sample: Sample) -> str | None:
    """Return what this call reads back according to the page."""
    if read_back(sample) is None:
        return None
    what = _read_backs()[sample.operator]
    return None if what == "nothing" else what


@pytest.fixture
def capturing() -> Iterator[None]:
    """Let the emulation say that the current stream is being captured."""
    fixture.library().tsr_emulated_set_capturing(1)
    try:
        yield
    finally:
        fixture.library().tsr_emulated_set_capturing(0)


def test_the_page_names_every_operator() -> None:
    assert set(_read_backs()) == set(SAMPLES)


@pytest.mark.parametrize("sample", REPRESENTATIVE, ids=str)
def test_only_what_reads_back_refuses_to_be_captured(sample: Sample, capturing: None) -> None:
    call = fixture.operator(sample.operator)
    arguments = sample.to("cpu").arguments
    what = _reads_back(sample)
    empty = all(x.numel() == 0 for x in arguments if isinstance(x, torch.Tensor))
    if what is None or (empty and sample.operator in ("segment_reduce", "sparse_segment_reduce")):
        call(*arguments)
    else:
        with pytest.raises(ValueError, match=f": {what}.*must not happen while a CUDA graph is captured"):
            call(*arguments)
    fixture.check_errors()
