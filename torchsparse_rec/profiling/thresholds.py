"""The fractions that decide: from which share of the training loop's time on a cause is named."""

from __future__ import annotations

__all__ = [
    "BIG_TABLE_BYTES",
    "DENSE_GRADIENT_SHARE",
    "HEAVY_DENSE_SHARE",
    "HOST_SYNC_SHARE",
    "IDLE_ROWS",
    "LEAST_WAIT_MS",
    "LOADER_SHARE",
    "MANY_LOOKUPS",
    "MATRIX_PRODUCT_SHARE",
    "NEEDLESS_COPY_SHARE",
    "LOADER_COPY_SHARE",
    "PER_ROW_CALLS",
    "ROW_WORK_SHARE",
    "UNFUSED_LOOKUP_SHARE",
]

#: Of the loop's time spent waiting for the next batch: from here on the loader is slow.
LOADER_SHARE = 0.2

#: ... if the wait is at least so many milliseconds a batch: less is the price of a call, and no step that trains is so
#: short that it is felt.
LEAST_WAIT_MS = 0.02

#: Of the loader's time, what lines of Python that run for each example must take for its work to be by rows. What turns
#: the objects they make into tensors is one line a batch, so less than half can be enough.
ROW_WORK_SHARE = 0.25

#: Of the loader's time, what copies must take to be what is slow in it.
LOADER_COPY_SHARE = 0.5

#: How often a line of Python must run for each example of a batch to count as work by rows.
PER_ROW_CALLS = 0.9

#: Of the loop's time that copies outside of lookups, dense layers and optimizer take.
NEEDLESS_COPY_SHARE = 0.15

#: Of the loop's time that goes with the strided gradients of big tables, times the rows that no id of the batch names.
DENSE_GRADIENT_SHARE = 0.2

#: Of a table's rows that a batch must leave alone for its strided gradient to be a waste.
IDLE_ROWS = 0.5

#: Bytes of such rows, over all tables with strided gradients, from which on they are big.
BIG_TABLE_BYTES = 2 << 20

#: Of the loop's time that goes when the dense layers go, or that all matrix products take, whichever is more ...
HEAVY_DENSE_SHARE = 0.4

#: ... and of the step's time that matrix products must take by themselves, or it is calls that cost, not layers.
MATRIX_PRODUCT_SHARE = 0.2

#: Lookups in a step from which on they are many ...
MANY_LOOKUPS = 8

#: ... and of the loop's time that they, their backward and their update must take.
UNFUSED_LOOKUP_SHARE = 0.3

#: Of the loop's time that the host waits, within steps, for a device that has nothing to do (CUDA only).
HOST_SYNC_SHARE = 0.1
