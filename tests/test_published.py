"""data/published.csv: decoding speeds that others publish, and where a stranger finds each.

``verified``: ``record read`` (the authors' dated records or benchmark pages), ``claim`` (a thread
or a README), ``not read again`` (copied from an earlier list of ours). ``ssd_from``: whether the
SSD's rate is the source's own, another source's for such a machine, or unknown. ``contradicts``: a
row that says otherwise. Figures are their authors'; an empty field is not in the source.
"""

import csv
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from moelab import DATA
from moelab.lab import records
from moelab.lab.experiments import published

with open(DATA / "published.csv", newline="") as file:
    ROWS = list(csv.DictReader(file))
NUMBERS = {"ram_gb", "ssd_gb_s", "top_k", "held_gb", "hit_rate", "tok_s", "first_token_s"}


def test_each_row_has_a_speed_and_says_where_it_stands():
    assert all(None not in row and None not in row.values() for row in ROWS)  # fields as the header
    assert all(row["source"] and row["where"] and float(row["tok_s"]) > 0 for row in ROWS)
    assert {row["verified"] for row in ROWS} == {"record read", "claim", "not read again"}
    numbers = [float(row[name]) for row in ROWS for name in NUMBERS if row[name]]
    assert min(numbers) >= 0
    assert all(float(row["hit_rate"]) <= 1 for row in ROWS if row["hit_rate"])


def test_an_ssds_rate_says_whose_it_is():
    for row in ROWS:
        whose, _, name = row["ssd_from"].partition(": ")
        assert whose in ("source", "other source", "unknown") and bool(row["ssd_gb_s"]) == (
            whose != "unknown"
        )
        assert (whose == "other source") == bool(name)


def test_no_row_stands_twice():
    assert max(Counter(tuple(row.values()) for row in ROWS).values()) == 1


def test_sources_are_divided_by_name_and_each_half_has_machines_and_models():
    rows = published.rows()
    count = rows[rows.why_not == ""]
    assert (count.groupby("group").side.nunique() == 1).all()
    for _, half in count.groupby("side"):
        assert min(half.group.nunique(), half.machine.nunique(), half.model.nunique()) >= 4


def test_a_sources_factor_is_the_median_of_its_rows():
    rows = published.rows().head(4)
    rows = rows.assign(group="one", side="left out", model="a", predicted_tok_s=3.0)
    rows["tok_s"] = [1.0, 4.0, 3.0, 3.0]
    found = published.by_source(rows)
    assert found.loc["one", ["worst", "factor"]].tolist() == pytest.approx([3, (1 + 4 / 3) / 2])
    assert published.reached(found)["median"] == found.loc["one", "factor"]


def test_the_record_is_what_is_predicted_now():
    record = records.read("cpu_planned_published")
    table = published.rows()
    table = table[table.why_not == ""]
    assert len(record) == len(table) and (record.published_tok_s == table.tok_s.to_numpy()).all()
    sample = table.assign(record=record.predicted_tok_s.to_numpy()).groupby("group").head(1)
    for _, row in sample[sample.model != "Kimi-K3 2.78T"].iterrows():
        assert published.predict(row).tok_s == pytest.approx(row.record, rel=1e-3)


def test_a_source_whose_rows_are_all_as_far_off_is_right_once_one_is_known():
    rows = {"group": ["a"] * 3 + ["b"], "side": "left out", "tok_s": [1.0, 2.0, 3.0, 4.0]}
    setting = dict.fromkeys(("model", "bits", "machine", "ram_gb", "ssd_gb_s", "top_k"), 1)
    table = pd.DataFrame(rows | setting | {"slots_or_cache": ""})
    found = published.by_source(table.assign(predicted_tok_s=2 * table.tok_s))
    assert found.factor.to_numpy() == pytest.approx(2) and found.engine_known["a"] == pytest.approx(
        1
    )
    assert np.isnan(found.engine_known["b"])  # there is no other row
