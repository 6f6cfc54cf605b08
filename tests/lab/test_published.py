"""Speeds that others publish (``data/published.csv``) beside the planner's."""

import numpy as np
import pandas as pd
import pytest

from moelab.lab import records
from moelab.lab.experiments import published


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
    for _, row in sample[sample.model != "Kimi-K3 2.78T"].head(4).iterrows():
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
