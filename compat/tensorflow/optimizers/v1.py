"""
The optimizers of ``tf.compat.v1.train``, as torch optimizers.

The parameters come first, then TensorFlow's arguments in TensorFlow's order. Slices of one row are added up before the
rule gets them, and a sparse gradient moves only its rows, slots included. Only Adam's moves every row.
``learning_rate`` may be a function, of the number of steps done or of nothing; torch's schedulers serve too.
``use_locking`` is ignored; ``name`` is part of the names of slots (:func:`.export_slots`).
"""

from ._v1 import AdadeltaOptimizer as AdadeltaOptimizer
from ._v1 import AdagradOptimizer as AdagradOptimizer
from ._v1 import AdamOptimizer as AdamOptimizer
from ._v1 import GradientDescentOptimizer as GradientDescentOptimizer
from ._v1 import MomentumOptimizer as MomentumOptimizer
from ._v1 import RMSPropOptimizer as RMSPropOptimizer
from ._v1_penalties import AdagradDAOptimizer as AdagradDAOptimizer
from ._v1_penalties import FtrlOptimizer as FtrlOptimizer
from ._v1_penalties import ProximalAdagradOptimizer as ProximalAdagradOptimizer
from ._v1_penalties import ProximalGradientDescentOptimizer as ProximalGradientDescentOptimizer
