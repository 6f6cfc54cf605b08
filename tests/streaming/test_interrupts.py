"""After an interrupt at any line of the engine the model still answers and no slot is lost."""

import pkgutil
import signal
import subprocess
import sys
import threading
from concurrent.futures._base import _AcquireFutures
from contextlib import suppress
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from common import FAST, LONG, assert_every_slot_is_there, greedy_logits, loaded, needs_kernels
from families import K
from faults import at_every_line, interrupt, read_in_parts, read_in_threads
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab import streaming
from moelab.streaming.reading.reader import Reader
from moelab.streaming.residency import bank
from moelab.streaming.residency.table import SlotTable

SLOTS = K + 1
ROUTER = pytest.param({"prefetch": "router"}, marks=needs_kernels)
FIELDS = [{}, {"prefetch": "lookahead"}, ROUTER, {"policy": "lfu"}]


def answer(model):
    """Logits of a prompt that is computed in waves, and of four tokens after it."""
    return greedy_logits(model, LONG[:7], 4)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("way", ["small reads", "reader threads", "into slots", "by a buffer"])
def test_an_interrupt_at_any_line(moe, fields, way, monkeypatch):
    """A prompt and two tokens run again and again, each time interrupted before a later line."""
    prompt, config = [7, 11, 13, 17], {"slots": SLOTS, "kernels": "mlx", **fields}
    if way in ("into slots", "by a buffer"):  # long enough to read ahead
        prompt += [19, 23, 29, 31, 37]
        config |= {"kernels": "auto", "reads": "direct"}
        monkeypatch.setattr(bank, "ROOM_SHARE", 100 if way == "into slots" else -1)
    if way == "reader threads":
        read_in_parts(monkeypatch)
    if fields.get("prefetch") == "router":
        config["kernels"] = "auto"
    with loaded(moe, **config) as model:
        want = answer(model)

        def run():
            cache = make_prompt_cache(model)
            mx.eval(model(mx.array([prompt]), cache=cache))
            for token in (3, 90):
                mx.eval(model(mx.array([[token]]), cache=cache))

        places = 0
        for where in at_every_line(streaming, 23 if FAST else 1, run):
            np.testing.assert_allclose(answer(model), want, atol=1e-4, err_msg=str(where))
            assert_every_slot_is_there(model)
            places += 1
        assert places > 20


def test_ctrl_c_while_reads_are_waited_for(moe, monkeypatch, in_time):
    """Ctrl-C comes while ``wait`` holds the locks that threads need to report the end of a read."""
    read_in_threads(monkeypatch)
    model = loaded(moe, slots=SLOTS, kernels="mlx")
    want, read, came = answer(model), Reader.read_here, threading.Event()
    monkeypatch.setattr(Reader, "read_here", lambda *args: came.wait(60) and read(*args))

    def taken(frame, event, arg):
        if event == "return":
            sys.settrace(None)
            came.set()
            signal.raise_signal(signal.SIGINT)
        return taken

    enter = _AcquireFutures.__enter__.__code__
    with pytest.raises(KeyboardInterrupt):
        sys.settrace(lambda frame, event, arg: taken if frame.f_code is enter else None)
        answer(model)
    assert np.array_equal(answer(model), want)
    moelab.close(model)


class Gone:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("target", ["streaming.model.tokenizer_of", "streaming.session.Room.parts"])
def test_ctrl_c_in_a_destructor(target, monkeypatch):
    """Python loses an exception in a destructor. Ctrl-C there still ends a load or a call."""
    path = moelab.DATA / "models" / "tiny-moe"
    load = partial(moelab.load, path, moelab.StreamConfig(slots=12))
    with load()[0] as model:
        want = answer(model)
        with monkeypatch.context() as patch:
            f = pkgutil.resolve_name(f"moelab.{target}")
            patch.setattr(f"moelab.{target}", lambda *args: Gone() and f(*args))
            with pytest.raises(KeyboardInterrupt):
                answer(load()[0])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert np.array_equal(answer(model), want)


def test_ctrl_c_while_modules_are_imported():
    """Ctrl-C waits until imports end: numpy cannot be imported again after an exception."""
    script = """if True:
        import signal, sys, moelab
        class Finder:
            def find_spec(name, *_):
                if name == "numpy._core.overrides":
                    signal.raise_signal(signal.SIGINT)
        sys.meta_path.insert(0, Finder)
        try:
            moelab.load
        except KeyboardInterrupt:
            print(moelab.load.__name__)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "load\n", done.stderr


def test_a_table_is_whole_again_after_any_line():
    """``recover`` repairs a SlotTable after an interrupt before any line of a call."""
    for n in range(1, 60):
        table = SlotTable(3)
        table.commit(table.choose([0, 1, 2])[1])
        with suppress(KeyboardInterrupt), interrupt(n, streaming):
            table.commit(table.choose([1, 5])[1])
            table.release(table.reserve([6, 7]).values())
        table.recover()
        assert sorted([*table.slot_of.values(), *table._free]) == [0, 1, 2]
        _, misses = table.choose([8, 9, 10])
        table.commit(misses)
        assert set(table.slot_of) == {8, 9, 10}
