"""
Sample inputs of every operator in csrc/library.cpp but those for files: the first of each by hand, then random ones.

``SAMPLES[operator]`` is a list of :class:`sample.Sample`; ``GRADIENT_SAMPLES[operator]`` is the same for small float64
inputs at which the operator is smooth. Both are what the families' files have: a new case is found by itself, and
tests/ops/test_operators.py does the rest.
"""

from samples.sample import Sample, families

_FAMILIES = families()
SAMPLES = {name: list(make(name)) for family in _FAMILIES for name, make in family.samples.items()}
GRADIENT_SAMPLES = {name: list(make(name)) for family in _FAMILIES for name, make in family.gradients.items()}

ALL = [sample for samples in SAMPLES.values() for sample in samples]
REPRESENTATIVE = [sample for sample in ALL if sample.representative]
# The other samples of each operator, in groups of twenty: a test of its own costs more than most calls.
TWENTIES: dict[str, list[Sample]] = {}
for _name, _samples in SAMPLES.items():
    _others = [sample for sample in _samples if not sample.representative]
    for _begin in range(0, len(_others), 20):
        _run = _others[_begin : _begin + 20]
        TWENTIES[f"{_name}-{_begin}_to_{_begin + len(_run) - 1}"] = _run
