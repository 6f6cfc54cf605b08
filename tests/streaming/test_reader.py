"""Reads by native code: the same bytes and errors as in Python, on real files."""

import contextlib
import ctypes
import errno
import os
import signal
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_cache import cached_nbytes

from moelab.streaming.reading import flight, native, reader
from moelab.streaming.reading.file import File, ReadError
from moelab.streaming.reading.ranges import Ranges, read_ranges
from moelab.streaming.reading.reader import AHEAD_NBYTES, Reader

SIZE = 200_000
DATA = np.random.default_rng(0).bytes(SIZE)

needs_native = pytest.mark.skipif(native.loop() is None, reason="native reads need llvmlite")
needs_nowait = pytest.mark.skipif(not native.NOWAIT, reason="needs Linux")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "file"
    path.write_bytes(DATA)
    with open(path) as f:
        os.fsync(f.fileno())  # pages that are not on the disk yet cannot be dropped
    return path


@pytest.fixture
def of_8():
    with contextlib.closing(Reader(8)) as reading:
        yield reading


class Read(NamedTuple):
    file: File
    offset: int
    views: list

    @property
    def nbytes(self):
        return sum(map(len, self.views))


def ask(file, places):
    """Reads of ``(offset, bytes of each view)`` into new memory."""
    return [Read(file, at, [memoryview(bytearray(n)) for n in sizes]) for at, sizes in places]


def assert_arrived(reads, data=DATA):
    for r in reads:
        assert b"".join(r.views) == data[r.offset : r.offset + r.nbytes]


def assert_reads(reader, reads, data=DATA):
    """Every byte arrives, and the counters say so."""
    before = reader.reads, reader.nbytes, reader.read_s
    reader.read(Ranges.of(reads))
    assert_arrived(reads, data)
    assert reader.reads - before[0] == len(reads)
    assert reader.nbytes - before[1] == sum(r.nbytes for r in reads)
    assert reader.read_s > before[2] and not reader._demand


@pytest.fixture
def flags_seen(monkeypatch):
    """The flags of the reads by native code."""
    seen, read = [], native.read
    monkeypatch.setattr(native, "read", lambda table, n=0, *a: seen.append(n) or read(table, n, *a))
    return seen


def drop(file):
    """Drop a file from the page cache. Linux keeps pages that are in use: these are free soon."""
    for _ in range(100):
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not cached_nbytes(file.path):
            return
        time.sleep(0.01)
    pytest.skip("this file system keeps pages")


def spread(n=40):
    """Places of n ranges in one, two or three views, no two on one page."""
    return [(4096 * i + i, [100 + i] * (1 + i % 3)) for i in range(n)]


sizes = st.lists(st.integers(1, 9000), min_size=1, max_size=4)
places = st.lists(st.tuples(st.integers(0, SIZE), sizes), min_size=1, max_size=12)


@needs_native
@settings(max_examples=200, deadline=None)
@given(places)
def test_native_code_reads_what_python_reads(file, places):
    """Any ranges, also past the end: the same bytes, or the same error."""

    def read(native_code):
        reads, error = ask(File(file), places), None
        try:
            with pytest.MonkeyPatch.context() as patch:
                if not native_code:
                    patch.setattr(native, "loop", lambda: None)
                read_ranges(Ranges.of(reads))
        except ReadError as e:
            error = str(e)
        return reads, error

    (native_reads, got), (reads, want) = read(True), read(False)
    assert got == want
    if want is None:
        assert_arrived(native_reads)
        assert_arrived(reads)
    assert (want is not None) == any(offset + sum(sizes) > SIZE for offset, sizes in places)


@needs_nowait
@pytest.mark.parametrize("limit", ["INLINE_NBYTES", "CACHED_NBYTES", None])
@pytest.mark.parametrize("cached", [0, 1, 17, 40])
def test_what_is_cached_and_what_is_not(cached, limit, file, of_8, monkeypatch):
    """Inline and in threads."""
    if limit:
        monkeypatch.setattr(reader, limit, 0)
    opened = of_8.open(file)
    for _ in range(3):
        reads = ask(opened, spread())
        drop(opened)
        for r in reads[:cached]:
            os.pread(opened.fd, r.nbytes, r.offset)
        assert_reads(of_8, reads)


@needs_native
def test_one_reader_has_one_read_in_flight(file, flags_seen):
    with contextlib.closing(Reader(1)) as one:
        assert_reads(one, ask(one.open(file), spread()))
    assert flags_seen == [0]


