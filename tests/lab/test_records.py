"""Records as tables: read, grouped, paired, and what is not taken for a record."""

import json
import math
import sys

import pytest
from committed import ROOT

from moelab.lab import cite, records

ROWS = [
    {"variant": name, "round": i, "decode_s": s, "decode_tokens": 4, "tokens": [1, i]}
    for name, seconds in {"a": (2.0, 4.0, 8.0), "b": (1.0, 2.0, 4.0)}.items()
    for i, s in enumerate(seconds)
]


@pytest.fixture
def table():
    return records.table({"kind": "bench", "settings": {}, "rows": [dict(row) for row in ROWS]})


def test_a_table_is_written_and_read_again(table, tmp_path):
    table.attrs["load"] = {"disturbed": False}
    records.save(tmp_path / "r.json", table)
    written = json.loads((tmp_path / "r.json").read_text())
    assert [{k: row[k] for k in ROWS[0]} for row in written["rows"]] == ROWS
    assert "tok_s" not in written["rows"][0] and (tmp_path / "r.json").read_text().count("\n") > 6
    again = records.read(str(tmp_path / "r.json"))
    assert "record" not in records.as_json(again)
    assert again.attrs.pop("record").endswith("r.json")
    assert again.attrs == table.attrs | {"machine": None} and list(again) == list(table)
    assert list(again.tok_s) == [4 / row["decode_s"] for row in ROWS]


