import json

import cuda_ranks

from moelab.lab import records


def test_the_run_on_two_gpus_tries_itself_out(tmp_path):
    out = tmp_path / "ranks.json"
    cuda_ranks.main([str(out), "--tiny"])
    made = json.loads(out.read_text())
    assert [(each["rank"], each["ranks"]) for each in made["ranks"]] == [(0, 1), (0, 2), (1, 2)]
    for slots in made["ranks"][0]["slots"]:
        alone, *two = (each["slots"][slots] for each in made["ranks"])
        assert {each["digest"] for each in two} == {alone["digest"]}
        assert sum(each["hits"] + each["misses"] for each in two) == alone["hits"] + alone["misses"]
    assert list(tmp_path.iterdir()) == [out]


def test_two_gpus_gave_the_bits_of_one():
    made = records.recorded("cuda_h200x2_ranks")["ranks"]
    assert len({s["digest"] for each in made for s in each["slots"].values()}) == 1
