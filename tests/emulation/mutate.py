"""
Does a fault in a CUDA kernel turn the emulated tests red? ``python tests/emulation/mutate.py`` plants one at a time.

Each is a changed sign, a moved bound or a dropped step in a copy of one ``.cu`` file; the copy is compiled and the
tests of that part are run. Any that stay green are printed, and the exit status is 1. Takes minutes: not part of CI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
# File, what to replace, by what, and the tests (as pytest's -k) that must notice.
MUTATIONS = [
    ("bags.cu", "offset < given[b - 1]", "offset <= given[b - 1]", "embedding_bag"),
    ("bags.cu", "weights[i] * weights[i]", "weights[i]", "weights_backward"),
    ("bags.cu", "++count;", "--count;", "dense_backward"),
    ("embedding.cu", "index < rows;", "index <= rows;", "recorded"),
    ("embedding.cu", "value > best", "value < best", "embedding_bag"),
    ("embedding_backward.cu", "with_row - with_output", "with_row + with_output", "weights_backward"),
    ("embedding_backward.cu", "int step = lanes / 2;", "int step = lanes / 4;", "weights_backward"),
    ("embedding_backward.cu", "sum += static_cast<A>(grad[at])", "sum -= static_cast<A>(grad[at])", "dense_backward"),
    ("errors.cu", "r->key = kNoError;", "", "recorded"),
    ("hash.cu", "end <= size;", "end < size;", "string_to_hash"),
    ("hash.cu", "negative = x < 0", "negative = x <= 0", "to_hash_bucket"),
    ("pool.cu", "total.sum[c] += weight *", "total.sum[c] -= weight *", "segment"),
    ("pool.cu", "entry.present && entry.index >= 0 && entry.index < p.rows", "entry.present", "recorded"),
    ("pool.cu", "j < end; j += kInFlight", "j + 1 < end; j += kInFlight", "segment"),
    ("pool.cu", "begin + k * kPiece", "begin + k * (kPiece - 1)", "long or popular"),
    ("row_groups.cu", "row <= rows; row +=", "row < rows; row +=", "reduce_grad"),
    ("row_groups.cu", "index != padding_idx ?", "index == padding_idx ?", "dense_backward"),
    ("row_groups.cu", "j == 0 || key != keys[j - 1]", "j != 0 && key != keys[j - 1]", "grad_v2"),
    ("segment.cu", "id < segment_ids[i - 1]", "id <= segment_ids[i - 1]", "segment"),
    ("segment.cu", "A(1) / (reduction", "A(-1) / (reduction", "reduce_grad"),
    ("segment.cu", "s <= segments; s +=", "s < segments; s +=", "segment"),
    ("unique.cu", "atomicMin(&slots[slot]", "atomicMax(&slots[slot]", "unique"),
    ("unique.cu", "? inverse[i] : -1", "? inverse[i] + 1 : -1", "unique"),
]


def _run(folder: Path, *command: str) -> int:
    # The package is production's own; only kernels and tests are copies.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), str(folder / "tests")])}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, stdout=subprocess.DEVNULL).returncode


def _is_noticed(folder: Path, file: str, old: str, new: str, tests: str) -> bool:
    """Whether the tests fail with the fault planted; the file is restored."""
    path = folder / "csrc/cuda" / file
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{file} must have {old!r} once, has it {text.count(old)} times")
    path.write_text(text.replace(old, new))
    try:
        if _run(folder, "-c", "from emulation.build import build; build()") != 0:
            raise RuntimeError(f"{file} does not compile with {new!r} for {old!r}")
        arguments = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests/test_emulated.py", "-k", tests)
        # 1: a test failed; below 0: a signal ended the run.
        status = _run(folder, *arguments)
        return status == 1 or status < 0
    finally:
        path.write_text(text)


def main() -> int:
    """Plant every fault. Returns the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("csrc", "tests"):
            shutil.copytree(_ROOT / part, folder / part)
        shutil.copy(_ROOT / "pyproject.toml", folder)
        missed = 0
        for file, old, new, tests in MUTATIONS:
            noticed = _is_noticed(folder, file, old, new, tests)
            missed += not noticed
            print(f"{'noticed' if noticed else 'MISSED '}  {file}: {old}  ->  {new or 'nothing'}", flush=True)
        unplanted = {p.name for p in (_ROOT / "csrc/cuda").glob("*.cu")} - {file for file, *_ in MUTATIONS}
        print(f"{len(MUTATIONS)} faults, {missed} missed; not run in emulation: {', '.join(sorted(unplanted))}")
        return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
