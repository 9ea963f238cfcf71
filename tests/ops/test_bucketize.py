"""bucketize: boundaries belong to the bucket above them."""

import pytest
import torch

from torchsparse_rec import ops


def test_counts_the_boundaries_that_are_not_above() -> None:
    x = torch.tensor([[-1.0, 0.0, 0.5], [1.0, torch.nan, torch.inf]])
    expected = [[0, 1, 1], [3, 3, 3]]
    assert ops.bucketize(x, [0, 1, 1]).tolist() == expected
    assert ops.bucketize(x, torch.tensor([0.0, 1.0, 1.0])).tolist() == expected
    assert ops.bucketize(x, []).tolist() == [[0] * 3] * 2
    assert ops.bucketize(x.to(torch.int64)[:1], [0.5]).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(("dtype", "bucket"), [(torch.float32, 1), (torch.float64, 0)])
def test_compares_in_the_common_dtype(dtype: torch.dtype, bucket: int) -> None:
    """Compare 0.1 as float32, which is above 0.1 as float64."""
    assert ops.bucketize(torch.tensor([0.1], dtype=dtype), torch.tensor([0.1])).item() == bucket
    assert ops.bucketize(torch.tensor([0.1], dtype=dtype), [0.1]).item() == 1


def test_errors_name_the_argument_and_the_value() -> None:
    x = torch.zeros(2)
    for boundaries in ([1.0, 3.0, 2.0], torch.tensor([1.0, 3.0, 2.0])):
        with pytest.raises(ValueError, match=r"boundaries must be ascending, got 3.0 followed by 2.0 at position 2"):
            ops.bucketize(x, boundaries)
    for boundaries in ([1.0, torch.nan], torch.tensor([1.0, torch.nan])):
        with pytest.raises(ValueError, match=r"got 1.0 followed by nan at position 1"):
            ops.bucketize(x, boundaries)
    for boundaries in ([torch.nan], torch.tensor([torch.nan])):
        with pytest.raises(ValueError, match=r"boundaries\[0\] must be a number, got nan"):
            ops.bucketize(x, boundaries)
    with pytest.raises(ValueError, match=r"boundaries must have rank 1, got shape \[1, 2\]"):
        ops.bucketize(x, torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"boundaries must be a tensor or numbers, got 3"):
        ops.bucketize(x, 3)  # type: ignore[arg-type]


def test_compiles_once() -> None:
    compiled = torch.compile(
        lambda x, b: ops.bucketize(x, b) + ops.bucketize(x, [0.0, 1.0]),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for size in (2, 5, 9):
        x, boundaries = torch.randn(size), torch.linspace(-1, 1, size + 1)
        assert torch.equal(compiled(x, boundaries), ops.bucketize(x, boundaries) + ops.bucketize(x, [0.0, 1.0]))
