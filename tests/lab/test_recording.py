"""Records measured again from one list, and the page that follows from them."""

import json
from string import Formatter

import pytest
from committed import ROOT

from moelab import shipped
from moelab.lab import recording, records
from moelab.lab.__main__ import main

LIST = """
[checkpoints]
tiny = "models/tiny-moe"
small = "synthesize --like {tiny}"
packed = "repack {small}"

[cpu_a]
part = "one"
what = "A."
command = "bench {packed} --json {out}"

[cpu_b]
part = "two"
what = "B."
command = "lab kernels {tiny} {out}"
by = ["slots"]
shows = {"seconds * 1e3" = "ms"}
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """What was run; each command that makes a record writes one, disturbed or not."""
    ran, disturbed = [], set()
    results = tmp_path / "results"
    results.mkdir()
    (tmp_path / "list.toml").write_text(LIST)
    for name, value in (("LIST", tmp_path / "list.toml"), ("RESULTS", results)):
        monkeypatch.setattr(recording, name, value)
    monkeypatch.setattr(recording, "PAGE", results / "README.md")
    monkeypatch.setattr(recording, "WORK", tmp_path / "work")
    monkeypatch.setattr(recording, "DOCUMENTS", ())
    monkeypatch.setattr(recording, "card", lambda: MACHINE)

    def run(words):
        ran.append(" ".join(words).replace(str(tmp_path), "T"))
        for path in words:
            if path.endswith(".json"):
                rows = [
                    {"variant": "v", "round": i, "slots": 8, "seconds": i + 1.0} for i in (0, 1)
                ]
                made = records.table({"settings": {}, "machine": MACHINE, "rows": rows})
                made.attrs["load"] = {"disturbed": path in disturbed, "cores_of_others": 0.0}
                records.save(path, made)

    monkeypatch.setattr(recording, "_run", run)
    return ran, disturbed, results


MACHINE = {"cpu": "Z80", "gpu": None, "backend": "CPU", "cores": 2, "memory_nbytes": 2**34}
MACHINE |= {"os": "Linux 6", "mlx": "1", "mlx-lm": "2", "moelab": "3", "date": "2026-01-01"}


def test_a_part_makes_its_checkpoints_and_its_records(commands, capsys):
    ran, _, results = commands
    assert main(["records", "one"]) == 0
    tiny = recording.DATA / "models" / "tiny-moe"
    assert ran == [
        f"-m moelab synthesize --like {tiny} T/work/small --quiet",
        "-m moelab repack T/work/small T/work/packed --quiet",
        "-m moelab bench T/work/packed --json T/work/cpu_a.json",
    ]
    assert [p.name for p in results.iterdir()] == ["cpu_a.json"]
    assert "cpu_a: " in capsys.readouterr().out
    ran.clear()
    assert main(["records", "cpu_b"]) == 0
    assert ran == [f"-m moelab.lab kernels {tiny} T/work/cpu_b.json"]


def test_a_disturbed_run_leaves_the_old_record(commands, tmp_path, capsys):
    _, disturbed, results = commands
    (results / "cpu_a.json").write_text("old")
    disturbed.add(str(tmp_path / "work" / "cpu_a.json"))
    assert main(["records", "one"]) == 1
    assert (results / "cpu_a.json").read_text() == "old"
    assert "NOT kept" in capsys.readouterr().err


def test_what_changed_by_more_than_its_interval_is_said(commands, capsys):
    _, _, results = commands
    main(["records", "two"])
    assert "interval" not in capsys.readouterr().out  # there was no record before it
    main(["records", "two"])
    assert "\n  changed by more than its interval: 0 of 1" in capsys.readouterr().out
    record = json.loads((results / "cpu_b.json").read_text())
    for row in record["rows"]:
        row["seconds"] *= 9
    (results / "cpu_b.json").write_text(json.dumps(record | {"trial": "one round"}))
    main(["records", "two"])
    found = capsys.readouterr().out
    assert "\n  8: ms 1.35e+04 [1.12e+04, 1.58e+04] -> 1.5e+03 [1.25e+03, 1.75e+03]" in found
    assert "changed by more than its interval: 1 of 1" in found
    (results / "cpu_b.json").write_text("{}")
    assert main(["records", "two"]) == 0  # the new one is kept whatever the old one is
    assert "another form: not compared" in capsys.readouterr().out
    assert records.read(str(results / "cpu_b.json")).seconds.tolist() == [1.0, 2.0]


def test_a_record_of_another_device_is_refused(commands, monkeypatch, capsys):
    monkeypatch.setattr(recording, "card", lambda: MACHINE | {"backend": "CUDA"})
    assert main(["records", "one"]) == 1 and not commands[0]
    assert "whose names begin with cuda_, got cpu_a" in capsys.readouterr().err


def test_names_are_listed_and_checked(commands, capsys):
    assert main(["records"]) == 0
    assert capsys.readouterr().out == "one: cpu_a\ntwo: cpu_b\n"
    assert main(["records", "three"]) == 1
    assert "expected some of one, two, cpu_a, cpu_b; got three" in capsys.readouterr().err
    assert not commands[0]


def test_the_page_follows_from_the_records(commands):
    _, _, results = commands
    main(["records", "one", "two"])
    assert main(["records", "page"]) == 0
    page = (results / "README.md").read_text()
    assert "## cpu_a\n\nA. Z80, 2 cores" in page and "other processes used 0.00 cores" in page
    assert "| slots | n | ms |" in page and "| 8 | 2 | 1.5e+03 [1.25e+03, 1.75e+03] |" in page
    record = json.loads((results / "cpu_b.json").read_text())
    record["rows"][0]["seconds"] = 9.0
    (results / "cpu_b.json").write_text(json.dumps(record))
    assert recording.page() != page


def test_every_record_is_listed_and_every_command_is_one():
    checkpoints, entries = recording.listed()
    assert {p.stem for p in (ROOT / "data" / "results").glob("*.json")} <= entries.keys()
    for name, entry in entries.items():
        assert entry["what"].endswith(".") and entry["part"], name
        if "command" not in entry:
            continue
        names = set(Formatter().parse(entry["command"]))
        fields = {field for _, field, _, _ in names if field}
        assert fields <= checkpoints.keys() | {"out"} and "out" in fields, name


def test_the_page_is_fresh(monkeypatch):
    results = ROOT / "data" / "results"
    now = {"DATA": ROOT / "data", "RESULTS": results, "PAGE": results / "README.md"}
    for name, path in now.items():
        monkeypatch.setattr(recording, name, path)
    monkeypatch.setattr(shipped, "DATA", ROOT / "data")
    assert recording.page() == recording.PAGE.read_text(), "make numbers"