@pytest.mark.parametrize("nowait", [False, pytest.param(True, marks=[needs_native, needs_nowait])])
@pytest.mark.parametrize("n", [0, 3, 39])
def test_a_read_that_fails_is_named(n, nowait, file, of_8, flags_seen, monkeypatch):
    """A file descriptor that cannot be read: a real error in native code."""
    if not nowait:
        monkeypatch.setattr(reader, "CACHED_NBYTES", 0)
    fd = os.open(file, os.O_WRONLY)
    opened = of_8.open(file)
    broken = File(file)
    broken.fd = fd
    reads = ask(opened, spread())
    reads[n] = reads[n]._replace(file=broken)
    before = of_8.reads
    with pytest.raises(ReadError, match=f"{file}: bytes, expert {n}, offset {reads[n].offset}: "):
        of_8.read(Ranges.of(reads))
    assert of_8.reads - before < len(reads)
    assert any(flags_seen) == nowait
    os.close(fd)


@needs_native
@pytest.mark.parametrize("got", [-1, 0, 50])
def test_an_incomplete_read_is_made_again(got, file, of_8, monkeypatch):
    """Interrupted, at its end or in the middle: Python reads the range again, or raises."""
    loop, wrong = native.loop(), b"\xa5" * 50

    def incomplete(table, n, flags, done, flag):
        ctypes.c_uint32.from_address(flag).value = 7
        loop(table, n, flags, done, flag)
        rows = np.ctypeslib.as_array((ctypes.c_int64 * (n * 8)).from_address(table)).reshape(n, 8)
        if n > 7:
            ctypes.memmove(ctypes.c_int64.from_address(int(rows[7, native.IOV])).value, wrong, 50)
            rows[7, native.GOT] = got
            ctypes.c_uint32.from_address(done).value = 0

    monkeypatch.setattr(native, "loop", lambda: incomplete)
    opened = of_8.open(file)
    assert_reads(of_8, ask(opened, spread()))

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ReadError, match="bytes, expert 7, .*Input/output error"):
        read_ranges(Ranges.of(ask(opened, spread())))


@needs_native
@pytest.mark.parametrize("short", [False, True])
def test_the_flag_is_set_once_all_bytes_are_there(short, file, of_8):
    places = spread() + [(SIZE - 5, [10])] * short
    flag = ctypes.c_uint32()
    left = Ranges.of(ask(of_8.open(file), places)).read(arrived=ctypes.addressof(flag))
    assert (flag.value, len(left)) == ((0, 1) if short else (1, 0))


@needs_nowait
def test_reading_ahead_brings_pages(tmp_path, of_8):
    path, nbytes = tmp_path / "file", 3 * AHEAD_NBYTES
    path.write_bytes(bytes(4 * nbytes))
    with open(path) as f:
        os.fsync(f.fileno())
    opened = of_8.open(path)
    drop(opened)
    if cached_nbytes(path) is None:
        pytest.skip("this system cannot say what is cached")
    of_8.read_ahead(Ranges.of(ask(opened, [(nbytes, [nbytes]), (3 * nbytes, [4096])])))
    end = time.monotonic() + 20
    while cached_nbytes(path) < nbytes + 4096 and time.monotonic() < end:
        time.sleep(0.01)
    assert nbytes + 4096 <= cached_nbytes(path) < 2 * nbytes
    assert of_8.nbytes == 0


@pytest.mark.parametrize("missing, asked_for", [(None, 0), (0, 40), (25, 40)])
def test_what_is_cached_is_not_asked_for(missing, asked_for, file, of_8, monkeypatch):
    opened, asked = of_8.open(file), []
    monkeypatch.setattr(type(opened), "read_ahead", lambda self, *place: asked.append(place))
    monkeypatch.setattr(type(opened), "is_cached", lambda self, offset: offset != missing)
    of_8.read_ahead(Ranges.of(ask(opened, [(i, [1]) for i in range(40)])))
    of_8._background.shutdown()
    assert asked == [(i, 1) for i in range(40)][:asked_for]


def test_reading_ahead_ends_when_the_reader_stops(file, of_8, monkeypatch):
    opened, begun, others = of_8.open(file), threading.Event(), {*threading.enumerate()}
    monkeypatch.setattr(type(opened), "is_cached", lambda self, offset: False)
    monkeypatch.setattr(type(opened), "read_ahead", lambda self, *place: begun.set())
    of_8.read_ahead(Ranges.of(ask(opened, [(0, [SIZE])]))[np.zeros(100_000, int)])
    assert begun.wait(60)
    of_8.stop()
    assert {*threading.enumerate()} <= others


