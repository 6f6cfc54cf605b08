"""``share``: one file of a machine's speed, and what is refused."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from committed import ROOT

from moelab import DATA
from moelab.lab.experiments import share
from moelab.replay.sizes import ModelSizes

TINY = DATA / "models" / "tiny-moe"
FILES = sorted((ROOT / "data" / "community").glob("*.json"))


@pytest.fixture(scope="module")
def good():
    """A file's content, as from a quiet machine."""
    made = share.measured(TINY)
    made["load"] |= {"disturbed": False, "cores_of_others": 0.0}
    for i, row in enumerate(made["rows"]):
        row["decode_s"] = 0.3 + 0.001 * i
    return made | {"digest": share.digest(made)}


def changed(good, change):
    made = copy.deepcopy(good)
    change(made)
    return made


def signed(good, change):
    made = changed(good, change)
    return made | {"digest": share.digest(made)}


def slow(i, seconds):
    return lambda made: made["rows"][i].update(decode_s=seconds)


def busy(made):
    made["load"] |= {"disturbed": True, "cores_of_others": 1.3}


def unstable(made):
    for row, seconds in zip(made["rows"], (0.2, 0.2, 0.25, 0.3, 0.35, 0.38, 0.39)):
        row["decode_s"] = seconds


def test_a_good_file_has_the_machine_the_samples_and_the_routing(good):
    assert share.problems(good) == []
    trace = share.unpacked(good["trace"])
    assert trace.experts.shape[1:] == (good["sizes"]["L"], good["sizes"]["K"])
    assert (trace.phase == "decode").sum() >= share.TOKENS


@pytest.mark.parametrize(
    ("change", "said"),
    (
        (slow(2, 1.5), "Sample 2 is 21.3 tok/s where the median is 105"),
        (unstable, "The samples are unstable"),
        (busy, "Other programs used 1.3 cores"),
        (lambda made: made["rows"].pop(), "Expected 7 samples, got 6"),
        (lambda made: made["rows"][0].update(hits=1, misses=2), "Sample 0 used"),
        (lambda made: made["sizes"].update(E=32), "another model"),
        (lambda made: made.update(trace="bm90aGluZw=="), "The trace cannot be read"),
    ),
)
def test_what_is_wrong_is_said(good, change, said):
    assert said in " ".join(share.problems(signed(good, change)))


def test_nothing_is_written_from_a_busy_machine(good, monkeypatch, tmp_path):
    monkeypatch.setattr(share, "measured", lambda path: signed(good, busy))
    with pytest.raises(ValueError, match="nothing was written. Other programs"):
        share.share(TINY, tmp_path / "mine.json")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(share, "measured", lambda path: good)
    file = share.share(TINY, tmp_path / "mine.json")
    assert json.loads(file.read_text()) == good and "| tiny-moe |" in share.page([file])
    file.write_text(json.dumps(changed(good, slow(0, 0.29))))  # an edit by hand
    with pytest.raises(ValueError, match="mine.json: It was edited"):
        share.page([file])


def test_a_plan_finds_what_was_measured_on_such_a_machine(good, monkeypatch, tmp_path):
    for name in ("community", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "community" / "a.json").write_text(json.dumps(good))
    monkeypatch.setattr(share, "DATA", tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    Path("m_2_cores_now.json").write_text(json.dumps(good))
    Path("n_2_cores_now.json").write_text(json.dumps(good | {"digest": "edited"}))
    sizes, machine = ModelSizes(**good["sizes"]), good["machine"]
    own, sent = share.of_such_a_machine(sizes, machine)
    assert "(m_2_cores_now.json" in own and "106 [" in sent and "community/a.json" in sent
    assert len(share.of_such_a_machine(sizes, machine | {"cores": None})) == 2
    for other in ({"cpu": "Apple M5"}, {"gpu": "H100"}, {"memory_nbytes": 1e9}, {"cores": 999}):
        assert not share.of_such_a_machine(sizes, machine | other)
    assert not share.of_such_a_machine(replace(sizes, E=32), machine)


STRANGE = {  # a change of a file's content that has a right digest, or the file's text
    "no rows": lambda made: made.update(rows=[]),
    "no processor": lambda made: made["machine"].pop("cpu"),
    "no load": lambda made: made.pop("load"),
    "memory as text": lambda made: made["machine"].update(memory_nbytes="24 GiB"),
    "NaN": lambda made: made["rows"][0].update(decode_s=float("nan")),
    "deep": "[" * 100_000,
    "a fifo": os.mkfifo,
}


@pytest.mark.parametrize("case", STRANGE)
def test_files_of_strangers_are_passed_over(case, good, monkeypatch, tmp_path):
    """In the folder of ``plan``; the page of those that were sent says which is wrong, and why."""
    made, file = STRANGE[case], tmp_path / "a_2_cores_b.json"
    if case.startswith("a "):
        made(file)
    else:
        file.write_text(made if isinstance(made, str) else json.dumps(signed(good, made)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(share, "DATA", tmp_path)
    assert share.of_such_a_machine(ModelSizes(**good["sizes"]), good["machine"]) == []
    with pytest.raises((ValueError, FileNotFoundError), match=file.name):
        share.page([file])


def test_texts_of_strangers_stay_texts(good, monkeypatch, tmp_path):
    """No escape of a terminal; no Markdown, HTML or second column of a table."""
    text = "\x1b[31m<script>|[a](javascript:b)\u202e\n| 9 |"

    def rename(made):
        made["machine"] |= {"date": text, "moelab": text}
        made["settings"]["model"] = text

    file = tmp_path / "a_2_cores_\x1b[2J.json"
    file.write_text(json.dumps(signed(good, rename)))
    monkeypatch.chdir(tmp_path)
    (line,) = share.of_such_a_machine(ModelSizes(**good["sizes"]), good["machine"])
    row = share.page([file]).splitlines()[-1]
    assert line.isprintable() and row.isprintable() and row.count(" | ") == 7
    assert "<" not in row and row.count("](") == 1 + row.count("\\](")


def test_what_people_sent_is_whole_and_on_the_page(monkeypatch):
    assert FILES and (ROOT / "data/community/README.md").read_text() == share.page(FILES)
    monkeypatch.setattr(share, "DATA", ROOT / "data")
    sent = share.traces()
    assert {trace.experts.shape[1:] for trace in sent.values()} >= {(8, 8), (40, 8)}
    assert all(len(trace.decode) >= 32 for trace in sent.values())
