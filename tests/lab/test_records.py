"""Records: tables, intervals, what is not taken for one, and how all are measured again."""

import json
import math
import re
import sys
from string import Formatter

import pytest
import records as recipe
from committed import ROOT

from moelab.lab import records
from moelab.lab.__main__ import SCRIPTS

ROWS = [
    {"variant": name, "round": i, "decode_s": s, "decode_tokens": 4, "tokens": [1, i]}
    for name, seconds in {"a": (2.0, 4.0, 8.0), "b": (1.0, 2.0, 4.0)}.items()
    for i, s in enumerate(seconds)
]
RESULTS = sorted((ROOT / "data" / "results").glob("*.json"))


@pytest.fixture
def table():
    return records.table({"kind": "bench", "settings": {}, "rows": [dict(row) for row in ROWS]})


def test_a_table_is_written_and_read_again(table, tmp_path):
    table.attrs["load"], file = {"disturbed": False}, tmp_path / "r.json"
    records.save(file, table)
    written = json.loads(file.read_text())
    assert written["rows"] == ROWS and file.read_text().count("\n") > 6
    again = records.read(str(file))
    assert again.attrs == table.attrs | {"machine": None, "record": str(file)}
    assert list(again.tok_s) == [4 / row["decode_s"] for row in ROWS]
    assert records.as_json(again) == written | {"machine": None}


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
    assert records.m([1, 2, 4], ".1f", 10) == "20.0"
    assert records.q([1, 2, 4], ".1f") == "2.0 [1.5, 3.0]"
    with pytest.raises(KeyError, match=r"\['a', 'b'\], got 'c'"):
        records.values(table, "c", "decode_s")


@pytest.mark.parametrize("n, low", [(1, 0), (5, 0), (6, 0), (9, 1), (20, 5), (64, 23), (100, 39)])
def test_an_interval_has_the_confidence_of_the_sign_test(n, low):
    """The ranks are those of its tables; below six samples none reaches 95%."""
    found = records.interval(range(n))
    assert (found["low"], found["high"]) == (low, n - 1 - low)
    within = sum(math.comb(n, k) for k in range(low + 1, n - low))
    assert found["confidence"] == pytest.approx(within / 2**n)
    assert (found["confidence"] >= 0.95) == (n > 5)


def test_a_header_says_what_made_it_and_what_else_ran(monkeypatch, capsys):
    seconds, clock = iter([100.0, 103.0]), iter([0.0, 1.0])
    monkeypatch.setattr(records, "_others_s", lambda: next(seconds))
    monkeypatch.setattr(records.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(records, "card", lambda: {"cores": 2})
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-m", "moelab", "bench", "/a/b"])
    made = records.Running("bench", {"tokens": 4}).table(ROWS, partial=True)
    assert made.attrs["command"] == "python3 -m moelab bench b" and made.attrs["partial"]
    assert made.attrs["load"]["cores_of_others"] == 3 and made.attrs["load"]["disturbed"]
    records.print_and_save("report", made)
    said = "report\nDISTURBED: other processes used 3.0 cores; this run is not a record\n"
    assert capsys.readouterr().out == said


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
    assert [row.get("killed") for row in records.as_json(made)["rows"]] == [True, *3 * [None]]
    assert records.interleave("x", {"t": records.timed(lambda: None, k=8)}, 2).k.tolist() == [8, 8]


def test_tables_stand_together(table):
    both = records.together({"here": table, "there": table})
    assert list(both.source.unique()) == ["here", "there"] and len(both) == 12
    assert len(both.attrs["headers"]) == 2 and both.attrs["kind"] == "bench"


def test_published_figures_name_their_source():
    assert records.PUBLISHED and all(told["source"] for told in records.PUBLISHED.values())


# The records of data/results, measured again by the recipe


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_record_says_what_it_shows_and_what_made_it(path):
    assert path.stat().st_size < 2 << 20  # the largest has 378 texts
    assert not re.search("/tmp/|/root/|/work/", path.read_text())
    header = records.read(str(path)).attrs
    assert {"mlx", "date", "backend"} <= header["machine"].keys()
    assert header["what"].endswith(".") and header["part"]
    words = header.get("make", "python data/recipes/records.py {out}").split()
    assert "{out}" in words and ("-m" not in words or words[2] in ("moelab", "moelab.lab"))
    assert words[1:3] != ["-m", "moelab.lab"] or words[3] in SCRIPTS
    assert words[1] == "-m" or (ROOT / words[1]).is_file()
    fields = {field for _, field, _, _ in Formatter().parse(" ".join(words)) if field}
    assert fields <= recipe.CHECKPOINTS.keys() | {"out"}


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Commands that were run, and the load of what they measure next."""
    ran, load, results = [], {"disturbed": False, "cores_of_others": 0.0}, tmp_path / "results"
    monkeypatch.setattr(recipe, "RESULTS", results)
    monkeypatch.setattr(recipe, "WORK", tmp_path / "work")
    monkeypatch.setattr(recipe, "card", lambda: {"backend": "CPU"})
    words = {"what": "A.", "part": "one", "make": "python -m moelab bench {q35_packed} {out}"}
    records.write(results / "cpu_a.json", words | {"settings": {}, "rows": []})
    records.write(results / "cpu_b.json", words | {"settings": {}, "rows": [], "part": "two"})

    def run(command):
        ran.append(command.replace(str(tmp_path), "T"))
        if (file := command.split()[-1]).endswith(".json"):
            rows = [{"variant": "v", "round": i, "seconds": i + 1.0} for i in (0, 1)]
            records.write(file, {"settings": {}, "machine": {}, "load": load, "rows": rows})

    monkeypatch.setattr(recipe, "run", run)
    return ran, load, results


def test_a_part_makes_its_checkpoints_and_its_records(commands, capsys):
    ran, load, results = commands
    assert recipe.main() == 0 and capsys.readouterr().out == "one: cpu_a\ntwo: cpu_b\n"
    assert recipe.main("one") == 0 and "interval" not in capsys.readouterr().out
    assert ran == [
        "python -m moelab synthesize --like qwen3.5-35b-a3b --layers 4 T/work/q35 --quiet",
        "python -m moelab repack T/work/q35 T/work/q35_packed --quiet",
        "python -m moelab bench T/work/q35_packed T/work/cpu_a.json",
    ]
    made = records.read(str(results / "cpu_a.json"))
    assert made.attrs["what"] == "A." and made.seconds.tolist() == [1.0, 2.0]

    old = records.as_json(made.assign(seconds=made.seconds * 9))
    records.write(results / "cpu_a.json", old)
    load["disturbed"] = True
    assert recipe.main("cpu_a") == 1 and "NOT kept" in capsys.readouterr().err
    assert records.read(str(results / "cpu_a.json")).seconds.tolist() == [9.0, 18.0]
    load["disturbed"] = False
    assert recipe.main("cpu_a") == 0
    told = capsys.readouterr().out
    assert "v, seconds: 13.5 [11.2, 15.8] -> 1.5 [1.25, 1.75]" in told
    assert "changed by more than its interval: 1 of 1" in told


@pytest.mark.parametrize(
    "name, backend, said",
    [("cpu_a", "CUDA", "makes records cuda_"), ("x", "CPU", "expected one, two or")],
)
def test_what_cannot_be_measured_here_is_refused(name, backend, said, commands, monkeypatch):
    monkeypatch.setattr(recipe, "card", lambda: {"backend": backend})
    with pytest.raises(SystemExit, match=said):
        recipe.main(name)
    assert not commands[0]
