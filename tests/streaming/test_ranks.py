"""Ranks that share the experts give the bits of one rank. If ranks differ or die, all end."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen
from types import SimpleNamespace

import families
import mlx.core as mx
import numpy as np
import openai
import pytest
import rank_work
from common import TINY_MOE
from in_process import complete

from moelab.lab import ranks
from moelab.lab.ranks import environments, everywhere, hosts
from moelab.streaming.ranks import RankError, Ranks, by_number

HELPERS = Path(rank_work.__file__).parent
# gpt_oss has additive biases, olmoe no shared expert, nemotron_h a SwitchMLP.
CASES = (
    ("tiny-moe", {"slots": 16}),
    ("gpt_oss", {"slots": 2, "kernels": "mlx"}),
    ("olmoe", {"slots": 3, "mode": "stacked", "kernels": "mlx"}),
    ("nemotron_h", {"slots": 2, "kernels": "mlx"}),
    # The cases from here on run with 2 ranks only.
    ("olmoe", {"slots": 3, "prefetch": "lookahead", "kernels": "mlx"}),
    ("qwen3_5_moe", {"mode": "buffers"}),
    ("qwen3_5_moe", {"mode": "serial", "kernels": "mlx"}),
    ("qwen3_5_moe", {"slots": 2, "prefetch": "lookahead", "top_k": 1}),
    ("tiny-moe", {"slots": "auto", "memory_nbytes": 142_000_000, "context": 256}),
)

SETTINGS = '{"slots": 4, "mode": "fused", "kernels": "mlx"}'  # for ranks that fail


def start(commands: list[list[str]], folder: Path) -> list[Popen]:
    """Start ``python`` with each list of words, as the ranks of one ring."""
    pipes = {"stdout": PIPE, "stderr": PIPE, "text": True}
    return [
        Popen([sys.executable, *words], env={**os.environ, **variables}, **pipes)
        for words, variables in zip(commands, environments(len(commands), folder))
    ]


def finish(processes: list[Popen], timeout_s: float = 240) -> list[CompletedProcess]:
    """Wait for ranks; conftest.py ends those that still run after the test."""
    outs = [p.communicate(timeout=timeout_s) for p in processes]
    return [CompletedProcess(p.args, p.returncode, *out) for p, out in zip(processes, outs)]


@pytest.fixture(scope="module")
def cases(stored):
    """The checkpoints and settings of ``CASES``, and the result of one process for each."""
    paths = {name: TINY_MOE if name == "tiny-moe" else stored(name) for name, _ in CASES}
    made = [(str(paths[name]), settings) for name, settings in CASES]
    return made, rank_work.decode(None, made)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_give_the_bits_of_one(n, cases, monkeypatch):
    """Logits are the same in every mode, and an expert is read by its owner only."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *sys.path]))
    chosen, (made, one) = slice(None if n == 2 else 4), cases
    found = everywhere(n, rank_work.decode, made[chosen])
    for (name, settings), (logits, read, counts), *each in zip(CASES[chosen], one, *found):
        L, E = np.shape(read)
        owners = by_number(L, E, n)
        by_rank = np.array([rank[1] for rank in each])
        assert {rank[0] for rank in each} == {logits}, (name, settings)
        for r in range(n):
            assert not by_rank[r][owners != r].any(), (name, settings)
        if "prefetch" not in settings:  # prefetch may read experts that no token needs
            np.testing.assert_array_equal(by_rank.any(0), read, f"{name} {settings}")
        assert np.sum([rank[2] for rank in each]) == sum(counts)


