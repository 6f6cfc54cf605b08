"""The CUDA run: what it does to files, and when a section fails."""

import json

import cuda_run
import pytest

from moelab.lab import records


def test_cuda_run_removes_no_folder_that_it_did_not_make(tmp_path):
    own = tmp_path / "f" / "tiny" / "thesis.txt"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    argv = [
        str(tmp_path / "r.json"),
        "--tiny",
        "--folder",
        str(tmp_path / "f"),
        "--only",
        "tokens_at_once",
    ]
    with pytest.raises(SystemExit) as stop:
        cuda_run.main(argv)
    assert str(own.parent) in str(stop.value) and own.read_text() == "mine"
    assert not (tmp_path / "r.json").exists()


def test_cuda_run_goes_on_when_a_section_fails(tmp_path, monkeypatch, capsys):
    def fails(self):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(cuda_run.Run, "tokens_at_once", fails)
    out = tmp_path / "r.json"
    sections = "checkpoint,tokens_at_once,memory,copies,locality"
    cuda_run.main(
        [
            str(out),
            "--tiny",
            "--folder",
            str(tmp_path / "f"),
            "--only",
            sections,
        ]
    )
    r = json.loads(out.read_text())["sections"]
    assert r["tokens_at_once"]["error"] == "RuntimeError: no such kernel"
    assert r["memory"]["rows"][-1]["tokens"] == 8
    assert "no such kernel" in capsys.readouterr().out
    for layout in ("repacked", "as shipped"):
        made = r["copies"][layout]
        assert all(all(same) for same in made["same"].values()) and made["counters"]["misses"] > 0
        spent = made["host_ms_of_a_token"]["copies"]
        assert spent["waiting for the routing"] > 0 and spent["waiting for reads"] > 0
        assert sum(ms for name, ms in spent.items() if name != "all") == pytest.approx(spent["all"])
    assert "error" not in r["locality"], r["locality"]
    assert r["locality"]["hit_rate_of_the_trace"].keys() == {
        f"{n} of 64 slots" for n in (16, 32, 64)
    }
    for name in ("random routers", "routers of the trace"):
        made = records.table(r["locality"][name])
        ways = ["resident", *(f"fused, {n} slots" for n in (16, 32, 64))]
        assert sorted(made.variant) == sorted(ways)
        hits = [records.values(made, way, "hit_rate")[0] for way in ways[1:]]
        assert 0 < hits[0] <= hits[1] <= hits[2] <= 1
    assert list((tmp_path / "f").iterdir()) == []  # the checkpoint is gone


def test_cuda_run_adds_sections_to_a_file_of_the_same_machine(tmp_path, monkeypatch):
    out = tmp_path / "r.json"

    def run(section):
        cuda_run.main([str(out), "--tiny", "--folder", str(tmp_path / "f"), "--only", section])
        return json.loads(out.read_text())["sections"]

    first = run("tokens_at_once")
    both = run("checkpoint")
    assert list(both) == ["tokens_at_once", "checkpoint"]
    assert both["tokens_at_once"] == first["tokens_at_once"]
    before = out.read_text()
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "3")
    with pytest.raises(SystemExit, match="environment"):
        run("memory")
    assert out.read_text() == before
