"""Kernels that an earlier process stored are used, unless they are damaged or not ours."""

import os
import signal
import stat
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from common import watched

from moelab.kernels import code, quantized

if code.llvm is None:
    pytest.skip("needs llvmlite", allow_module_level=True)

from moelab.kernels import stored


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return stored.folder()


@pytest.fixture
def compiled(monkeypatch):
    """A list that grows by each kernel that is compiled."""
    return watched(monkeypatch, code.Code, "compile", lambda self: type(self).__name__)


def pack():
    """The result of the kernel that brings rows into order."""
    x, y, sums = np.arange(64, dtype=np.float32), np.zeros(64, np.float32), np.zeros(8, np.float32)
    run = code.kernel_of.__wrapped__(quantized._Packer, 8, 4, 64, 1)
    run(x.ctypes.data, y.ctypes.data, sums.ctypes.data, 1)
    return [*y, *sums]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts")
def test_no_interrupt_is_lost_on_the_way_to_mlx():
    """``mx.array(a)`` would lose one interrupt in eight."""
    came, caught, rng = 0, 0, np.random.default_rng(0)

    def interrupt(*_):
        nonlocal came
        came += 1
        raise KeyboardInterrupt

    def convert(n):  # a function: in Python 3.13 a ``try`` does not cover its own loop's jump
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 3e-4))
        while came == n:
            assert code.to_mlx(a).dtype == mx.float32

    before, a = signal.signal(signal.SIGALRM, interrupt), np.ones((3, 4096), np.float32)
    try:
        for n in range(300):
            try:
                convert(n)
            except KeyboardInterrupt:
                caught += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (came, caught) == (300, 300)
    assert np.array_equal(np.asarray(code.to_mlx(a)), a)


def test_no_interrupt_is_lost_where_llvm_frees_a_module(monkeypatch):
    writer = quantized._Packer(4, 8, 4, 64, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(code.llvm.ModuleRef, "_dispose", Mock(side_effect=KeyboardInterrupt))
        writer.compile()


def test_a_kernel_is_compiled_once_for_its_arguments_source_and_processor(
    folder, compiled, monkeypatch
):
    first = pack()
    assert compiled == ["_Packer"] and len(list(folder.iterdir())) == 1
    assert pack() == first and compiled == ["_Packer"]
    assert first[64:] == [sum(range(8 * i, 8 * i + 8)) for i in range(8)]
    code.kernel_of.__wrapped__(quantized._Packer, 8, 8, 64, 1)
    monkeypatch.setattr(stored, "_origin", lambda: "another")
    pack()
    assert len(compiled) == len(list(folder.iterdir())) == 3


REPLACED = {
    "empty": lambda file, whole: file.write_bytes(b""),
    "short": lambda file, whole: file.write_bytes(b"short"),
    "changed": lambda file, whole: file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])),
    "writable": lambda file, whole: file.chmod(0o666),
    "fifo": lambda file, whole: (file.unlink(), os.mkfifo(file)),
    "link": lambda file, whole: (file.unlink(), file.symlink_to("nowhere")),
    "device": lambda file, whole: (file.unlink(), file.symlink_to("/dev/zero")),
    "folder": lambda file, whole: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_damaged_file_is_replaced(folder, compiled, how, in_time):
    """A file that others may write to is replaced, too. No FIFO or device makes a process wait."""
    want = pack()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    REPLACED[how](file, whole)
    assert pack() == pack() == want
    if file.is_dir():  # a folder is not replaced
        assert len(compiled) == 3
    else:
        assert len(compiled) == 2 and file.read_bytes() == whole
        assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_others_may_have_written_is_not_used(folder, compiled, monkeypatch):
    want, fstat = pack(), stored.os.fstat

    def of_another(number):
        found = list(fstat(number))
        found[stat.ST_UID] += 1
        return stored.os.stat_result(found)

    with monkeypatch.context() as patch:
        patch.setattr(stored.os, "fstat", of_another)
        assert pack() == want and len(compiled) == 2
    (file,) = folder.iterdir()
    file.unlink()
    folder.chmod(0o777)
    assert pack() == pack() == want and len(compiled) == 4 and not list(folder.iterdir())


def test_where_nothing_can_be_stored_kernels_are_built_each_time(tmp_path, compiled, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert pack() == pack() and len(compiled) == 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(stored.Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    pack()
    assert len(compiled) == 3