@pytest.mark.parametrize("cuda", (False, True))
def test_a_ring_takes_a_macs_gpu(cuda, monkeypatch):
    chosen = []
    monkeypatch.setattr(mx, "set_default_device", chosen.append)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(ranks, "joined", lambda: None)
    assert ranks.in_rank("builtins:str", "ring") == "None" and chosen == [mx.cpu] * cuda


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint, another of its shape, and the first one with a shard missing."""
    folder = tmp_path_factory.mktemp("checkpoints")
    one, other, short = folder / "one", folder / "other", folder / "short"
    families.write_checkpoint("olmoe", one, "sharded")
    shutil.copytree(one, other)
    file = max(other.glob("model*.safetensors"), key=lambda f: f.stat().st_size)
    content = file.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:data] + content[data:][::-1])
    shutil.copytree(one, short)
    max(short.glob("model*.safetensors")).unlink()
    return {"one": one, "other": other, "short": short}


ENDED = "another rank has ended"
ROUNDS = "the machines round differently"  # and choose other experts
# The second rank's checkpoint and settings, then what each of the two ranks says. If both ranks
# have equal checkpoints and settings, the case's name says how the second rank ends its answer.
WRONG = {
    "slots": ("one", SETTINGS.replace("4", "3"), *["StreamConfig.slots: expected the same"] * 2),
    "checkpoint": ("other", SETTINGS, *["checkpoint: expected the same"] * 2),
    "shard": ("short", SETTINGS, "rank 1 of 2 ended: CheckpointError: ", "are not in the folder"),
    "resident": (
        "one", SETTINGS.replace("fused", "resident"),
        "rank 1 of 2 ended: ValueError: ", "holds all of them",
    ),
    "SIGKILL": ("one", SETTINGS, ENDED, ""),
    "raise": ("one", SETTINGS, ENDED, ""),
    "SIGSTOP": ("one", SETTINGS, "no answer from the other ranks for 3 s", ""),
    "other": ("one", SETTINGS, ROUNDS, ROUNDS),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_ranks_that_differ_or_end(case, checkpoints, tmp_path):
    """Each rank that still runs prints one line and ends within 60 s. No rank waits for ever."""
    name, own, *said = WRONG[case]
    answers = (name, own) == ("one", SETTINGS)
    program = str(HELPERS / "rank_work.py")
    commands = [[program, str(checkpoints["one"]), SETTINGS]]
    commands += [[program, str(checkpoints[name]), own, *[case] * answers]]
    started = start(commands, tmp_path)
    ended = finish(started[:1], 60)
    if case == "SIGSTOP":
        started[1].kill()
    ended += finish(started[1:], 60)
    for rank, words in zip(ended, said):
        if words:
            assert rank.returncode == 1 and ("loaded" in rank.stdout) == answers, rank
            assert words in rank.stderr and rank.stderr.count("moelab: ") == 1, rank.stderr
            assert "Traceback" not in rank.stderr


def test_a_rank_that_loads_for_long(tmp_path):
    program = (
        "import time\nfrom pathlib import Path\nfrom moelab.streaming import ranks\n"
        f"ranks.SAY_S, waits = 0.5, Path({str(tmp_path / 'waits')!r})\n"
        "r = ranks.Ranks(ranks.joined())\n{}\nr.gather(1)"
    )
    loads = "while not waits.exists(): time.sleep(0.1)\ntime.sleep(2)"
    commands = [["-c", program.format(does)] for does in ("waits.touch()", loads)]
    first, other = finish(start(commands, tmp_path), 60)
    assert first.returncode == other.returncode == 0, (first, other)
    assert first.stderr.count("rank 0 of 2 waits for the others to load") == 1
    assert "to load" not in other.stderr


def test_a_message_that_did_not_arrive(monkeypatch):
    """MLX returns what lies in memory, maybe an earlier message, if a rank has just ended."""
    messages = []

    def all_gather(row, group):
        """Return the earlier message, as if the other rank had sent that message again."""
        messages.append(np.array(row))
        other = messages[-3] if len(messages) > 2 else messages[-1]
        return mx.array(np.stack([messages[-1], other]))

    monkeypatch.setattr(mx.distributed, "all_gather", all_gather)
    two = Ranks(SimpleNamespace(rank=lambda: 0, size=lambda: 2))
    assert two.gather({"a": [1]}) == [{"a": [1]}] * 2
    with pytest.raises(RankError, match="another rank has ended .its message did not arrive"):
        two.gather({"a": [1]})


MODEL = str(TINY_MOE)
PROMPT = "def add(a, b):"
OPTIONS = ("--slots", "12", "--kernels", "mlx", "--dtype", "float32")
GENERATE = ["generate", MODEL, "--prompt", PROMPT, "--ignore-chat-template", "--verbose", "F"]
GENERATE += [*OPTIONS, "--max-tokens"]


@pytest.fixture
def alone(run):
    """A function that gives the text of one process."""
    return lambda n, *options: run(*GENERATE, n, *options).out


def test_generate_under_mlx_launch(alone):
    """The text is sampled, with as many drafts as rank 0's policy chooses. Only rank 0 prints."""
    port = hosts(2)[0][0].partition(":")[2]
    command = [str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "--backend", "ring"]
    options = ["--draft", "lookup", "--temp", "0.6", "--seed", "3"]
    command += ["--starting-port", port, "--", sys.executable, "-m", "moelab", *GENERATE, "8"]
    command += options
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = done.stderr.splitlines()
    assert done.stdout == alone(8, *options)
    assert len(said) == 2 and all("to join" in line for line in said)


