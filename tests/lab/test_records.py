"""Records: tables, intervals, runs that are refused, recipes, and verdicts on claims."""

import json
import math
import os
import re
from string import Formatter

import pytest
import records as recipe
from committed import ROOT

from moelab.lab import claims, records
from moelab.lab.__main__ import SCRIPTS, main

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
    assert written["texts"] == [[1, 0], [1, 1], [1, 2]], "each text is written once"
    again = records.read(str(file))
    assert list(again.tok_s) == [4 / row["decode_s"] for row in ROWS]
    read = records.as_json(again)
    assert read["rows"] == ROWS and "texts" not in read
    assert read["settings"] == written["settings"] and read["load"] == written["load"]
    records.write(file, json.loads(file.read_text()))  # as the recipe does
    assert json.loads(file.read_text()) == written
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_run_that_was_disturbed_or_cut_off_is_refused(tmp_path, monkeypatch, capsys):
    path = str(tmp_path / "r.json")
    monkeypatch.setattr(records, "_others_s", iter([100.0, 103.0]).__next__)
    monkeypatch.setattr(records.time, "monotonic", iter([0.0, 1.0]).__next__)
    monkeypatch.setattr(records, "card", lambda: {"cores": 2})
    made = records.Running("bench").table(ROWS)
    records.print_and_save("report", made, path)
    assert "DISTURBED: others used 3.0 cores" in capsys.readouterr().out
    with pytest.raises(ValueError, match="was disturbed"):
        records.read(path)
    made.attrs |= {"load": {}, "partial": True}
    records.save(path, made)
    with pytest.raises(ValueError, match="was cut off"):
        records.read(path)
    assert len(records.read(path, disturbed=True)) == 6


def test_a_run_whose_speed_drifts_is_disturbed():
    def rows(*seconds, scale=9):
        each = [(i, scale * s, over) for i, s in enumerate(seconds) for over in (1, 3, 0.5)]
        return [{"variant": str(over), "round": i, "decode_s": over * s} for i, s, over in each]

    assert records.drift(rows(1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0)) == 0  # in single rounds
    assert records.drift(rows(1.0, 9.0, 1.0, 9.0)) == 0  # too few rounds
    assert records.drift(rows(1.0, 1.0, 1.1, 1.1, 1.25, 1.25)) == pytest.approx(0.25)
    assert records.drift(rows(1.0, 1.0, 1.1, 1.1, 1.25, 1.25, scale=0.5)) == 0  # too short a time
    assert records.drift([{"variant": "a", "round": i, "counted": i} for i in range(9)]) == 0
    assert records.Running("bench").record(rows(1.0, 1.0, 1.0, 1.0, 1.2, 1.2))["load"]["disturbed"]


def test_a_records_command_names_no_folder_of_the_machine(monkeypatch):
    words = ["/usr/bin/python", "--out=/tmp/a.json", "base=.,/tmp/model,limit=4", "data/b.py"]
    monkeypatch.setattr(records.sys, "orig_argv", words)
    told = records.Running("bench").header["command"]
    assert told == "python --out=a.json base=.,model,limit=4 data/b.py"


def test_variants_are_grouped_and_paired_by_round(table):
    found = records.group(table, "decode_s").loc["a"]
    assert found.to_dict() == {"median": 4, "p25": 3, "p75": 6, "n": 3}
    ratios = records.ratios(table[1:], "a")
    assert ratios.loc["b"].to_dict() == {
        "median": 2, "p25": 2, "p75": 2, "n": 2, "low": 2, "high": 2, "confidence": 0.5
    }  # fmt: skip
    assert records.with_ratio(table, "a").ratio.tolist() == [1, 1, 1, 2, 2, 2]
    assert math.isnan(records.with_ratio(table[1:], "a", "decode_s").ratio[3])
    assert records.same_tokens(table, "a") == {"a": (3, 3), "b": (3, 3)}
    assert records.m([1, 2, 4], ".1f") == "2.0"
    assert records.q([1, 2, 4], ".1f") == "2.0 [1.5, 3.0]"
    assert records.span([1, 2, 4], ".1f") == "2.0 [1.0, 4.0]"
    with pytest.raises(KeyError, match=r"\['a', 'b'\], got 'c'"):
        records.values(table, "c", "decode_s")


