"""Find out why a training step is slow, by experiments and torch.profiler, and what makes a loss NaN."""

from ._nan import find_nan as find_nan
from ._run import diagnose as diagnose
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import Finding as Finding
