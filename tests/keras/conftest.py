"""Keras on torch imports TensorFlow when it trains, if it finds it: seconds that no test here needs."""

import os
import sys

if os.environ.get("KERAS_BACKEND") == "torch":
    sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]
