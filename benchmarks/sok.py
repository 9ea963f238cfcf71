"""
Benchmark rows of the example of HugeCTR's SparseOperationKit.

It has 100 features with ten ids in a bag, a table of 100,000 x 16 for each, pooling by mean, and Adagrad.
"""

from __future__ import annotations

from .many_tables import Shape
from .many_tables_sides import TENSORFLOW_FORMS
from .wide_deep import row

SHAPE = Shape((10,) * 100, 100_000, 8_192, ((16, "mean"),))

ROWS = [
    row(
        "sok/adagrad",
        "forward, backward and update with Adagrad: 100 features, ten ids in each bag, batch 8,192",
        SHAPE,
        "adagrad",
        TENSORFLOW_FORMS[1:],
        {
            "TensorFlow embedding_lookup_sparse": 7.9,
            "TensorFlow gather": 7.9,
            "torch sparse EmbeddingBags": 4.0,
            "FBGEMM TBE": 4.0,
        },
    )
]
