"""``tf.strings.as_string`` against TensorFlow: every dtype and every flag of C's printf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torchsparse_rec.compat import tensorflow as ours

FILLS = ("", " ", "0", "+", "-", "#")
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int64", "float32")


def test_unsigned_numbers_have_no_sign() -> None:
    """Ignore the fills "+" and " " for unsigned numbers as TensorFlow 2.21 does; C's printf leaves this open."""
    numbers = np.array([7, 200], np.uint8)
    assert ours.strings.as_string(numbers, fill="+").tolist() == [b"7", b"200"]
    assert ours.strings.as_string(numbers, width=5, fill=" ").tolist() == [b"    7", b"  200"]
    assert ours.strings.as_string(np.array([7], np.int8), fill="+").tolist() == [b"+7"]
    for refused in ({"precision": 2}, {"shortest": True}, {"scientific": True}):
        with pytest.raises(ValueError, match="must not be given for torch.bool"):
            ours.strings.as_string([True], **refused)


@pytest.mark.tensorflow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fill_and_width(tensorflow: Any, dtype: str) -> None:
    numbers = np.array([7, 0, 100], dtype)
    for fill in FILLS:
        for width in (-1, 0, 6):
            wanted = tensorflow.strings.as_string(numbers, width=width, fill=fill).numpy().tolist()
            assert ours.strings.as_string(numbers, width=width, fill=fill).tolist() == wanted, (fill, width)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "arguments",
    [{}, {"width": 8}, {"fill": "+"}, {"fill": "0", "width": 7}, {"precision": 2}, {"shortest": True}]
    + [{"scientific": True}, {"fill": "x"}],
    ids=str,
)
def test_booleans(tensorflow: Any, arguments: dict[str, Any]) -> None:
    try:
        wanted = tensorflow.strings.as_string([True, False], **arguments).numpy().tolist()
    except tensorflow.errors.InvalidArgumentError:
        with pytest.raises(ValueError, match="precision, scientific and shortest|fill"):
            ours.strings.as_string([True, False], **arguments)
        return
    assert ours.strings.as_string([True, False], **arguments).tolist() == wanted
