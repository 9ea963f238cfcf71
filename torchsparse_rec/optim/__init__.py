"""torch's optimizers and more, for dense parameters and for tables whose gradients touch few rows."""

from .adadelta import Adadelta as Adadelta
from .adagrad import Adagrad as Adagrad
from .adagrad import RowWiseAdagrad as RowWiseAdagrad
from .adam import Adam as Adam
from .adam import AdamW as AdamW
from .adam import PartialRowWiseAdam as PartialRowWiseAdam
from .adamax import Adamax as Adamax
from .clip_grad import clip_grad_norm_ as clip_grad_norm_
from .clip_grad import clip_grad_value_ as clip_grad_value_
from .ftrl import Ftrl as Ftrl
from .lamb import LAMB as LAMB
from .lion import Lion as Lion
from .rmsprop import RMSprop as RMSprop
from .sgd import SGD as SGD
