"""lab.peers: what is installed, what each peer reads, and what is said of the texts."""

import numpy as np
import pytest

from moelab import DATA
from moelab.lab import peers, records

TINY = DATA / "models" / "tiny-moe"
IDS = list(range(40, 60))


def test_a_package_counts_in_the_version_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "WORK", tmp_path)
    info = tmp_path / "some_peer-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-peer\nVersion: 1.2\n")
    found = map(peers.installed, ("some-peer==1.2", "some-peer==1.3", "other==1.2"))
    assert list(found) == [True, False, False]


def test_a_failed_installation_says_which(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "WORK", tmp_path)
    monkeypatch.setattr(peers, "PACKAGES", {"one": (str(tmp_path / "no-such-package"),)})
    with pytest.raises(OSError, match="one: pip could not install .*no-such-package"):
        peers.install(progress=False)


def test_a_peer_that_is_not_there_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "WORK", tmp_path)
    with pytest.raises(OSError, match="llama.cpp: expected it under build/peers.* make peers"):
        peers.files(TINY)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", [*peers.NAMES, "llama.cpp/experts=cpu"])
def test_a_text_is_read_on_and_begun_anew(way):
    peer, options = peers.way(way)
    if peer in peers.PACKAGES and not all(map(peers.installed, peers.PACKAGES[peer])):
        pytest.skip("make peers")
    path = str(peers.files(TINY)[peer] if peer in peers.PACKAGES else TINY)
    begin = peers.opened(peer, path, 2 * len(IDS), **options)
    read = begin()
    read(IDS[:-1])
    in_parts = read(IDS[-1:]).copy()
    at_once = begin()(IDS).copy()
    loose = 0.1 if peer == peers.LLAMA_CPP else 1e-3  # it rounds activations to 8 bits
    np.testing.assert_allclose(in_parts, at_once, atol=loose * at_once.std())
    ours = peers.opened(peers.MLX_LM, str(TINY), 0)()(IDS)
    np.testing.assert_allclose(at_once, ours, atol=loose * ours.std())


def test_options_follow_a_peers_name():
    assert peers.way("mlx-lm") == ("mlx-lm", {})
    assert peers.way("moelab/slots=16/source=host")[1] == {"slots": 16, "source": "host"}
    assert peers.way("llama.cpp/experts=cpu")[1] == {"experts_on_cpu": True}


@pytest.mark.parametrize(
    "text, said",
    [
        ("ollama", "expected a peer .moelab"),
        ("llama.cpp/experts=gpu", "llama.cpp has no such option"),
        ("mlx-lm/slots=16", "mlx-lm has no such option"),
        ("moelab/slot=16", "expected FIELD=VALUE with a field of StreamConfig"),
    ],
)
def test_another_peer_or_option_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        peers.way(text)


def test_the_report_says_how_likely_the_other_token_was():
    rows = [
        {"variant": "a", "round": 0, "same_tokens": 9},
        {"variant": "a", "round": 1, "same_tokens": 4, "gap": 0.5},
    ]
    settings = {"tokens": 9}
    told = peers.report(records.table({"settings": settings, "rows": rows}))
    assert "1 of 2 texts of 9 tokens the same" in told and "the gap is 0.500 deviations" in told


@pytest.mark.parametrize("words", [("install", "more"), ("same",), ("nonsense",)])
def test_other_words_are_refused(words):
    with pytest.raises(ValueError, match="expected install, or same OUT"):
        peers.main(*words)
