"""The former place of :mod:`torchsparse_rec.variable`: pickled options and initializers name its modules."""

import sys

from ...variable import initial, options

sys.modules[f"{__name__}.initial"], sys.modules[f"{__name__}.options"] = initial, options