@pytest.mark.parametrize(
    "more, message",
    [
        ({"load": {"disturbed": True}}, "ran while other work used the processor.*disturbed=True"),
        ({"partial": True}, "was cut off"),
        ({"kind": "layer", "rows": None}, "expected a record with settings and rows, got .*layer"),
    ],
)
def test_what_is_no_record_is_refused(more, message, tmp_path):
    record = {"kind": "bench", "settings": {}, "rows": ROWS} | more
    record = {k: v for k, v in record.items() if v is not None}
    (tmp_path / "r.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        records.read(str(tmp_path / "r.json"))
    if "rows" in record:
        assert len(records.read(str(tmp_path / "r.json"), disturbed=True)) == 6


def test_variants_are_grouped_and_paired_by_round(table):
    assert records.group(table, "decode_s").loc["a"].to_dict() == {
        "median": 4, "p25": 3, "p75": 6, "n": 3
    }  # fmt: skip
    ratios = records.ratios(table[1:], "a")
    assert ratios.loc["b"].to_dict() == {
        "median": 2, "p25": 2, "p75": 2, "n": 2, "low": 2, "high": 2, "confidence": 0.5
    }  # fmt: skip
    assert records.with_ratio(table, "a").ratio.tolist() == [1, 1, 1, 2, 2, 2]
    assert math.isnan(records.with_ratio(table[1:], "a", "decode_s").ratio[3])
    assert records.same_tokens(table, "a") == {"a": (3, 3), "b": (3, 3)}
    with pytest.raises(KeyError, match=r"\['a', 'b'\], got 'c'"):
        records.values(table, "c", "decode_s")


@pytest.mark.parametrize(
    "n, low", [(1, 0), (5, 0), (6, 0), (9, 1), (10, 1), (20, 5), (64, 23), (100, 39)]
)
def test_an_interval_has_the_confidence_of_the_sign_test(n, low):
    """The ranks are those of its tables; below six samples none reaches 95%."""
    found = records.interval(range(n))
    assert (found["low"], found["high"]) == (low, n - 1 - low)
    within = sum(math.comb(n, k) for k in range(low + 1, n - low))
    assert found["confidence"] == pytest.approx(within / 2**n)
    assert (found["confidence"] >= 0.95) == (n > 5)


def test_a_header_says_what_made_it_and_what_else_ran(monkeypatch, capsys):
    seconds = iter([100.0, 103.0])
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(records, "_others_s", lambda: next(seconds))
    monkeypatch.setattr(records.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-m", "moelab", "bench", "/a/b"])
    made = records.Running("bench", {"tokens": 4}).table(ROWS, partial=True)
    header = made.attrs
    assert header["command"] == "python3 -m moelab bench b" and header["partial"]
    assert header["load"]["cores_of_others"] == 3 and header["settings"] == {"tokens": 4}
    cores = header["machine"]["cores"]
    assert header["load"]["disturbed"] == (cores < 30)
    records.print_and_save("report", made)
    said = "report\n" + "DISTURBED: other processes used 3.0 cores; this run is not a record\n"
    assert capsys.readouterr().out == (said if cores < 30 else "report\n")


# Numbers that a text cites


def test_numbers_are_filled_in():
    text = """<!--:
x = [1, 2, 4]
def half(y): return y / 2
-->
| 3 [1, 9]<!--=q(x, ".1f")--> | 7<!--=half(x[2])-->% of 256<!--given--> `16` |"""
    fresh = cite.fill(text)
    assert cite.shown(fresh) == "| 2.0 [1.5, 3.0] | 2.0% of 256 `16` |"
    assert cite.fill(fresh) == fresh and "<!--=half(x[2])-->" in fresh
    assert cite.uncited(fresh) == "| ... | ...% of ... `16` |"


@pytest.mark.parametrize(
    "text, message",
    [
        ("1<!--=nothing-->", "<!--=nothing-->: NameError"),
        ("one<!--=1-->", "no number stands before it"),
        ("1<!--=float('nan')-->", "gives 'nan', which is no number"),
    ],
)
def test_an_expression_that_gives_no_number_is_an_error(text, message, tmp_path):
    (tmp_path / "a.md").write_text(text)
    with pytest.raises(ValueError, match=f"a.md: .*{message}"):
        cite.fill_file(tmp_path / "a.md")


def test_a_notebook_and_a_page_are_filled_in_place(tmp_path, capsys):
    cells = [
        {"cell_type": "markdown", "source": ["<!--:a = 3-->\n", "1<!--=a-->"]},
        {"cell_type": "code", "source": ["1<!--=a-->"]},
    ]
    note, page = tmp_path / "n.ipynb", tmp_path / "p.md"
    note.write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    page.write_text("no number")
    assert cite.main(str(note), str(page)) == 0
    first, second = json.loads(note.read_text())["cells"]
    assert first["source"] == ["<!--:a = 3-->\n", "3<!--=a-->"] and second == cells[1]
    assert capsys.readouterr().out == f"{note}: numbers of 1 lines filled in\n"


def test_variants_run_in_random_rounds_and_rows_stand_in_order():
    calls, kept = [], []

    def variant(name):
        return lambda i: (calls.append((name, i)), {"seconds": i + 1.0, "size": len(name)})[1]

    made = records.interleave(
        "x",
        {"a": variant("a"), "bb": variant("bb"), "own": lambda i: 2.0},
        runs=6,
        settings={"model": "m"},
        warmup=2,
        each_round=lambda i: {"disk": i},
        keep=lambda samples: kept.append((len(samples), samples.attrs["partial"])),
    )
    assert list(zip(made.variant, made["round"])) == [
        (n, i) for i in range(6) for n in ("a", "bb", "own")
    ]
    assert list(made[made.variant == "bb"].seconds) == [1, 2, 3, 4, 5, 6]
    assert (made.disk == made["round"]).all() and set(made[made.variant == "own"].seconds) == {2.0}
    assert made.attrs["settings"]["model"] == "m" and "partial" not in made.attrs
    assert kept == [(3 * i, True) for i in range(1, 7)]
    first = [n for n, i in calls if i >= 0][::2]
    assert sorted({i for _, i in calls}) == list(range(-2, 6)) and set(first) == {"a", "bb"}


def test_a_variant_that_was_killed_is_not_run_again():
    runs = []
    variants = {"dies": lambda i: runs.append(i) or {"killed": True}, "lives": lambda i: 1.0}
    made = records.interleave("x", variants, 3, warmup=0)
    assert runs == [0] and made.killed.sum() == 1 and len(made) == 4
    assert records.interleave("x", {"t": records.timed(lambda: None, k=8)}, 2).k.tolist() == [8, 8]


def test_tables_stand_together(table):
    both = records.together({"here": table, "there": table})
    assert list(both.source.unique()) == ["here", "there"] and len(both) == 12
    assert len(both.attrs["headers"]) == 2 and both.attrs["kind"] == "bench"


def test_recorded_runs_say_where_they_come_from():
    paths = sorted((ROOT / "data" / "results").glob("*.json"))
    assert paths
    for path in paths:
        made = records.read(path.stem).attrs
        assert path.stat().st_size < 2 << 20, path.name  # the largest has 378 texts
        assert {"mlx", "date", "backend"} <= made["machine"].keys(), path.name
        assert "/tmp/" not in path.read_text() and "/root/" not in path.read_text(), path.name
    with pytest.raises(FileNotFoundError, match="no such record; there are"):
        records.read("nothing")


def test_published_figures_name_their_source():
    for told in records.PUBLISHED.values():
        made = records.computed([{"variant": "x", "tok_s": 1.0}], told["source"])
        assert made.attrs["settings"]["model"] == told["source"] and made.attrs["machine"] == ""
