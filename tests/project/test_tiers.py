"""Which tests are daily: tests/tiers.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiers

ROOMS = {path.parent.name for path in tiers.FOLDER.rglob("test_*.py")}


def test_both_lists_name_tests_that_there_are(request: pytest.FixtureRequest) -> None:
    """Check the two lists: ``make tiers`` writes the first anew; the second is written by hand."""
    names = request.config.stash[tiers.COLLECTED]
    if {name.split("/")[1] for name in names} != ROOMS:
        pytest.skip("not all tests were collected")
    assert tiers.unknown(names) == []


def test_what_costs_most_is_left_out_but_for_a_cheap_case() -> None:
    costs = {
        **{"a.py::one": 0.1, "a.py::dear": 9.0},
        **{"a.py::many[x]": 0.2, "a.py::many[y]": 1.2, "a.py::many[z]": 0.9},
        **{"a.py::all[x]": 1.1, "a.py::all[y]": 1.2},
        **{"a.py::none[x]": 3.1, "a.py::none[y]": 3.2},
    }
    always: set[str] = set()
    out = ["a.py::all[y]", "a.py::dear", "a.py::many[y]", "a.py::many[z]", "a.py::none"]
    assert tiers.chosen(costs, always, set()) == out
    assert tiers.chosen(costs, always, {"a.py::one", "a.py::none[x]", "a.py::new[x]"}) == sorted([*out, "a.py::new[x]"])
    always = {"a.py::dear", "a.py::none[x]", "a.py::many"}
    assert tiers.chosen(costs, always, set()) == ["a.py::all[y]", "a.py::none[y]"]


def test_a_list_has_functions_cases_and_remarks(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("# a remark\n\na.py::f  # why\na.py::g[x]\n")
    lines = tiers.listed(path)
    assert [test for test in ("a.py::f", "a.py::f[1]", "a.py::g[x]", "a.py::g[y]") if tiers.is_listed(test, lines)] == [
        "a.py::f",
        "a.py::f[1]",
        "a.py::g[x]",
    ]
    assert tiers.listed(tmp_path / "none.txt") == set()


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    costs = tiers.Costs()
    costs.seconds = {"a.py::f[a b]": 0.25, "a.py::g": 12.5}
    costs.write(tmp_path / "folder/costs.txt")
    assert tiers.read(tmp_path / "folder/costs.txt") == costs.seconds


class Item:
    """What put_off needs of a test."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, {*marks}
        self.add_marker = self.marks.add

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def test_what_may_be_left_out_comes_last() -> None:
    """Keep the order of the others, and the tests of each file together; another seed gives another order of files."""
    names = ["a.py::one", "b.py::two", "c.py::three", "a.py::four", "b.py::five", "d.py::six"]
    orders = set()
    for seed in range(9):
        items = [Item(name, *(["slow"] if k else ["representative"])) for k, name in enumerate(names)]
        items.insert(3, Item("z.py::daily"))
        tiers.put_off(items, sample=False, seed=seed)
        assert [item.nodeid for item in items[:2]] == ["a.py::one", "z.py::daily"]
        assert all(("put_off" in item.marks) == (k > 1) for k, item in enumerate(items))
        found = [item.nodeid for item in items]
        assert found.index("b.py::five") == found.index("b.py::two") + 1
        orders.add(tuple(found))
    assert len(orders) > 3
    items = [Item("a.py::one", "slow"), Item("b.py::two", "representative"), Item("c.py::three")]
    tiers.put_off(items, sample=True, seed=0)
    assert items[0].nodeid == "b.py::two" and [len(item.marks) for item in items[1:]].count(1) == 1
