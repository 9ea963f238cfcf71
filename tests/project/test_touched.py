"""Which tests CI runs whole after a change: .ci/touched.py, which follows imports and includes by .ci/reach.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiers
from mutations import python
from mutations.plant import name_of
from project.scripts import loaded


@pytest.fixture(scope="module")
def touched() -> ModuleType:
    return loaded(".ci/touched.py")


@pytest.fixture(scope="module")
def tests(touched: ModuleType) -> Any:
    return touched.Tests()


@pytest.mark.parametrize("path", ["csrc/abi.h", "csrc/dispatch.h", "tests/conftest.py", "tests/emulation/engine.h"])
def test_all_tests_stand_on_some_files(tests: Any, path: str) -> None:
    assert tests.of_files(["README.md", path]) is None


@pytest.mark.parametrize(
    ("path", "wanted", "other"),
    [
        # Kernels, by what they include and by operators' names.
        ("csrc/cpu/unique_hashed.h", "ops/test_unique.py emulation/test_errors.py", "ops/test_sparse_segment.py"),
        ("csrc/cuda/unique.cu", "ops/test_unique.py ops/test_operators.py", "ops/test_sparse_segment.py"),
        ("csrc/cpu/embedding_collection_update.cpp", "ops/test_embedding_collection.py", "ops/test_hash.py"),
        ("csrc/row_update.h", "ops/test_row_optimizer.py ops/test_row_update.py", "ops/test_unique.py"),
        ("csrc/cpu/segment_groups.cpp", "ops/test_segment.py", "ops/test_hash.py"),
        # Packages, by imports.
        ("torchsparse_rec/ops/sparse_segment.py", "ops/test_sparse_segment.py", "ops/test_unique.py"),
        ("torchsparse_rec/nn/quantize.py", "nn/test_quantize.py serving/test_quantized.py", "nn/test_weight.py"),
        ("torchsparse_rec/checkpoint/_shards.py", "checkpoint/test_store.py", "data/test_csv.py"),
        ("torchsparse_rec/distributed/_rows.py", "distributed/test_equal.py", "nn/test_stale.py"),
        ("torchsparse_rec/tables/table.py", "nn/test_stale.py optim/test_training.py", "data/test_csv.py"),
        ("torchsparse_rec/keras/_tables.py", "keras/test_keras.py", "nn/test_stale.py"),
        ("compat/keras/bins.py", "compat/test_keras.py", "compat/test_row_update.py"),
        ("compat/_parity/reference/hash.py", "ops/test_hash.py", "nn/test_stale.py"),
        # What tests share, and what they read.
        ("tests/samples/table.py", "ops/test_operators.py", "nn/test_stale.py"),
        ("tests/optim/cases.py", "optim/test_training.py", "nn/test_stale.py"),
        ("tests/goldens/unique.json.gz", "compat/test_compat.py", "nn/test_stale.py"),
        ("benchmarks/timing.py", "benchmarks/test_benchmarks.py", "nn/test_stale.py"),
        ("Makefile", "project/test_docs.py", "ops/test_unique.py"),
    ],
)
def test_a_file_touches_what_reaches_it_and_answers_for_its_room(
    tests: Any, path: str, wanted: str, other: str
) -> None:
    found = tests.of_file(path)
    assert {f"tests/{name}" for name in wanted.split()} <= found
    assert f"tests/{other}" not in found


def test_a_test_file_touches_itself(tests: Any) -> None:
    found = tests.of_file("tests/nn/test_forks.py")
    assert [x for x in found if x.startswith("tests/nn/")] == ["tests/nn/test_forks.py"]


def test_every_source_touches_something(tests: Any) -> None:
    sources = [x for x in tests.reach.texts if x.startswith(("torchsparse_rec/", "csrc/", "compat/"))]
    assert len(sources) > 400
    # nvcc alone includes it.
    assert {x for x in sources if tests.of_file(x) == set()} <= {"csrc/cuda/lean/thrust/complex.h"}


def test_of_the_schemas_those_that_changed(tests: Any) -> None:
    now = tests.reach.texts["csrc/library.cpp"]
    found = tests.of_schemas(now.replace("unique_rows(Tensor x)", "unique_rows(Tensor y)"))
    assert "tests/ops/test_unique_rows.py" in found and "tests/ops/test_hash.py" not in found
    assert tests.of_schemas(now) == set()


def test_planted_faults_choose_the_tests_that_notice_them(tests: Any) -> None:
    """Of each fault one that notices it: its file must touch that test, if the test is not daily."""
    faults, noticed = {name_of(python.TABLE, x): x.file for x in python.MUTATIONS}, tiers.noticed()
    files = {name: {tiers.function_of(x).partition("::")[0] for x in noticed.get(name, ())} for name in faults}
    assert sum(map(bool, files.values())) > len(faults) // 2, "make mutate ARGS=python has not been run"
    assert {name: its for name, its in files.items() if its and not its & (tests.of_file(faults[name]) or its)} == {}


# ---- The commit that a change is compared with ----------------------------------------------------------------------


@pytest.fixture
def repository(touched: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that commits files in a repository of two commits, in which ``base`` looks."""
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit(**files: str) -> str:
        for name, text in files.items():
            path = tmp_path / name.replace("passed", ".ci/passed")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        git("add", "-A")
        git("commit", "-qm", "x", "--allow-empty")
        return git("rev-parse", "HEAD").strip()

    git("init", "-q")
    commit(passed="none", a="0")
    return commit


def test_the_base_is_what_the_first_commit_names(touched: ModuleType, repository: Callable[..., str]) -> None:
    start = repository(a="1")
    repository(passed=f"{start}\n")
    repository(a="2")
    assert touched.base() == start
    assert touched.changed_since(start) == ["a"]


@pytest.mark.parametrize("fault", ["unknown", "twice", "late", "mixed", "uncommitted"])
def test_another_base_is_refused(touched: ModuleType, repository: Callable[..., str], fault: str) -> None:
    start = repository(a="1")
    if fault == "late":  # not the parent of the commit that names it
        repository(a="2")
    repository(passed="0" * 40 if fault == "unknown" else start, **({"a": "3"} if fault == "mixed" else {}))
    if fault == "twice":
        repository(passed="x")
        repository(passed=start)
    if fault == "uncommitted":
        (touched.ROOT / ".ci/passed").write_text(f"{start} ")
    with pytest.raises(ValueError, match=r"\.ci/passed must .*docs/developing\.md says"):
        touched.base()


def test_a_shallow_clone_without_it_leaves_nothing_out(
    touched: ModuleType, repository: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = repository(a="1")
    repository(passed=start)
    repository(a="2")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{tmp_path}", str(clone)], check=True)
    touched.ROOT = clone
    assert touched.base() is None
    assert touched.main([]) == 0
    assert capsys.readouterr().out == "everything\n" * 3
