"""compat.tensorflow answers as TensorFlow did when the golden vectors were recorded; TensorFlow is not needed here."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from devices import HARDWARE

import torchsparse_rec.compat.tensorflow as tf
from torchsparse_rec.compat import goldens
from torchsparse_rec.compat._parity import OPERATORS
from torchsparse_rec.compat._parity.case import FLOATS, HALVES, Outcome
from torchsparse_rec.compat._parity.compare import compare
from torchsparse_rec.compat._parity.evaluate import run_ours
from torchsparse_rec.compat.tensorflow.arguments import as_size, as_strings, as_tensor

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = sorted((ROOT / "tests/goldens").glob("*.json.gz"))


# ---- Golden vectors -------------------------------------------------------------------------------------------------


def test_there_is_a_golden_file_for_every_operator_and_they_are_small():
    assert len(GOLDENS) == len(OPERATORS)
    assert sum(file.stat().st_size for file in GOLDENS) < 800_000


# Samplers draw on the CPU, also for tensors on CUDA: there is no kernel to emulate.
SAMPLING = [file for file in GOLDENS if re.search("random_|sampled_|nce_", file.name)]


def _name(file):
    return file.name.removesuffix(".json.gz")


@pytest.mark.parametrize("file", [file for file in GOLDENS if file not in SAMPLING], ids=_name)
def test_answers_as_tensorflow(file, device):
    _check(file, device)


@pytest.mark.parametrize("device", HARDWARE, indirect=True)
@pytest.mark.parametrize("file", SAMPLING, ids=_name)
def test_samples_as_tensorflow(file, device):
    _check(file, device)


def _check(file, device):
    cases = goldens.load(file)
    assert len(cases) >= 10
    for case, theirs in cases:
        ours = run_ours(case, device)
        assert compare(case, ours, theirs).mismatches == [], case.note


def test_the_comparison_sees_a_wrong_bit_dtype_shape_order_and_error():
    case, theirs = goldens.load(ROOT / "tests/goldens/sparse_segment_sum.json.gz")[0]
    good = run_ours(case)
    assert compare(case, good, theirs).mismatches == []
    output = good.values["output"]
    slices = good.values["sparse gradient of data"]
    for name, wrong in [
        ("output", output * (1 + 2.0**-20)),
        ("output", output.double()),
        ("output", output[:1]),
        ("output", torch.full_like(output, float("nan"))),
        ("gradient of data", good.values["gradient of data"].flip(0)),
        ("sparse gradient of data", replace(slices, indices=slices.indices.flip(0))),
        ("sparse gradient of data", replace(slices, values=slices.values * (1 + 2.0**-20))),
    ]:
        assert compare(case, Outcome({**good.values, name: wrong}), theirs).mismatches
    missing = {name: value for name, value in good.values.items() if name != "gradient of data"}
    assert compare(case, Outcome(missing), theirs).mismatches
    assert compare(case, Outcome(error="ValueError: no"), theirs).mismatches
    assert compare(case, good, Outcome(error="InvalidArgumentError")).mismatches


def test_a_golden_file_can_be_read_back(tmp_path):
    case, theirs = goldens.load(ROOT / "tests/goldens/unique_with_counts.json.gz")[-1]
    entry = goldens._encode_case(case, theirs)
    again, outcome = goldens._decode_case(case.operator, entry)
    assert goldens._encode_case(again, outcome) == entry
    assert compare(again, outcome, theirs).mismatches == []


# ---- What TensorFlow has wrong, or torch has not --------------------------------------------------------------------


def test_subnormal_numbers_are_kept(device):
    data = torch.tensor([1e-40, 2e-40], device=device)
    assert tf.sparse.segment_sum(data, [0, 1], [0, 0]).item() == data.double().sum().float().item() != 0
    assert tf.unique(data).y.tolist() == data.tolist()


@pytest.mark.parametrize("dtype", FLOATS)
def test_unique_takes_the_zeros_for_equal_and_keeps_the_first(dtype, device):
    x = torch.tensor([1.0, -0.0, 0.0], dtype=dtype, device=device)
    y, idx = tf.unique(x)
    assert idx.tolist() == [0, 1, 1]
    assert torch.signbit(y).tolist() == [False, True]


@pytest.mark.parametrize("dtype", HALVES)
def test_unique_of_every_half_number(dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    y, idx, count = tf.unique_with_counts(torch.cat([x, x]))
    nans = int(x.isnan().sum())
    assert y.shape[0] == 2**16 - 1 + nans  # the two zeros are one; every NaN is distinct
    restored = y[idx.long()].view(torch.int16)
    assert torch.equal(restored[torch.cat([x, x]) != 0], torch.cat([x, x])[torch.cat([x, x]) != 0].view(torch.int16))
    assert int(count.sum()) == 2**17


def test_strings_from_pyarrow():
    pyarrow = pytest.importorskip("pyarrow")
    words = ["to", "be", "", "é", "to"]
    array = pyarrow.array(words)
    assert tf.unique(array).y.tolist() == [b"to", b"be", b"", "é".encode()]
    assert tf.strings.to_hash_bucket_fast(array, 97).tolist() == tf.strings.to_hash_bucket_fast(words, 97).tolist()


# ---- As TensorFlow 2.21 answers, by hand ----------------------------------------------------------------------------


def test_lengths_of_uniform_inner_rows():
    rows = tf.RaggedTensor.from_row_splits(np.zeros((3, 2, 3)), [0, 1, 3])
    assert rows.row_lengths(2).to_list() == [[2], [2, 2]]
    assert rows.row_lengths(3).to_list() == [[[3, 3]], [[3, 3], [3, 3]]]


def test_safe_lookups_of_vectors_and_integers():
    ids = tf.SparseTensor([[0], [3]], [1, 2], [5])
    assert tf.nn.safe_embedding_lookup_sparse(torch.tensor([1.0, 2.0, 4.0]), ids, default_id=0).item() == 3.0
    with pytest.raises(ValueError, match="embedding_weights must have rank >= 1, got a scalar; a list is"):
        tf.nn.safe_embedding_lookup_sparse([1.0, 2.0, 4.0], ids, default_id=0)
    ids = tf.SparseTensor([[2, 0], [0, 0], [0, 1]], [2, -1, 1], [4, 2])
    table = torch.tensor([[3, -4], [7, 8], [0, 5]])
    found = tf.nn.safe_embedding_lookup_sparse(table, ids, combiner="sum", default_id=0)
    assert found.dtype == torch.int64 and found.tolist() == [[7, 8], [3, -4], [0, 5], [3, -4]]
    with pytest.raises(ValueError, match="embedding_weights must be floating for combiner 'mean'"):
        tf.nn.safe_embedding_lookup_sparse(table, ids)


def test_parts_and_sums_of_sparse_tensors():
    x = tf.SparseTensor([[1, 0], [0, 2], [1, 0]], [2.0, 3.0, 4.0], [2, 3])
    both = tf.sparse.concat(-1, [x, x])
    assert both.shape == (2, 6) and both.values.tolist() == [3, 3, 2, 4, 2, 4]
    assert tf.sparse.slice(x, [1, 0], [1, 9]).values.tolist() == [2, 4]
    assert tf.sparse.expand_dims(x).shape == (2, 3, 1)
    assert tf.sparse.sparse_dense_matmul(x, torch.eye(3)).tolist() == [[0, 0, 3], [6, 0, 0]]
    assert tf.sparse.sparse_dense_matmul(torch.eye(2), x).tolist() == [[0, 0, 3], [6, 0, 0]]
    counts = tf.sparse.bincount([[1, 1, 3], [0, 7, 7]], axis=-1, maxlength=4)
    assert counts.indices.tolist() == [[0, 1], [0, 3], [1, 0]] and counts.values.tolist() == [2, 1, 1]
    crossed = tf.ragged.cross([[["a"], ["e"]], tf.RaggedTensor.from_row_lengths([5, 6, 7], [2, 1])])
    assert crossed.to_list() == [[b"a_X_5", b"a_X_6"], [b"e_X_7"]]


# ---- Gradients ------------------------------------------------------------------------------------------------------


def test_sparse_gradient_of_a_leaf_is_coalesced_exactly_when_its_rows_are_unique(device):
    data = torch.ones(6, 2, device=device, requires_grad=True)
    tf.sparse.segment_mean(data, [4, 1, 4], [0, 0, 1], sparse_gradient=True).sum().backward()
    assert data.grad.is_coalesced()
    assert data.grad.indices().tolist() == [[1, 4]]
    assert data.grad.values().tolist() == [[0.5, 0.5], [1.5, 1.5]]
    tf.sparse.segment_sum(data, [1], [0], sparse_gradient=True).sum().backward()
    assert data.grad.is_coalesced() == (device != "cuda")  # where torch puts one gradient behind the other
    assert data.grad.to_dense()[:, 0].tolist() == [0.0, 1.5, 0.0, 0.0, 1.5, 0.0]
    torch.nn.functional.embedding(torch.tensor([4, 0, 4], device=device), data, sparse=True).sum().backward()
    assert not data.grad.is_coalesced()
    assert data.grad.to_dense()[:, 0].tolist() == [1.0, 1.5, 0.0, 0.0, 3.5, 0.0]


def test_sparse_gradient_of_an_intermediate_tensor_and_by_autograd_grad(device):
    leaf = torch.ones(4, 2, device=device, requires_grad=True)
    data = leaf.clone()
    output = tf.sparse.segment_sum(data, [3, 0], [0, 1], sparse_gradient=True)
    (gradient,) = torch.autograd.grad(output.sum(), data)
    assert gradient.is_coalesced() and gradient.indices().tolist() == [[0, 3]]


def test_second_derivative(device):
    # The gradient, as in TensorFlow, goes through v * v around the operator. output = [a^2 + c^2, c^2].
    data = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=device, requires_grad=True)
    output = tf.sparse.segment_sum(data * data, [0, 2, 2], [0, 0, 1])
    (first,) = torch.autograd.grad((output * output).sum(), data, create_graph=True)
    a, c = 1.0, 3.0
    assert first.tolist() == [4 * a * (a**2 + c**2), 0.0, 4 * c * (a**2 + 2 * c**2)]
    (second,) = torch.autograd.grad(first.sum(), data)
    assert second.tolist() == [12 * a**2 + 4 * c**2 + 8 * a * c, 0.0, 8 * a * c + 4 * a**2 + 24 * c**2]


# ---- Arguments ------------------------------------------------------------------------------------------------------


def test_numbers_get_tensorflows_dtypes():
    assert as_tensor("x", [1, 2]).dtype == torch.int32
    assert as_tensor("x", [2**40]).dtype == torch.int64
    assert as_tensor("x", [1, 2.5]).dtype == torch.float32
    assert as_tensor("x", [True]).dtype == torch.bool
    assert as_tensor("x", []).dtype == torch.float32
    assert as_tensor("x", [], empty=torch.int32).dtype == torch.int32
    assert as_tensor("x", np.float64(2)).dtype == torch.float64
    for bad in (["a"], [[1], [2, 3]], None, [2**64], [1j]):
        with pytest.raises(ValueError, match="x must be a tensor or numbers"):
            as_tensor("x", bad)


def test_sizes():
    assert as_size("n", 3) == as_size("n", np.int64(3)) == as_size("n", torch.tensor(3, dtype=torch.int32)) == 3
    for bad in (3.0, "3", torch.tensor([3]), torch.tensor(3.0), np.array([3])):
        with pytest.raises(ValueError, match="n must be"):
            as_size("n", bad)


def test_strings_are_bytes_of_any_shape():
    assert as_strings("x", [["é", b"\xff"], ["", "b"]]).tolist() == [["é".encode(), b"\xff"], [b"", b"b"]]
    assert as_strings("x", [1, 2]) is None
    assert as_strings("x", torch.zeros(1)) is None
    with pytest.raises(ValueError, match=r"x\[1\] must be str or bytes"):
        as_strings("x", ["a", 1])


def test_raw_ops_take_keywords_only():
    with pytest.raises(TypeError):
        tf.raw_ops.Unique(torch.tensor([1]))
    result = tf.raw_ops.SparseSegmentSumGradV2(
        grad=torch.ones(1, 2), indices=[1, 1], segment_ids=[0, 0], dense_output_dim0=3, name="ignored"
    )
    assert result._fields == ("output", "sorted_unique_indices")
    assert result.output.tolist() == [[2.0, 2.0]]


# ---- Imports --------------------------------------------------------------------------------------------------------


def test_compat_is_no_top_level_package():
    run = subprocess.run([sys.executable, "-c", "import compat"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "import it as torchsparse_rec.compat" in run.stderr


def test_tensorflow_is_imported_only_when_it_is_used():
    program = (
        "import sys\n"
        "from torchsparse_rec.compat import checkpoints, converters, goldens, keras, parity, tensorflow, torchrec\n"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_missing_tensorflow_is_named(monkeypatch):
    from torchsparse_rec.compat import converters

    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"pip install 'torchsparse-rec\[tensorflow\]'"):
        converters.tensor_to_tensorflow(torch.zeros(1))


def test_every_public_name_has_a_row_in_the_table_of_parity():
    text = (ROOT / "compat/PARITY.md").read_text()
    names = [operator.split(" ")[0] for operator in OPERATORS]
    names = [name if name.startswith("keras.") else f"tf.{name}" for name in names]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_names_of_tensorflow_1_and_deeprec_have_a_row_that_names_what_exists():
    import torchsparse_rec
    from torchsparse_rec.compat.tensorflow import optimizers

    text = (ROOT / "compat/PARITY.md").read_text()
    for name in ("tf.get_embedding_variable", "tf.train.AdamAsyncOptimizer", "tf.train.Saver", "get_slot", "minimize"):
        assert any(name in row.split("|")[1] for row in text.splitlines() if row.startswith("|")), name
    for path in re.findall(r"`torchsparse_rec\.((?:nn|optim)\.\w+)`", text):
        package, name = path.split(".")
        assert hasattr(getattr(torchsparse_rec, package), name), path
    assert optimizers.import_slots and optimizers.export_slots and optimizers.keras.AdamW
