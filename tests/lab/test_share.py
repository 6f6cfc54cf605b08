"""``share``: one file of a machine's speed, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from committed import ROOT

from moelab import DATA
from moelab.lab.experiments import share
from moelab.replay.sizes import ModelSizes

TINY = DATA / "models" / "tiny-moe"
SENT = ROOT / "data" / "community"
GOOD = json.loads((SENT / "tiny-moe_2_cores_xeon.json").read_text())
SIZES, MACHINE, ROWS = ModelSizes(**GOOD["sizes"]), GOOD["machine"], GOOD["rows"]
QUIET = {"disturbed": False, "cores_of_others": 0.0}
BUSY = {"disturbed": True, "cores_of_others": 1.3}


def signed(made, **fields):
    """A content with other fields and a right digest."""
    made = made | fields
    return made | {"digest": share.digest(made)}


def timed(rows, *seconds):
    """Rows whose tokens took so long."""
    return [row | {"decode_s": s} for row, s in zip(rows, seconds)]


def test_what_was_measured_is_written_unless_others_were_busy(monkeypatch, tmp_path):
    """Of fewer tokens than a user's."""
    monkeypatch.setattr(share, "TOKENS", 3)
    monkeypatch.setattr(share, "WARMUP", 2)
    made, file = share.measured(TINY), tmp_path / "mine.json"
    made = signed(made, rows=timed(made["rows"], *[0.3] * 7), load=QUIET)
    monkeypatch.setattr(share, "measured", lambda path: signed(made, load=BUSY))
    with pytest.raises(ValueError, match="nothing was written. Other programs"):
        share.share(TINY, file)
    assert not file.exists()
    monkeypatch.setattr(share, "measured", lambda path: made)
    assert share.received(share.share(TINY, file)) == made
    trace = share.unpacked(made["trace"])
    assert len(trace.decode) >= 3 and trace.experts.shape[1:] == (SIZES.L, SIZES.K)
    file.write_text(file.read_text().replace("0.3", "0.29", 1))  # an edit by hand
    with pytest.raises(ValueError, match="mine.json: It was edited"):
        share.page([file])


@pytest.mark.parametrize(
    "made, said",
    (
        ({"rows": timed(ROWS, *[0.3] * 6, 1.5)}, "Sample 6 is 21.3 tok/s where the median is 107"),
        ({"rows": timed(ROWS, 0.2, 0.2, 0.25, 0.3, 0.35, 0.38, 0.39)}, "The samples are unstable"),
        ({"rows": [ROWS[0] | {"hits": 1, "misses": 2}, *ROWS[1:]]}, "Sample 0 used"),
        ({"rows": ROWS[1:]}, "Expected 7 samples, got 6"),
        ({"load": BUSY}, "Other programs used 1.3 cores"),
        ({"sizes": GOOD["sizes"] | {"E": 32}}, "another model"),
        ({"trace": "bm90aGluZw=="}, "The trace cannot be read"),
        # Only strangers write these.
        ({"rows": []}, "Expected 7 samples, got 0"),
        ({"rows": timed(ROWS, *[float("nan")] * 7)}, ""),
        ({"machine": MACHINE | {"memory_nbytes": "24 GiB"}}, "memory_nbytes"),
        ({"machine": {}}, "cpu"),
    ),
)
def test_a_wrong_file_is_refused_with_why(made, said, monkeypatch, tmp_path):
    """By the page of those that were sent; a plan passes over it."""
    file = tmp_path / "a_2_cores_b.json"
    file.write_text(json.dumps(signed(GOOD, **made)))
    with pytest.raises(ValueError, match=f"{file.name}.*{said}"):
        share.page([file])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(share, "DATA", tmp_path)
    assert share.of_such_a_machine(SIZES, MACHINE) == []


def test_a_plan_finds_what_was_measured_on_such_a_machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(share, "DATA", SENT.parent)
    text = json.dumps(signed(GOOD, rows=timed(ROWS, *[0.3] * 7)))
    Path("m_2_cores_now.json").write_text(text)
    own, sent = share.of_such_a_machine(SIZES, MACHINE)
    assert "(m_2_cores_now.json" in own and "107 [" in own and "community/" in sent
    assert len(share.of_such_a_machine(SIZES, MACHINE | {"cores": None})) == 2
    for other in ({"cpu": "Apple M5"}, {"gpu": "H100"}, {"memory_nbytes": 1e9}, {"cores": 999}):
        assert not share.of_such_a_machine(SIZES, MACHINE | other)
    assert not share.of_such_a_machine(replace(SIZES, E=32), MACHINE)


def test_texts_of_strangers_stay_texts(monkeypatch, tmp_path):
    """No escape of a terminal; no Markdown, HTML or second column of a table."""
    text = "\x1b[31m<script>|[a](javascript:b)\u202e\n| 9 |"
    named = {"machine": MACHINE | {"date": text, "moelab": text}, "settings": {"model": text}}
    file = tmp_path / "a_2_cores_\x1b[2J.json"
    file.write_text(json.dumps(signed(GOOD, **named)))
    monkeypatch.chdir(tmp_path)
    line, _ = share.of_such_a_machine(SIZES, MACHINE)
    row = share.page([file]).splitlines()[-1]
    assert line.isprintable() and row.isprintable() and row.count(" | ") == 7
    assert "<" not in row and row.count("](") == 1 + row.count("\\](")


def test_what_people_sent_is_whole_and_on_the_page(monkeypatch):
    page = share.page(sorted(SENT.glob("*.json")))
    assert (SENT / "README.md").read_text() == page
    monkeypatch.setattr(share, "DATA", SENT.parent)
    assert {t.experts.shape[1:] for t in share.traces().values()} >= {(8, 8), (40, 8)}
