"""``tf.compat.v1.train``: its optimizers, which take the parameters first."""

from ...optimizers.v1 import AdadeltaOptimizer as AdadeltaOptimizer
from ...optimizers.v1 import AdagradDAOptimizer as AdagradDAOptimizer
from ...optimizers.v1 import AdagradOptimizer as AdagradOptimizer
from ...optimizers.v1 import AdamOptimizer as AdamOptimizer
from ...optimizers.v1 import FtrlOptimizer as FtrlOptimizer
from ...optimizers.v1 import GradientDescentOptimizer as GradientDescentOptimizer
from ...optimizers.v1 import MomentumOptimizer as MomentumOptimizer
from ...optimizers.v1 import ProximalAdagradOptimizer as ProximalAdagradOptimizer
from ...optimizers.v1 import ProximalGradientDescentOptimizer as ProximalGradientDescentOptimizer
from ...optimizers.v1 import RMSPropOptimizer as RMSPropOptimizer
