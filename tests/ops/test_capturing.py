"""What docs/operators.md says of waiting: who reads back what; everything else a CUDA graph can capture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulation import fixture
from samples.operators import SAMPLES
from samples.read_backs import read_back
from samples.sample import LAST_SEGMENT, Sample

REPRESENTATIVE = [sample for samples in SAMPLES.values() for sample in samples if sample.representative]


@pytest.fixture
def capturing() -> Iterator[None]:
    """Let the emulation say that the current stream is being captured."""
    fixture.library().tsr_emulated_set_capturing(1)
    try:
        yield
    finally:
        fixture.library().tsr_emulated_set_capturing(0)


@pytest.mark.parametrize("sample", REPRESENTATIVE, ids=str)
def test_only_what_reads_back_refuses_to_be_captured(sample: Sample, capturing: None) -> None:
    call = fixture.operator(sample.operator)
    arguments = sample.to("cpu").arguments
    what = read_back(sample)
    empty = all(x.numel() == 0 for x in arguments if isinstance(x, torch.Tensor))
    if what is None or (empty and what == LAST_SEGMENT.what):  # of no segment ids there is no last one
        call(*arguments)
    else:
        with pytest.raises(ValueError, match=f": {what}.*must not happen while a CUDA graph is captured"):
            call(*arguments)
    fixture.check_errors()