def test_a_ratio_that_parts_from_its_record_is_said(table):
    recorded = table.assign(decode_s=table.decode_s.where(table.variant == "b", table.decode_s * 9))
    recorded = records.table({"rows": recorded[["variant", "round", "decode_s", "decode_tokens"]]})
    recorded.attrs = {"machine": {"gpu": None, "cpu": "Z80", "date": "1976"}, "record": "cpu_x"}
    assert not records.parted(table, recorded, ("a", "a"), ("c", "a"))
    told = records.parted(table, recorded, ("a", "b"))
    assert "(Z80, 1976, cpu_x): a token's time, a over b 2.00 [2.00, 2.00], recorded 18.00" in told


@pytest.mark.parametrize("n, low", [(1, 0), (5, 0), (6, 0), (9, 1), (20, 5), (64, 23), (100, 39)])
def test_an_interval_has_the_confidence_of_the_sign_test(n, low):
    """The ranks are those of the sign test's tables; below six samples no interval reaches 95%."""
    found = records.interval(range(n))
    assert (found["low"], found["high"]) == (low, n - 1 - low)
    within = sum(math.comb(n, k) for k in range(low + 1, n - low))
    assert found["confidence"] == pytest.approx(within / 2**n)
    assert (found["confidence"] >= 0.95) == (n > 5)


