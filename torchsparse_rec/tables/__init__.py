"""
The rows of tables and what belongs to them: optimizers' states, the steps that stale rows miss, gradients by rows.

Below :mod:`torchsparse_rec.nn`, whose modules read tables, and :mod:`torchsparse_rec.optim`, which writes them. The
names are the library's own: they may change from one version to the next.
"""