needs_direct = pytest.mark.skipif(native.direct_loop() is None, reason="needs Linux and llvmlite")


@pytest.fixture
def direct_of_8():
    with contextlib.closing(Reader(8, direct=True)) as reading:
        yield reading


@pytest.fixture(params=("without a thread", "threads"))
def past_the_page_cache(file, direct_of_8, request):
    if direct_of_8.open(file).direct is None:
        pytest.skip("this file system does not read past the page cache")
    if request.param == "threads":
        direct_of_8._queue = False  # the system makes no reads without a thread
    return direct_of_8


@needs_direct
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(places)
def test_the_same_bytes_past_the_page_cache(past_the_page_cache, file, places):
    """Wherever ranges begin and end, also at the end of the file."""
    places = [(at, sizes) for at, sizes in places if at + sum(sizes) <= SIZE] + [(SIZE - 5, [5])]
    assert_reads(past_the_page_cache, ask(past_the_page_cache.open(file), places))


@needs_direct
def test_reads_past_the_page_cache_leave_nothing_in_it(past_the_page_cache, file):
    opened = past_the_page_cache.open(file)
    drop(opened)
    past_the_page_cache.read(Ranges.of(ask(opened, spread())))
    assert not cached_nbytes(file)


@needs_direct
def test_a_range_longer_than_the_buffer_goes_through_the_page_cache(tmp_path, past_the_page_cache):
    path = tmp_path / "long"
    room = native.BUFFER_NBYTES, flight.BUFFER_NBYTES
    size = max(room) + 5
    data = np.random.default_rng(0).bytes(size + 9000)
    path.write_bytes(data)
    assert_reads(
        past_the_page_cache, ask(past_the_page_cache.open(path), [(3, [size]), (7, [40])]), data
    )


@needs_direct
def test_a_file_that_ends_early_or_a_failing_disk_past_the_page_cache(
    past_the_page_cache, file, monkeypatch
):
    opened = past_the_page_cache.open(file)
    with pytest.raises(ReadError, match="bytes, expert 0, .*expected 10 bytes, got 5"):
        past_the_page_cache.read(Ranges.of(ask(opened, [(SIZE - 5, [10])])))
    monkeypatch.setattr(native, "read_direct", lambda table: None)  # GOT stays 0
    os.close(opened.direct)  # so that what reads without a thread cannot begin
    opened._close_direct.detach()
    assert_reads(past_the_page_cache, ask(opened, spread()))  # through the page cache


@needs_direct
@pytest.mark.parametrize("past_the_page_cache", ["without a thread"], indirect=True)
def test_many_reads_in_flight(tmp_path, past_the_page_cache, monkeypatch):
    """More than fit into the buffer are read by threads; one that has ended makes room."""
    monkeypatch.setattr(flight, "BUFFER_NBYTES", 1 << 20)
    path, size = tmp_path / "large", 100_000
    data = np.random.default_rng(0).bytes(40 * size)
    path.write_bytes(data)
    of_8 = past_the_page_cache
    opened = of_8.open(path)
    reads = ask(opened, [(i * size, [size]) for i in range(40)])
    first = [of_8.fly(Ranges.of([r])) for r in reads]
    flights = [f for f in first if f]
    assert len(flights) in (9, 10), "whole pages of 1 MB"
    assert of_8.fly(Ranges.of(reads[-1:])) is None
    for f in reversed(flights):
        f.result()
    assert_arrived(reads[: len(flights)], data)
    assert_reads(of_8, reads, data)
    for r in reads[:2]:
        r.views[0][:] = bytes(size)
        assert of_8.fly(Ranges.of([r]))
    if not (fork := os.fork()):  # where none of them ends
        signal.alarm(60)
        of_8.close()
        os._exit(0)
    assert os.waitpid(fork, 0) == (fork, 0)
    of_8.stop()  # also where nobody has the flights any more, nor their ranges
    assert not of_8._queue._flying
    assert_arrived(reads, data)


@needs_direct
def test_where_a_file_system_cannot_read_past_the_page_cache(file, direct_of_8, monkeypatch):
    def refuses(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_(path, flags, *rest)

    open_, opened = os.open, direct_of_8.open(file)
    monkeypatch.setattr(os, "open", refuses)
    assert_reads(direct_of_8, ask(opened, spread()))
    assert opened.direct is None
