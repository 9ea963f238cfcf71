"""Batches that the tests of several file formats write and read."""

import pyarrow as pa

#: Columns of every kind that CSV and Parquet both hold.
MIXED = pa.record_batch(
    {
        "id": pa.array([7, None, 9]),
        "price": pa.array([0.1, None, 1e-300]),
        "city": pa.array(["Zürich", None, ""]),
        "quote": pa.array(['a "b", c', "1", "|"]),
        "flag": pa.array([True, None, False]),
        "seen": pa.array([[3, 1], [], None], pa.list_(pa.int64())),
        "pair": pa.array([[0.5, 1.5], [2, 3], [4, 5]], pa.list_(pa.float32(), 2)),
        "tags": pa.array([["x"], ["y", "z"], []]),
    }
)


def joined(batches):
    """Return one table of all batches."""
    return pa.Table.from_batches(list(batches))
