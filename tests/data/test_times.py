"""Hours and weekdays of dates and times in every form."""

from datetime import date, datetime, time

import numpy as np
import pyarrow as pa
import pytest

from torchsparse_rec import features
from torchsparse_rec.data import read_csv, to_record_batch, with_time_parts

# A Sunday.
WHEN = datetime(2026, 11, 29, 20, 15)
SECONDS = 1795983300


def test_hours_and_weekdays_of_every_form(tmp_path):
    texts = ["2026-11-29 20:15", None, "2026-11-30T00:00:01"]
    zoned = pa.array([SECONDS, None, SECONDS + 13501], pa.timestamp("s", "UTC"))
    forms = [texts, pa.array(texts).cast(pa.timestamp("ms")), pa.array(texts).dictionary_encode(), zoned]
    forms += [[WHEN, None, datetime(2026, 11, 30, 0, 0, 1)], np.array(texts, "datetime64[ns]")]
    for form in forms:
        made = with_time_parts({"t": form, "x": [1, 2, 3]}, "t")
        assert made["t_hour"].to_pylist() == [20, None, 0] and made["t_weekday"].to_pylist() == [6, None, 0]
    for form in (["2026-11-29T20:15Z"], ["2026-11-29 22:15+02:00"]):
        assert with_time_parts({"t": form}, "t")["t_hour"].to_pylist() == [20]
    for unit, factor in (("s", 1), ("ms", 1000), ("ns", 10**9)):
        made = with_time_parts(pa.table({"t": [SECONDS * factor, None]}), "t", "hour", unit=unit)
        assert made["t_hour"].to_pylist() == [20, None] and "t_weekday" not in made
    days = with_time_parts({"t": [date(2026, 11, 29), None]}, "t")
    assert days["t_hour"].to_pylist() == [0, None] and days["t_weekday"].to_pylist() == [6, None]
    assert with_time_parts({"t": [time(7, 30)]}, "t", ["hour"])["t_hour"].to_pylist() == [7]
    assert with_time_parts({"t": [None]}, "t")["t_hour"].to_pylist() == [None]
    for form in (zoned, texts):
        made = with_time_parts({"t": form}, "t", timezone="Asia/Tokyo")
        assert made["t_hour"].to_pylist() == [5, None, 9] and made["t_weekday"].to_pylist() == [0, None, 0]
    (tmp_path / "f.csv").write_text("t,x\n2026-11-29 20:15:00,1\n,2\n")
    (batch,) = read_csv(tmp_path / "f.csv", types={"t": "timestamp[s]"})
    batch = with_time_parts(batch, "t")
    columns = [features.categorical_column_with_identity(f"t_{part}", n) for part, n in (("hour", 24), ("weekday", 7))]
    assert features.FeatureTransform(columns)(batch).sparse.values().tolist() == [20, 6]
    assert to_record_batch(batch).schema.names == ["t", "x", "t_hour", "t_weekday"]


def test_what_is_no_time_is_named():
    for column, given, problem in (
        (["2026-11-29", "noon"], {}, "column 't' must hold times such as .*, got noon at row 1"),
        (["2026-11-29 20:15Z", "2026-11-29 20:15"], {}, "column 't' must hold times .* at row 1"),
        (
            [date(2026, 11, 29)],
            {"timezone": "UTC"},
            "column 't' must hold times with dates to have a timezone",
        ),
        ([1], {}, "column 't' holds int64, of no unit: give unit='s'"),
        ([1], {"unit": "h"}, "unit must be one of s, ms, us, ns, got 'h'"),
        ([1.5], {}, "column 't' must hold dates, times, texts or integers, got double"),
        ([time(7)], {}, "column 't' must hold dates to have weekdays, got time64"),
        ([WHEN], {"parts": ["minute"]}, "parts must be among hour, weekday, got 'minute'"),
        ([WHEN], {"timezone": "Moon"}, "column 't': .*Moon"),
    ):
        with pytest.raises(ValueError, match=f"with_time_parts: {problem}"):
            with_time_parts({"t": column}, "t", **given)
    with pytest.raises(ValueError, match=r"batch must have column 't', got \['x'\]"):
        with_time_parts({"x": [1]}, "t")
    with pytest.raises(ValueError, match="batch must have no column t_hour"):
        with_time_parts({"t": [WHEN], "t_hour": [1]}, "t")
    with pytest.raises(TypeError, match="batch must be a mapping or a frame, got list"):
        with_time_parts([WHEN], "t")
