"""
The samples of the operators that have no CUDA kernel.

They are no part of :mod:`samples.operators`, whose samples run on all devices.
"""

from samples.candidates import CANDIDATES_SAMPLES
from samples.record import RECORD_SAMPLES

HOST_SAMPLES = {**RECORD_SAMPLES, **CANDIDATES_SAMPLES}
