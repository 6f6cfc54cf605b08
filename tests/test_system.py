"""What moelab asks of the operating system. A C library stands in for macOS."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

import moelab
from moelab import DATA, LookupDraft, StreamConfig, load, memory, system
from moelab.checkpoint import checkpoint
from moelab.lab import check, machine
from moelab.lab.decode import decode, decode_drafted
from moelab.streaming import plan as plans
from moelab.streaming.reading import flight
from moelab.streaming.session import session_of

TINY = DATA / "models/tiny-moe"


def test_one_module_knows_how_systems_differ():
    asks = r"sys\.platform|platform\.system\(\) [=!]=|posix_fadvise|\"Darwin\"|import fcntl"
    package = Path(moelab.__file__).parent
    found = [f for f in package.rglob("*.py") if re.search(asks, f.read_text())]
    assert found == [package / "system.py"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The C library that stands in for macOS, compiled."""
    if (cc := shutil.which("cc")) is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    made = tmp_path_factory.mktemp("darwin") / "darwin.so"
    source = Path(__file__).with_name("helpers") / "darwin.c"
    subprocess.run([cc, "-Wall", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


@pytest.fixture
def mac(library, tmp_path, monkeypatch):
    """A ``system.Mac`` that calls ``library``; ``set`` changes a number that the library has."""
    monkeypatch.setenv("DARWIN_LOG", str(tmp_path / "log"))
    mac = system.Mac()
    mac.libc = ctypes.CDLL(str(library), use_errno=True)
    mac.set = lambda name, n: setattr(ctypes.c_int.in_dll(mac.libc, name), "value", n)
    for module in (memory, machine, check, plans):
        monkeypatch.setattr(module, "HERE", mac)
    yield mac
    mac.set("level", 1), mac.set("fails", 0), mac.set("newer", 0), mac.set("free_pages", 2000000)


def test_a_macs_pages_are_dropped(mac, tmp_path):
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "a.safetensors").write_bytes(bytes(70_001))
    assert machine.drop_pages(tmp_path) == "msync(MS_INVALIDATE)"
    assert (tmp_path / "log").read_text() == "msync MS_INVALIDATE 70001 a.safetensors\n"
    mac.set("fails", 1)
    with pytest.raises(OSError, match="MS_INVALIDATE"):
        machine.drop_pages(tmp_path)


def test_a_mac_swaps_if_its_memory_is_short_and_pages_come_back(mac, monkeypatch):
    """A Mac does not swap under normal pressure, whatever was compressed; ``check`` agrees."""
    monkeypatch.setattr(check, "memory_available", lambda: 10**9)
    monkeypatch.setattr(check, "card", machine.card.__wrapped__)
    for level, swaps in ((1, False), (2, True), (4, True)):
        mac.set("level", level)
        pages = memory.swapped_s()
        assert pages == ((500 * memory.PAGE_S, 8000 * memory.PAGE_S) if swaps else None)
        found = check.findings(TINY)
        assert next(good for good, what, _ in found if what.startswith("memory: ")) != swaps
    mac.set("fails", 1)
    assert memory.swapped_s() is None
    with pytest.raises(OSError, match="how much memory is free"):
        memory.memory_available()


@pytest.mark.parametrize("newer", (0, 1))
def test_a_macs_free_memory(newer, mac, monkeypatch):
    """macOS 27 has more counts, and refuses to give the old counts alone."""
    mac.set("newer", newer)
    mac.set("level", 4)
    monkeypatch.setattr(memory, "memory_in_cgroups", lambda: None)
    page = os.sysconf("SC_PAGE_SIZE")
    for _ in "12":
        assert memory.memory_available() == 2_000_500 * page
        assert memory.swapped_s() == (500 * memory.PAGE_S, 8000 * memory.PAGE_S)
    assert mac.memory()[0] == system.System().memory()[0]


def test_a_mac_that_repeats_an_answer_knows_what_arrays_took_since(mac):
    """The kernel renews its answer 2 to 10 times a second, and repeats the last answer meanwhile.

    A prompt's memory that was just returned must not cost slots.
    """
    mx.clear_cache()  # the array takes new memory
    page, before = os.sysconf("SC_PAGE_SIZE"), mac.memory()[1]
    array = mx.zeros(2**20)
    mx.eval(array)
    assert 2**22 <= before - mac.memory()[1] < 2**23
    mac.set("free_pages", 4000)
    assert mac.memory()[1] == 4500 * page
    del array
    mx.clear_cache()
    assert 2**22 <= mac.memory()[1] - 4500 * page < 2**23


def test_a_macs_plan_counts_what_a_former_model_took(mac, monkeypatch):
    """On Metal MLX keeps the memory of freed arrays, and the system counts this memory as used."""
    monkeypatch.setattr(memory, "memory_in_cgroups", lambda: None)
    monkeypatch.setattr(plans, "memory_in_cgroups", lambda: None)
    mac.set("free_pages", 1_100_000)
    want = moelab.plan(TINY).memory_nbytes
    mac.set("free_pages", 1_000_000)
    monkeypatch.setattr(mx, "clear_cache", lambda: mac.set("free_pages", 1_100_000))
    assert moelab.plan(TINY).memory_nbytes == pytest.approx(want, abs=1e6)


def test_linux_says_what_is_in_swap(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(system.resource, "getrusage", lambda _: SimpleNamespace(ru_majflt=500))
    assert system.Linux().swapped_pages() is None  # no such file
    for text in ("Name:\tkernel\n", "VmSwap:\t 0 kB\n", "VmSwap:\t 8000 kB\nHugetlb:\t0 kB\n"):
        (tmp_path / "status").write_text(text)
        pages = 8000 * 1024 // system.mmap.PAGESIZE if "8000" in text else 0
        assert system.Linux().swapped_pages() == ((500, 500 + pages) if pages else None)


def test_the_processors_name(mac, monkeypatch, tmp_path):
    """On ARM /proc/cpuinfo has no name; the core's name is added if LLVM knows it."""
    assert machine._cpu_name() == "Apple M4"
    monkeypatch.setattr(machine, "HERE", system.Linux())
    monkeypatch.setattr(system, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    for text in (None, "processor\t: 0\nCPU implementer\t: 0x41\n"):
        if text:
            (tmp_path / "cpuinfo").write_text(text)
        for llvm, name in ((None, "aarch64"), ("neoverse-v2", "aarch64 neoverse-v2")):
            kind = llvm and SimpleNamespace(get_host_cpu_name=lambda llvm=llvm: llvm)
            monkeypatch.setattr(machine.code, "llvm", kind)
            assert machine._cpu_name() == name
    (tmp_path / "cpuinfo").write_text("model name\t: A CPU\n")
    assert machine._cpu_name() == "A CPU"


@pytest.mark.parametrize("side", ("mac", "here"))
def test_a_thread_is_alive_until_it_has_ended(side, request, in_time):
    side = request.getfixturevalue("mac") if side == "mac" else system.HERE
    goes = threading.Event()
    thread = threading.Thread(target=goes.wait)
    thread.start()
    assert side.is_alive(thread.native_id)
    goes.set()
    thread.join()
    while side.is_alive(thread.native_id):  # the thread outlives its Python code
        pass


def test_what_is_not_known_is_not_asked(tmp_path):
    """On an unknown system nothing is asked, and files are read as usual."""
    other = system.System()
    (tmp_path / "file").write_bytes(b"some")
    with open(other.open_direct(tmp_path / "file"), "rb") as f:
        assert "nothing" in other.drop_pages(f.fileno()) and f.read() == b"some"
        other.only_what_is_asked(f.fileno()), other.read_ahead(f.fileno(), 0, 4)
    said = other.cpu_name(), other.swapped_pages(), other.pressure(), other.is_alive(1)
    assert said == (None, None, None, False)


@pytest.mark.parametrize("draft", (False, True))
def test_a_macs_memory_is_wired_while_decoding_is_timed(draft, monkeypatch):
    """Memory is wired as in mlx-lm's ``stream_generate``: from the first prompt part to the end."""
    told = []
    with load(TINY, StreamConfig(slots=8))[0] as model:
        monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 10**12})
        monkeypatch.setattr(mx, "set_wired_limit", lambda nbytes: told.append(nbytes) or 7)
        calls = {name: partial(told.append, name) for name in ("before_prompt", "before_clock")}
        if draft:
            decode_drafted(model, [5, 6], LookupDraft(), 2, 3, **calls)
        else:
            decode(model, [5, 6], 3, **calls)
    assert told == ["before_prompt", 10**12, "before_clock", 7]


def test_a_spawned_child_asks_no_stream_of_another_threads_gpu(monkeypatch):
    monkeypatch.setattr(checkpoint, "_computes", None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    checkpoint.check_fork()
    assert checkpoint._computes == os.getpid()


def test_where_nothing_is_read_past_the_page_cache(monkeypatch):
    """No code is compiled for such reads, and ``direct`` reads as ``cached`` does, as on macOS."""
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    monkeypatch.setattr(flight, "built", lambda *_: pytest.fail("compiled"))
    model, _ = load(TINY, StreamConfig(slots=8, reads="direct"))
    with model:
        assert not session_of(model).reader.direct
        mx.eval(model(mx.array([[1, 2, 3]])))


# Python loses Linux's functions and moelab is told that this is macOS. The library is loaded before
# Linux's C library, so that the calls of Python's ``fcntl`` go to the library, too.
ON_A_MAC = """
import mmap, os, sys, time
from pathlib import Path
import mlx_lm.server, pandas, psutil
for module, *names in ((os, "posix_fadvise", "O_DIRECT", "RWF_NOWAIT", "sched_getaffinity"),
                       (mmap, "MADV_HUGEPAGE")):
    for name in names:
        delattr(module, name)
sys.platform = "darwin"
from in_process import started
import moelab
from moelab import memory, system
from moelab.lab import check, machine
from moelab.streaming.session import session_of

def step(name):
    with open(os.environ["DARWIN_LOG"], "a") as log:
        log.write(f"-- {name}\\n")

path = moelab.DATA / "models/tiny-moe"
file = path / "model.safetensors"
step("drop")
machine.drop_pages(path)
step("rate")
machine.read_speed(file, cold=True, readers=2, count=8, direct=True)
machine.read_speed(file, cold=False, readers=2, count=8)
step("name")
machine.card()
step("load")
model, tokenizer = moelab.load(path, moelab.StreamConfig(slots=8))
step("text")
for response in mlx_lm.stream_generate(model, tokenizer, "def f(x):", max_tokens=8):
    assert response.token >= 0
step("ahead")
reader = session_of(model).reader
opened = next(iter(reader._files.values()))
system.HERE.read_ahead(opened.fd, 4096, 128 << 10)
step("pressure")
memory.swapped_s()
step("close")
moelab.close(model)
step("serve")
_, engine = started("--slots", "8")
step("stop")
engine.stop()
step("check")
check.TEXTS, check.TOKENS, check.WARMUP, check.PROMPT = 1, 2, 1, 40
check.check(path, Path(os.environ["DARWIN_LOG"]).with_suffix(".json"))
step("end")
"""


def test_what_a_mac_is_asked(library, tmp_path):
    """Each call from loading to ``check``'s end has an open file and arguments that macOS takes."""
    log = tmp_path / "log"
    preload = {"LD_PRELOAD": str(library), "DARWIN_LOG": str(log), "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join((*sys.path, str(Path(__file__).with_name("helpers"))))
    words = [sys.executable, "-c", ON_A_MAC]
    env = os.environ | preload | {"PYTHONPATH": paths}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    steps = dict(s.partition("\n")[::2] for s in log.read_text().split("-- "))
    calls = {name: sorted({*text.splitlines()}) for name, text in steps.items()}
    size, file = (TINY / "model.safetensors").stat().st_size, "model.safetensors"
    dropped, alone = f"msync MS_INVALIDATE {size} {file}", f"F_RDAHEAD 0 {file}"
    pressure = "sysctlbyname kern.memorystatus_vm_pressure_level"
    counts = "host_statistics64 HOST_VM_INFO64"
    # ``check`` asks for experts ahead only if that is faster.
    assert {*calls.pop("check")} - {f"F_RDADVISE {file}"} == {alone, dropped, pressure, counts}
    assert calls == {
        "": [],
        "drop": [dropped],
        "rate": [f"F_NOCACHE 1 {file}", alone, dropped],
        "name": [counts, "mach_host_self", "sysctlbyname machdep.cpu.brand_string"],
        "load": [alone],
        "text": [],
        "ahead": [f"F_RDADVISE {file}"],
        "pressure": [pressure],
        "close": [],
        "serve": [alone],
        "stop": ["proc_pidinfo PROC_PIDTHREADID64INFO"],
        "end": [],
    }


COMPILES = """
import os
uid = os.getuid()
os.getuid = lambda: uid + int(os.environ["OTHER"])
import moelab
import mlx.core as mx
mx.set_default_device(mx.cpu)
mx.eval(mx.compile(lambda x: x * mx.exp(x) + 1)(mx.ones(9)))
print(os.environ["TMPDIR"])
"""


@pytest.mark.parametrize("other", (0, 1))
def test_mlx_compiles_in_a_folder_of_ones_own(other, tmp_path):
    (tmp_path / "mlx").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path), "OTHER": str(other)}
    ran = subprocess.run([sys.executable, "-c", COMPILES], env=env, text=True, capture_output=True)
    own = tmp_path / ".cache" / "moelab" / "tmp"
    assert ran.stdout.split() == [str(own if other else tmp_path)], ran.stderr
    if other:
        assert not any((tmp_path / "mlx").iterdir()) and own.stat().st_mode & 0o777 == 0o700
