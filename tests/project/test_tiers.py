"""Which tests are daily, what they cost, and which process runs them: tests/tiers.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiers


def test_daily_tests_must_fit_in_the_budget() -> None:
    """What a run prints, in which all rooms were collected; otherwise it is silent."""
    rooms = sorted({path.parent.name for path in tiers.FOLDER.rglob("test_*.py")})
    seconds = {f"tests/{room}/test_x.py": 1.0 for room in rooms}
    total = len(rooms) + tiers.OVERHEAD
    assert tiers.over_budget(seconds) == (
        f"daily tests: {total:.0f} of {tiers.BUDGET:.0f} processor-seconds, as tests/costs.txt says",
        False,
    )
    words, over = tiers.over_budget({**seconds, "tests/nn/test_x.py": tiers.BUDGET}) or ("", False)
    assert over and words.endswith("mend the dearest")
    assert tiers.over_budget({"tests/nn/test_x.py": tiers.BUDGET}) is None


def test_cheap_functions_are_whole_and_of_dear_ones_some_cases_are_daily() -> None:
    cases = {f"a.py::f[{k}]" for k in range(40)}
    assert tiers.daily(cases, {"a.py::f": tiers.SHARE}, {}).keys() == cases
    cost = 20 * tiers.SHARE
    chosen = tiers.daily(cases, {"a.py::f": cost}, {})
    assert len(chosen) == 2 and sum(chosen.values()) == pytest.approx(tiers.SHARE)
    assert tiers.daily(sorted(cases), {"a.py::f": cost}, {}) == chosen
    assert len(tiers.daily(cases, {"a.py::f": 40 * tiers.DEAREST}, {})) == 1
    assert tiers.daily(cases, {"a.py::f": 41 * tiers.DEAREST}, {}) == {}


def test_some_tests_are_daily_whatever_they_cost() -> None:
    cases, costs = [f"a.py::f[{k}]" for k in range(3)], {"a.py::f": 30.0}
    assert tiers.daily(cases, costs, {"a.py::f[1]": None, "a.py::f[2]": 4.0}) == {"a.py::f[1]": 10.0, "a.py::f[2]": 4.0}


def test_what_has_not_been_measured_costs_a_second() -> None:
    assert tiers.daily(["a.py::f"], {}, {}) == {"a.py::f": tiers.UNMEASURED}


def test_costs_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"a.py::f[a b]": 0.25, "a.py::f[c]": 0.5, "a.py::g": 12.5}
    tiers.write(tmp_path / "folder/costs.txt", costs)
    assert tiers.read(tmp_path / "folder/costs.txt") == costs
    monkeypatch.setattr(tiers, "COSTS", tmp_path / "costs.txt")
    tiers.main(tmp_path / "folder/costs.txt")
    assert tiers.read(tiers.COSTS) == {"a.py::f": 0.75, "a.py::g": 12.5}


def test_a_slower_machine_measures_the_same_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "COSTS", tmp_path / "costs.txt")
    tiers.write(tiers.COSTS, {"a.py::f": 0.5, "a.py::g": 4.0, "a.py::h": 1.0, "a.py::tiny": 0.01})
    measured = {"a.py::f": 1.0, "a.py::g[a]": 8.0, "a.py::h": 10.0, "a.py::new": 3.0, "a.py::tiny": 0.5}
    tiers.write(tmp_path / "measured.txt", measured)
    tiers.main(tmp_path / "measured.txt")
    wanted = {"a.py::f": 0.5, "a.py::g": 4.0, "a.py::h": 5.0, "a.py::new": 1.5, "a.py::tiny": 0.25}
    assert tiers.read(tiers.COSTS) == wanted


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("touched", ["", "everything"])
def test_each_file_is_in_the_part_of_one_process(parts: int, touched: str) -> None:
    files = tiers.parts_of_files(parts, touched)
    assert len(files) == parts
    wanted = sorted(str(path.relative_to(tiers.FOLDER)) for path in tiers.FOLDER.rglob("test_*.py"))
    assert sorted(x for part in files for x in part) == wanted