def test_prompts_that_differ(tmp_path):
    commands = [["-m", "moelab", "generate", MODEL, "--prompt", p, *OPTIONS] for p in "ab"]
    for rank in finish(start(commands, tmp_path), 60):
        assert rank.returncode == 1 and rank.stdout == ""
        assert "moelab: prompt: expected the same on all ranks, got 'a', " in rank.stderr


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_what_is_not_divided(command, monkeypatch, run):
    """A command that is not made for ranks would do all its work in each rank."""
    monkeypatch.setenv("MLX_RANK", "0")
    assert f"{command} runs in one process" in run(command, MODEL).err


@pytest.fixture
def served(tmp_path):
    """Two ranks that serve, and a client of rank 0."""
    command = ["-m", "moelab", "serve", MODEL, "--port", "0", "--log-level", "ERROR", *OPTIONS]
    processes = start([command] * 2, tmp_path)
    said = ""
    while not (found := re.search(r"http://\S+/v1", said)):
        line = processes[0].stderr.readline()
        assert line, said + "".join(p.communicate()[1] for p in processes)
        said += line
    return processes, openai.OpenAI(base_url=found[0], api_key="-", max_retries=0, timeout=120)


def test_serve(served, alone):
    """A seed changes no greedy text. Clients that leave or are refused stop no rank."""
    processes, client = served
    expected = alone(16)
    for more in ({}, {"seed": 1}):  # a seed changes no greedy text
        assert complete(client, PROMPT, **more).choices[0].text + "\n" == expected
        stream = complete(client, PROMPT, **more, max_tokens=500, stream=True)
        next(iter(stream))
        stream.close()
        for wrong in ({"model": "another"}, {"logit_bias": {"9999": 1}}):
            with pytest.raises(openai.BadRequestError):
                complete(client, PROMPT, **more, **wrong)
        assert complete(client, PROMPT, **more).choices[0].text + "\n" == expected
    for process in processes:
        process.send_signal(signal.SIGINT)
    assert [rank.returncode for rank in finish(processes, 30)] == [0, 0]


def test_a_rank_of_serve_that_is_killed(served):
    """The client gets an error, and rank 0 ends with one line."""
    processes, client = served
    stream = iter(complete(client, PROMPT, max_tokens=500, stream=True))
    next(stream)
    processes[1].kill()
    begin = time.monotonic()
    with pytest.raises(openai.APIError, match="another rank has ended"):
        list(stream)
    first, _ = finish(processes, 30)
    said = "moelab: rank 0 of 2: another rank has ended"
    assert first.returncode == 1 and first.stderr.count(said) == 1
    assert "Traceback" not in first.stderr and time.monotonic() - begin < 15


def test_a_rank_that_never_starts(tmp_path):
    """MLX waits for that rank in native code. The other rank says so, and ends after a time."""
    program = "from moelab.streaming import ranks; ranks.LOADING_S = 1; ranks.joined()"
    first, _ = environments(2, tmp_path)
    command, env = [sys.executable, "-c", program], {**os.environ, **first}
    alone = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    (said,) = alone.stderr.splitlines()
    assert alone.returncode == 1
    assert "rank 0 waits for rank 1 at 127.0.0.1:" in said and "to join" in said
    assert "within 1 s" in said
