"""``torchsparse_rec._interrupt``, without the library: ``make gpu`` needs no torch, and some measure memory."""

from importlib.util import module_from_spec, spec_from_file_location

from .machine import ROOT

_spec = spec_from_file_location("benchmarks._interrupt", ROOT / "torchsparse_rec/_interrupt.py")
assert _spec is not None and _spec.loader is not None
_module = module_from_spec(_spec)
_spec.loader.exec_module(_module)
run_command = _module.run_command
