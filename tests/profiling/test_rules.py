"""The rules, on numbers made by hand: each threshold is tested, and below it nothing is reported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchsparse_rec.profiling import Diagnosis, Finding, thresholds
from torchsparse_rec.profiling._rows import RowWork
from torchsparse_rec.profiling._tables import TableUse
from torchsparse_rec.profiling._trace import Copies, Profile
from torchsparse_rec.profiling.causes import CAUSES, Measured, find_causes

EPSILON = 1e-6
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/profiling.md"


def profile(**times: float) -> Profile:
    """Return a profile of one step of 100 ms."""
    made = Profile(steps=1, step_ms=100.0, step_times=[100.0])
    made.host_ms.update(times)
    return made


def names(measured: Measured) -> list[str]:
    return [finding.cause for finding in find_causes(measured)]


def table(rows: int = 100_000, touched: int = 1000, gradient: str = "dense", **more) -> TableUse:
    return TableUse("users", rows, 16, rows * 64, gradient=gradient, touched=touched, **more)


@pytest.mark.parametrize(("share", "is_one"), [(0.2, True), (0.2 - EPSILON, False), (0.1, False)])
def test_a_slow_loader(share, is_one):
    assert thresholds.LOADER_SHARE == 0.2
    for row_work, cause in ((None, "slow_loader"), (RowWork(1.0, 1.0, "reader.py:7"), "per_row_records")):
        assert names(Measured(loader_share=share, row_work=row_work)) == ([cause] if is_one else [])


@pytest.mark.parametrize(("ms", "is_one"), [(0.02, True), (0.02 - EPSILON, False)])
def test_a_wait_of_microseconds_is_no_slow_loader(ms, is_one):
    assert thresholds.LEAST_WAIT_MS == 0.02
    rows = RowWork(1.0, 1.0, "reader.py:7")
    for row_work, cause in ((None, "slow_loader"), (rows, "per_row_records")):
        assert names(Measured(loader_share=0.9, wait_ms=ms, row_work=row_work)) == ([cause] if is_one else [])


def test_workers_that_do_not_keep_up_are_told_apart_from_none():
    assert "DeviceLoader" in find_causes(Measured(loader_share=0.5, workers=0))[0].setting
    assert "2 workers do not keep up" in find_causes(Measured(loader_share=0.5, workers=2))[0].setting


@pytest.mark.parametrize(("share", "expected"), [(0.25, "per_row_records"), (0.25 - EPSILON, "slow_loader")])
def test_work_by_rows(share, expected):
    assert thresholds.ROW_WORK_SHARE == 0.25
    measured = Measured(loader_share=0.5, row_work=RowWork(share, 2.0, "reader.py:7 (parse)"))
    assert names(measured) == [expected]
    if expected == "per_row_records":
        assert "reader.py:7 (parse) runs 2 times for each example" in find_causes(measured)[0].explanation


@pytest.mark.parametrize(("ms", "expected"), [(30.0, ["needless_copies"]), (29.999, [])])
def test_copies_in_the_step(ms, expected):
    assert thresholds.NEEDLESS_COPY_SHARE == 0.15
    made = profile()
    made.copies["step"], made.step_copies = Copies(4, 8_000_000, ms), [ms]
    measured = Measured(step_share=0.5, profile=made)
    assert names(measured) == expected
    if expected:
        assert "4 a step, 8.00 MB" in find_causes(measured)[0].explanation


@pytest.mark.parametrize(("ms", "expected"), [(25.0, "needless_copies"), (24.0, "slow_loader")])
def test_copies_in_the_loader(ms, expected):
    assert thresholds.LOADER_COPY_SHARE == 0.5
    made = profile(loader=50.0)
    made.copies["loader"] = Copies(3, 6_000_000, ms)
    measured = Measured(loader_share=0.4, step_share=0.6, profile=made)
    assert names(measured) == [expected]
    assert find_causes(measured)[0].share == pytest.approx(0.2 if expected == "needless_copies" else 0.4)


@pytest.mark.parametrize(
    ("share", "touched", "rows", "expected"),
    [
        (0.4, 50_000, 100_000, ["dense_gradient"]),  # half of the rows, half of the cost
        (0.39, 50_000, 100_000, []),
        (0.9, 50_001, 100_000, []),
        (0.9, 0, (2 << 20) // 64, ["dense_gradient"]),
        (0.9, 0, (2 << 20) // 64 - 1, []),
    ],
)
def test_a_dense_gradient_of_a_big_table(share, touched, rows, expected):
    assert (thresholds.IDLE_ROWS, thresholds.DENSE_GRADIENT_SHARE) == (0.5, 0.2)
    assert thresholds.BIG_TABLE_BYTES == 2 << 20
    assert names(Measured(table_gradient_share=share, tables=[table(rows, touched)])) == expected


@pytest.mark.parametrize("gradient", ["sparse", "fused", "none"])
def test_gradients_by_rows_are_no_waste(gradient):
    assert names(Measured(table_gradient_share=0.9, tables=[table(gradient=gradient)])) == []


def test_what_is_changed_depends_on_whose_tables():
    ours = Measured(table_gradient_share=0.9, tables=[table(grad_mode="'dense'")])
    assert find_causes(ours)[0].setting.startswith("grad_mode='sparse' or 'auto', or 'fused' with an optimizer")
    torchs = Measured(table_gradient_share=0.9, tables=[table()])
    assert "convert(model, grad_mode=...)" in find_causes(torchs)[0].setting
    assert "sparse=True" in find_causes(torchs)[0].setting
    auto = Measured(table_gradient_share=0.9, tables=[table(grad_mode="'auto'")])
    assert "use_optimizer(model, optimizer)" in find_causes(auto)[0].setting


def test_many_tables_of_a_medium_size_are_big_together():
    tables = [table(rows=8_000, touched=10) for _ in range(5)]
    assert names(Measured(table_gradient_share=0.5, tables=tables)) == ["dense_gradient"]
    assert names(Measured(table_gradient_share=0.5, tables=tables[:4])) == []


@pytest.mark.parametrize(
    ("share", "products", "expected"),
    [(0.4, 20.0, ["heavy_mlp"]), (0.4 - EPSILON, 39.9, []), (0.9, 19.9, []), (None, 40.0, ["heavy_mlp"])],
)
def test_a_heavy_perceptron(share, products, expected):
    assert (thresholds.HEAVY_DENSE_SHARE, thresholds.MATRIX_PRODUCT_SHARE) == (0.4, 0.2)
    made = profile()
    made.step_products = [products]
    assert names(Measured(dense_share=share, profile=made)) == expected


@pytest.mark.parametrize(("lookups", "ms", "expected"), [(8, 15.0, ["unfused_lookups"]), (7, 40.0, []), (8, 14.9, [])])
def test_lookups_one_by_one(lookups, ms, expected):
    assert (thresholds.MANY_LOOKUPS, thresholds.UNFUSED_LOOKUP_SHARE) == (8, 0.3)
    made = profile(lookup=ms, **{"lookup backward": 10.0}, optimizer=10.0)
    made.host_ms["other"] = 100.0 - 20.0 - ms
    made.lookups = lookups
    measured = Measured(profile=made, tables=[table(gradient="sparse")] * 5, parameters=10)
    assert names(measured) == expected


@pytest.mark.parametrize(("busy", "expected"), [(90.0, ["host_sync"]), (90.1, [])])
def test_waiting_for_a_device_that_is_busy_costs_nothing(busy, expected):
    assert thresholds.HOST_SYNC_SHARE == 0.1
    made = profile()
    made.device_ms, made.wait_ms, made.waits = {"other": busy}, 80.0, {"aten::item": 2}
    assert names(Measured(profile=made)) == expected


def test_copies_to_a_device():
    made = profile()
    made.device_ms = {"other": 90.0}
    made.copies = {"HtoD": Copies(3, 10_000_000, 20.0), "step": Copies(3, 10_000_000, 50.0)}
    (found,) = find_causes(Measured(profile=made))
    assert (found.cause, found.share) == ("needless_copies", pytest.approx(0.2))
    assert "DeviceLoader" in found.setting and "pin_memory" not in found.setting
    made.pageable = 3
    assert "pin_memory=True" in find_causes(Measured(profile=made))[0].setting


def test_on_a_device_it_is_the_devices_time_that_products_take():
    made = profile()
    made.step_products, made.device_ms, made.product_ms = [90.0], {"dense": 80.0, "lookup": 20.0}, 19.0
    assert names(Measured(dense_share=0.9, profile=made)) == []
    made.product_ms = 20.0
    assert names(Measured(dense_share=0.9, profile=made)) == ["heavy_mlp"]


def test_the_best_step_counts_also_if_no_profiler_ran():
    made = profile()
    made.step_products = [15.0]
    assert names(Measured(dense_share=0.9, profile=made)) == []
    assert names(Measured(dense_share=0.9, profile=made, best_step_ms=75.0)) == ["heavy_mlp"]


def test_a_small_layer_that_was_taken_out_does_not_hide_the_products():
    made = profile()
    made.step_products = [80.0]
    for share in (None, 0.0, 0.01):
        (found,) = find_causes(Measured(dense_share=share, step_share=0.5, profile=made))
        assert (found.cause, found.share) == ("heavy_mlp", pytest.approx(0.4))
    assert names(Measured(dense_share=0.01, step_share=0.499, profile=made)) == []


def test_the_most_expensive_comes_first():
    made = profile()
    made.step_copies, made.step_times = [10.0, 50.0, 90.0, 70.0, 80.0], [100.0, 900.0]  # lower quartile, best step
    measured = Measured(loader_share=0.4, step_share=0.6, profile=made, table_gradient_share=0.35, tables=[table()])
    found = find_causes(measured)
    assert [f.cause for f in found] == ["slow_loader", "dense_gradient", "needless_copies"]
    assert Diagnosis(findings=found).verdict == "slow_loader"
    lines = Diagnosis(findings=found).report().splitlines()
    assert lines[0] == "verdict: slow_loader, 40% of the loop's time"
    assert [line.split(":")[0] for line in lines if line.startswith("also")] == ["also", "also"]


def test_json_holds_everything():
    made = Diagnosis(
        findings=[Finding("host_sync", 0.3, "seen", "do")],
        copies={"step": Copies(1, 2, 3.0)},
        trace=Path("x/trace.json"),
    )
    content = json.loads(made.to_json())
    assert content["verdict"] == "host_sync"
    assert content["findings"] == [{"cause": "host_sync", "share": 0.3, "explanation": "seen", "setting": "do"}]
    assert content["copies"]["step"] == {"count": 1, "bytes": 2, "ms": 3.0}
    assert content["trace"] == "x/trace.json"


# ---- The document ----------------------------------------------------------------------------------------------------


def test_the_document_has_every_threshold_with_its_value():
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| ([\d.]+)", DOCUMENT.read_text(), flags=re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {
        name: float(getattr(thresholds, name)) for name in thresholds.__all__
    }


def test_the_document_has_every_cause():
    text = DOCUMENT.read_text()
    assert [cause for cause in CAUSES if f"`{cause}`" not in text] == []
