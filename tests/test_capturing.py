"""What docs/cuda.md says of waiting: who reads back what; everything else can be captured into a CUDA graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulation import fixture
from sample import Sample
from samples import SAMPLES

PAGE = Path(__file__).resolve().parent.parent / "docs/cuda.md"
REPRESENTATIVE = [sample for samples in SAMPLES.values() for sample in samples if sample.representative]
# Where the operator's name alone does not say.
WITHOUT_NUM_SEGMENTS = "without `num_segments`"


def _read_backs() -> dict[str, str]:
    """For each operator of the page's table, what is read back; for sparse_segment_reduce, without num_segments."""
    rows = re.findall(r"^\| `(\w+)`(.*?) \| (.*?) \| (yes|no) \|$", PAGE.read_text(), flags=re.MULTILINE)
    for name, _, what, captured in rows:
        assert (what == "nothing") == (captured == "yes"), name
    return {name: what for name, which, what, _ in rows if what != "nothing" or not which}


def _reads_back(sample: Sample) -> str | None:
    """What the page says that this call reads back."""
    if sample.operator == "sparse_segment_reduce" and sample.arguments[3] is not None:
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
    if what is None or (empty and sample.operator == "sparse_segment_reduce"):
        call(*arguments)
    else:
        with pytest.raises(ValueError, match=f": {what}.*must not happen while a CUDA graph is captured"):
            call(*arguments)
    fixture.check_errors()
