"""Why a training step is slow: the experiments, what torch.profiler shows, and a verdict with the setting to change."""

from ._run import diagnose as diagnose
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import Finding as Finding
