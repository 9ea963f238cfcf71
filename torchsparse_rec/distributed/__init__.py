"""Tables over several ranks: splitting them, and the parts of training that see all ranks."""

from ..checkpoint import load as load
from ..checkpoint import save as save
from .ddp import leave_out_of_ddp as leave_out_of_ddp
from .losses import global_mean as global_mean
from .machine import Machine as Machine
from .machine import calibrate as calibrate
from .plan import ColumnWise as ColumnWise
from .plan import Replicated as Replicated
from .plan import RowWise as RowWise
from .plan import TableWise as TableWise
from .prefetch import prefetch as prefetch
from .sharding import plan_of as plan_of
from .sharding import shard as shard
from .whole import full_state_dict as full_state_dict
