"""
Tables of TorchRec, dynamicemb and SOK, and their optimizers' states, into models of this library.

None of them is needed, nor a process group.
"""

from .tables import load_tables as load_tables
