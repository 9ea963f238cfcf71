"""Find out why a training step is slow, by experiments and torch.profiler, and name the setting to change."""

from ._run import diagnose as diagnose
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import Finding as Finding
