"""What a fault is, where a table's faults lie, and which tests must notice them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """A text that ``file`` has once, its replacement, and the tests that must notice."""

    file: str  # relative to its table's folder
    kind: str
    old: str
    new: str
    tests: str  # as the table's arguments_of() takes it


class Table(NamedTuple):
    """Faults of one kind of source, and how a copy of the repository is built with them."""

    name: str
    folder: str
    kinds: tuple[str, ...]
    mutations: Sequence[Mutation]
    build: tuple[str, ...] = ()  # arguments of Python, run after a source has changed
    built: tuple[str, ...] = ()  # the files that the build writes
    environment: Mapping[str, str] = {}
    # Whether a run that takes too long has noticed the fault: in the emulation a fault may make a loop endless.
    endless: bool = False

    def arguments_of(self, mutation: Mutation, root: Path) -> list[list[str]]:
        """Return pytest's arguments for each of the runs, one after another, that select the tests in ``root``."""
        if self.name == "cuda":
            chosen = f"not compiles and ({mutation.tests})"
            return [
                [*files_named(root, EMULATED_TESTS), "-k", chosen],
                [*files_named(root, KERNEL_TESTS), "-k", f"emulated and {chosen}"],
            ]
        family = FAMILIES[mutation.tests]
        runs = [[*files_named(root, family.own), "-k", "not emulated"]]
        if family.shared:
            own = set(runs[0])
            shared = [file for file in files_named(root, SHARED_TESTS) if file not in own]
            runs.append([*shared, "-k", f"not emulated and ({family.shared})"])
        return runs


# ---- Test files -----------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """The test files of one part of the library and of what is built on it, and its tests in files that all share."""

    own: tuple[str, ...]
    shared: str = ""  # pytest's -k


# Names as files_named() takes them. A fault names a family, not the test that must notice it.
FAMILIES = {
    "sparse_segment": Family(("sparse_segment", "sums"), "sparse_segment"),
    "segment": Family(("segment*", "indexed_slices", "sums"), "segment and not sparse"),
    "unique": Family(("unique*", "indexed_slices"), "unique"),
    "hash": Family(("hash*", "features", "features_inputs"), "hash or fingerprint or cross"),
    "sparse_tensor": Family(("sparse_tensor*", "jagged", "compat_sparse_tensor"), "sparse or fill or row_ids"),
    "bucketize": Family(("bucketize", "features", "compat_keras"), "bucketize"),
    "jagged": Family(("jagged*", "nn_collection", "data_tensors"), "jagged or row_ids"),
    "embedding": Family(("embedding_operators", "embedding_errors", "pooling", "nn_embedding*"), "embedding"),
    "lookup": Family(("embedding_lookup", "lookup_sparse", "embedding_errors", "compat_embedding"), "lookup"),
    "quantized": Family(("quantized", "nn_quantize"), "quantized"),
    "scores": Family(("scores", "top_k"), "scores"),
    "candidates": Family(("candidates", "nn_samplers", "nn_sampled_losses", "compat_candidates")),
    "collection": Family(("embedding_collection*", "nn_collection", "nn_gradients", "nn_fused*"), "collection"),
    "row_update": Family(("row_update", "compat_optimizers*"), "row_update or sparse_apply"),
    "row_optimizer": Family(("row_optimizer*", "optim*", "nn_fused*"), "row_optimizer"),
    "table": Family(("table*", "embedding_variable*", "variable_*"), "table"),
    "record": Family(("record*", "data_tfrecord*"), "record or example"),
    "nn": Family(("nn_*", "training")),
    "optim": Family(("optim*", "clip_grad", "row_optimizer*", "nn_fused*", "training")),
    "variable": Family(("embedding_variable*", "variable_*", "checkpoint_*")),
    "prebatched": Family(("data_prebatched*", "data_readers", "data_device", "data_convert")),
    "features": Family(("features*",)),
    "compat": Family(("compat*", "converters")),
    "distributed": Family(("distributed_*",)),
}
SHARED_TESTS = ("operators", "parity", "determinism", "autograd", "func", "vmap")
# The tests of emulated kernels: all tests of the first files, and the "emulated" cases of the second.
EMULATED_TESTS = ("emulated", "emulated_*", "emulation_*")
KERNEL_TESTS = (
    "embedding_collection_errors",
    "operators",
    "pooling",
    "quantized",
    "row_optimizer",
    "row_update",
    "scores",
    "segment",
    "sparse_tensor",
    "top_k",
    "unique_rows",
)


def files_named(root: Path, patterns: Sequence[str]) -> list[str]:
    """
    Return the test files of ``root`` that match one of ``patterns``, in the patterns' order, relative to ``root``.

    A file's name is what follows ``test_``, or the same after its folder's name: ``nn_fused`` is both
    ``tests/test_nn_fused.py`` and ``tests/nn/test_fused.py``. Files in the folder ``emulation`` have only the latter
    name: they test other kernels than the files of the same name elsewhere.
    """
    tests = root / "tests"
    found: dict[str, None] = {}
    for pattern in patterns:
        for path in sorted(tests.rglob("test_*.py")):
            name = path.stem.removeprefix("test_")
            names = [] if path.parent.name == "emulation" else [name]
            if path.parent != tests:
                names.append(f"{path.parent.name}_{name}")
            if any(fnmatchcase(name, pattern) for name in names):
                found[str(path.relative_to(root))] = None
    return list(found)


# ---- All tables -----------------------------------------------------------------------------------------------------


def tables() -> list[Table]:
    """Return every table in the order in which they are planted: the cheapest first."""
    from . import cpu, cuda, python

    return [python.TABLE, cpu.TABLE, cuda.TABLE]


def problems() -> Iterator[str]:
    """Yield what is wrong with the tables: texts that are not in their file once, unknown kinds and families."""
    for table in tables():
        for m in table.mutations:
            path = ROOT / table.folder / m.file
            times = path.read_text().count(m.old) if path.exists() else 0
            if times != 1:
                yield f"{m.file} must have {m.old!r} once, has it {times} times"
            if m.kind not in table.kinds:
                yield f"{m.file}: the kind of {m.old!r} must be one of {table.kinds}, is {m.kind!r}"
            if table.name != "cuda" and m.tests not in FAMILIES:
                yield f"{m.file}: the tests of {m.old!r} must be one of {list(FAMILIES)}, is {m.tests!r}"
    for name, family in FAMILIES.items():
        if not files_named(ROOT, family.own):
            yield f"the family {name!r} must have test files, has none of {family.own}"
    for names in (EMULATED_TESTS, *((name,) for name in (*KERNEL_TESTS, *SHARED_TESTS))):
        if not files_named(ROOT, names):
            yield f"there must be a test file named {' or '.join(names)}"
