"""
The optimizers of Keras 3 as they run on TensorFlow, as torch optimizers.

The parameters come first, then Keras's arguments in Keras's order; arguments after ``weight_decay`` by name only.
:class:`KerasOptimizer` has the common ones.
"""

from ._keras import KerasOptimizer as KerasOptimizer
from ._keras_adam import Adam as Adam
from ._keras_adam import Adamax as Adamax
from ._keras_adam import AdamW as AdamW
from ._keras_adam import Nadam as Nadam
from ._keras_rules import SGD as SGD
from ._keras_rules import Adadelta as Adadelta
from ._keras_rules import Adagrad as Adagrad
from ._keras_rules import Ftrl as Ftrl
from ._keras_rules import Lion as Lion
from ._keras_rules import RMSprop as RMSprop
