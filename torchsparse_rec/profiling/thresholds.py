"""The thresholds that decide which causes of slowness are named, most of them shares of the training loop's time."""

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

#: The share of the loop's time spent waiting for the next batch at which the loader counts as slow.
LOADER_SHARE = 0.2

#: The least wait for a batch, in milliseconds, for the loader to be slow: a shorter one is the cost of a call, and
#: small beside any step that trains.
LEAST_WAIT_MS = 0.02

#: The share of the loader's time in lines of Python that run for each example at which it works row by row. One line a
#: batch turns the objects that those lines make into tensors, so that less than half of the time is enough.
ROW_WORK_SHARE = 0.25

#: The share of the loader's time in copies at which copies make it slow.
LOADER_COPY_SHARE = 0.5

#: How often a line of Python must run for each example of a batch to count as work by rows.
PER_ROW_CALLS = 0.9

#: The share of the loop's time in copies outside of lookups, dense layers and optimizer.
NEEDLESS_COPY_SHARE = 0.15

#: The share of the loop's time saved by freezing big tables with dense gradients, times the fraction of their bytes in
#: rows that the batch does not touch.
DENSE_GRADIENT_SHARE = 0.2

#: The fraction of a table's rows that a batch must not touch for its dense gradient to be a waste.
IDLE_ROWS = 0.5

#: The bytes of such rows, over all tables with dense gradients, at which the tables count as big.
BIG_TABLE_BYTES = 2 << 20

#: The share of the loop's time saved without the dense layers, or taken by all matrix products if that is more, at
#: which the dense layers count as heavy.
HEAVY_DENSE_SHARE = 0.4

#: The share of the step's time that matrix products must take as well: else calls cost the time, not large layers.
MATRIX_PRODUCT_SHARE = 0.2

#: The number of lookups in a step that count as many.
MANY_LOOKUPS = 8

#: The share of the loop's time that many lookups, their backward and their update must take to be named.
UNFUSED_LOOKUP_SHARE = 0.3

#: The share of the loop's time that the host waits, within steps, for a device that has nothing to do (CUDA only).
HOST_SYNC_SHARE = 0.1