def test_variants_run_in_random_rounds_and_one_that_was_killed_is_not_run_again():
    calls, kept = [], []

    def variant(name):
        return lambda i: (calls.append((name, i)), {"seconds": i + 1.0})[1]

    variants = {"a": variant("a"), "b": variant("b"), "dies": lambda i: {"killed": i == 1}}
    told = {"each_round": lambda i: {"disk": i}}
    told["keep"] = lambda samples: kept.append((len(samples), samples.attrs["partial"]))
    made = records.interleave("x", variants, runs=6, warmup=2, **told)
    assert list(made[made.variant == "b"].seconds) == [1, 2, 3, 4, 5, 6]
    assert (made.disk == made["round"]).all() and "partial" not in made.attrs
    assert kept == [(n, True) for n in (3, 6, 8, 10, 12, 14)]
    assert sorted({i for _, i in calls}) == [*range(-2, 6)]
    assert {name for name, _ in calls[::2]} == {"a", "b"}, "the order is random"
    assert made[made.variant == "dies"].killed.tolist() == [False, True]
    assert sum("killed" in row for row in records.as_json(made)["rows"]) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_its_words(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0 and f"python -m moelab.lab {name}" in capsys.readouterr().out


# The records of data/results, measured again by the recipe


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_record_says_what_it_shows_and_what_made_it(path):
    assert path.stat().st_size < 1 << 19
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


def test_a_part_makes_its_checkpoints_and_its_records(tmp_path, monkeypatch, capsys):
    ran, load, path = [], {"disturbed": False, "cores_of_others": 0.0}, tmp_path / "cpu_a.json"
    make = "python -m moelab bench {q35_packed} {out}"
    old = {"what": "A.", "part": "one", "make": make, "settings": {}, "rows": []}
    records.write(path, old)
    records.write(tmp_path / "cpu_b.json", old | {"part": "two"})

    def run(command):
        ran.append(command.replace(str(tmp_path), "T"))
        if (file := command.split()[-1]).endswith(".json"):
            rows = [{"variant": "v", "round": i, "seconds": i + 1.0} for i in (0, 1)]
            records.write(file, {"settings": {}, "machine": {}, "load": load, "rows": rows})

    own = {"RESULTS": tmp_path, "WORK": tmp_path / "work", "run": run}
    for name, value in (own | {"card": lambda: {"backend": "CPU"}}).items():
        monkeypatch.setattr(recipe, name, value)
    assert recipe.main("one") == 0
    assert ran == [
        "python -m moelab synthesize --like qwen3.5-35b-a3b --layers 4 T/work/q35 --quiet",
        "python -m moelab repack T/work/q35 T/work/q35_packed --quiet",
        "python -m moelab bench T/work/q35_packed T/work/cpu_a.json",
    ]
    made = records.read(str(path))
    assert made.attrs["what"] == "A." and made.seconds.tolist() == [1.0, 2.0]

    records.save(path, made.assign(seconds=made.seconds * 9))
    load["disturbed"] = True
    assert recipe.main("cpu_a") == 1 and "NOT kept" in capsys.readouterr().err
    assert records.read(str(path)).seconds.tolist() == [9.0, 18.0]
    load["disturbed"] = False
    assert recipe.main("cpu_a") == 0
    told = capsys.readouterr().out
    assert "v, seconds: 13.5 [11.2, 15.8] -> 1.5 [1.25, 1.75]" in told
    assert "changed by more than its interval: 1 of 1" in told

    assert recipe.main() == 0 and "one: cpu_a (old: engine 1)" in capsys.readouterr().out
    assert recipe.old({"machine": {"engine": None}, "rows": []}) == ""  # a record of MLX alone

    monkeypatch.setattr(recipe, "card", lambda: {"backend": "CUDA"})
    with pytest.raises(SystemExit, match="makes records cuda_"):
        recipe.main("cpu_a")


def claim(**figures):
    made = {"id": "X1", "claim": "c", "source": "s", "notebook": "01", "figures": figures}
    return made if figures else made | {"cannot": "no such disk"}


def at(values, **gate):
    return {"is": repr(values), **gate}


YES, NO, OPEN = (at(v, least=1) for v in ([2.0], [0.5], [0.5, 2.0]))
BOUND = {"least": 1.05, "within": 1.1}  # 1.05 is enough; below 1.1 all else is refuted


@pytest.mark.parametrize(
    "figures, verdict, because",
    [
        ({}, "not testable here", "no such disk"),
        ({"here": at([2.0, 2.5, 3.0], least=1.5)}, "confirmed", r"2\.5 \[2, 3\], n=3 \(at least"),
        ({"here": at([2.0, 2.5, 3.0], least=5)}, "refuted", "here"),
        ({"here": at([2.0, 2.5, 3.0], most=2.2)}, "open", r"Open: here: 2\.5 .*at most 2.2"),
        ({"here": at(3, most=4)}, "confirmed", "here: 3 "),  # a count
        ({"warm": YES, "cold": NO}, "depends", r"^Warm it does\.$"),
        # A claim holds if most regimes confirm it. If no regime confirms it and one refutes it, the
        # claim is refuted.
        ({"a": YES, "b": YES, "c": OPEN}, "confirmed", r"^Confirmed in 2 of 3 regimes: a: 2 "),
        ({"a": YES, "b": OPEN}, "open", r"^Open in 1 of 2 regimes: b: 1\.25 "),
        ({"a": NO, "b": OPEN, "c": OPEN}, "refuted", "^Refuted in 1 of 3 regimes: a: "),
        ({"a": YES, "b": NO, "c": OPEN}, "depends", "^Warm it does"),
        ({"a": OPEN, "b": OPEN}, "open", "^Open in 2 of 2 regimes: a: "),
        # An interval within the equivalence bound refutes, unless the gate confirms.
        ({"here": at([0.95, 1.07], least=1.05)}, "open", ""),
        ({"here": at([0.95, 1.07], **BOUND)}, "refuted", ""),
        ({"here": at([0.95, 1.12], **BOUND)}, "open", ""),
        ({"here": at([1.06, 1.09], **BOUND)}, "confirmed", ""),
        ({"here": at([0.92, 1.3], most=0.95, within=1.1)}, "refuted", ""),
        ({"here": at([0.85, 1.3], most=0.95, within=1.1)}, "open", ""),
        # No record of that name.
        ({"a": {"is": "read('cpu_nothing')", "most": 3}}, "open", "not measured yet, cpu_nothing"),
    ],
)
def test_a_verdict_follows_from_the_intervals(figures, verdict, because):
    (judged,) = claims.judge(claim(**figures) | {"why": {"depends": "Warm it does."}})
    assert judged.verdict == verdict
    assert re.search(because, judged.because), judged.because


def test_a_record_changed_by_hand_changes_its_verdict(tmp_path):
    """The test doubles the seconds of one variant of a shipped record, as a wrong edit could."""
    (made,) = (c for c in claims.read() if c["id"] == "C2")
    assert claims.judge(made)[0].verdict == "confirmed"
    name, ahead, file = "cuda_loops_35b", "next token scheduled ahead", tmp_path / "r.json"
    samples = records.read(name)
    seconds = [c for c in samples if c.endswith(("seconds", "_s"))]
    samples.loc[samples.variant == ahead, seconds] *= 2
    records.save(file, samples)
    text = json.dumps(made).replace(f'\\"{name}\\"', f'\\"{file}\\"')
    assert claims.judge(json.loads(text))[0].verdict == "refuted"
    (other,) = claims.judge(json.loads(text.replace(ahead, "none")))
    assert other.verdict == "open" and " in the record" in other.because


def test_a_figure_that_fails_names_its_claim_and_a_claim_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="claim X1, here: .*NameError.*Correct it in"):
        claims.judge(claim(here={"is": "nothing", "least": 1}))
    with pytest.raises(ValueError, match="claim X1, here: expected least or most, got is"):
        claims.judge(claim(here={"is": "[1.0]"}))
    with pytest.raises(ValueError, match="expected claims of A1, .*, got X3"):
        claims.show("X3")
