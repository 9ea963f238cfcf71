"""Which tests CI runs whole after a change: .ci/touched.py."""

from __future__ import annotations

from types import ModuleType

import pytest
from project.scripts import ROOT, loaded

TESTS = sorted(str(x.relative_to(ROOT)) for x in (ROOT / "tests").rglob("test_*.py"))


@pytest.fixture(scope="module")
def touched() -> ModuleType:
    return loaded(".ci/touched.py")


def in_rooms(*rooms: str) -> set[str]:
    return {test for test in TESTS if test.split("/")[1] in rooms}


@pytest.mark.parametrize(
    "path", ["csrc/abi.h", "csrc/dispatch.h", "tests/conftest.py", "tests/cpu_only.py", "setup.py", "requirements/x"]
)
def test_all_tests_stand_on_some_files(touched: ModuleType, path: str) -> None:
    assert touched.touched(["README.md", path], TESTS) is None


@pytest.mark.parametrize(
    ("path", "family", "other"),
    [
        ("csrc/cpu/unique_hashed.h", "ops/test_unique.py", "ops/test_sparse_segment.py"),
        ("csrc/cuda/unique.cu", "emulation/test_unique.py", "ops/test_sparse_segment.py"),
        (
            "csrc/cpu/embedding_collection_update.cpp",
            "ops/test_embedding_collection.py",
            "ops/test_embedding_lookup.py",
        ),
        ("csrc/hash_farm.h", "ops/test_hash_cross.py", "ops/test_unique.py"),
        ("torchsparse_rec/ops/sparse_segment.py", "ops/test_sparse_segment.py", "ops/test_unique.py"),
        # Included by another family, too.
        ("csrc/row_update.h", "ops/test_row_optimizer.py", "ops/test_unique.py"),
    ],
)
def test_a_kernel_touches_its_family(touched: ModuleType, path: str, family: str, other: str) -> None:
    found = touched.touched([path], TESTS)
    assert {f"tests/{family}", "tests/ops/test_operators.py", "tests/emulation/test_errors.py"} <= found
    assert f"tests/{other}" not in found


@pytest.mark.parametrize(
    "path", ["csrc/cpu/row_loops_body.h", "csrc/cpu/row_loops.cpp", "torchsparse_rec/ops/autograd.py"]
)
def test_what_has_no_family_touches_all_operators(touched: ModuleType, path: str) -> None:
    assert touched.touched([path], TESTS) == in_rooms("ops", "emulation")


def test_packages_touch_their_rooms_and_those_above(touched: ModuleType) -> None:
    assert touched.touched(["torchsparse_rec/nn/auto.py"], TESTS) == in_rooms(
        "nn", "optim", "variable", "clients", "distributed"
    )
    assert touched.touched(["torchsparse_rec/variable/keys.py"], TESTS) == in_rooms("variable")
    assert touched.touched(["compat/keras.py", "README.md"], TESTS) == in_rooms("compat", "features")


def test_a_test_file_touches_itself_and_what_tests_share_its_room(touched: ModuleType) -> None:
    assert touched.touched(["tests/nn/test_fused_edges.py"], TESTS) == {"tests/nn/test_fused_edges.py"}
    assert touched.touched(["tests/optim/cases.py"], TESTS) == in_rooms("optim")
    assert touched.touched(["tests/samples/table.py"], TESTS) == in_rooms("ops", "emulation", "cuda")
    assert touched.touched(["tests/goldens/x.json.gz"], TESTS) == in_rooms("compat")
    assert touched.touched(["tests/slow.txt", "tests/always.txt"], TESTS) == set()


def test_a_reference_touches_whoever_is_held_to_it(touched: ModuleType) -> None:
    found = touched.touched(["compat/_parity/reference/segment.py"], TESTS)
    assert found == in_rooms("compat", "ops", "emulation", "data", "optim", "variable")


def test_every_file_of_the_library_touches_something(touched: ModuleType) -> None:
    sources = [x for folder in ("torchsparse_rec", "csrc", "compat") for x in (ROOT / folder).rglob("*.*")]
    paths = [str(x.relative_to(ROOT)) for x in sources if x.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")]
    assert len(paths) > 300
    assert [path for path in paths if touched.touched([path], TESTS) == set()] == []


def test_an_unknown_commit_leaves_nothing_out(touched: ModuleType) -> None:
    assert touched.changed_since("0" * 40) is None
