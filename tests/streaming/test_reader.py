"""Reads by native code: the same bytes and errors as in Python, on real files."""

import contextlib
import ctypes
import errno
import os
import queue
import signal
import threading
import time
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from common import cached_nbytes, tries, watched
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

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
    """Return reads into new memory, one for each (offset, sizes of views) in ``places``."""
    return [Read(file, at, [memoryview(bytearray(n)) for n in sizes]) for at, sizes in places]


def ranges_of(reads):
    """Ranges that have room for whole blocks, as the ranges of slots have."""
    made, align = Ranges.of(reads), native.ALIGNED
    offsets, nbytes = made.table[:, native.OFFSET], made.table[:, native.NBYTES]
    rooms = -(-(offsets % align + nbytes) // align) * align
    memory = native.huge_pages(int(rooms.sum()))
    made.table[:, native.ROOM] = native.address_of(memory) + rooms.cumsum() - rooms
    made.kept = made.kept, memory
    return made


def assert_arrived(reads, data=DATA):
    for r in reads:
        assert b"".join(r.views) == data[r.offset : r.offset + r.nbytes]


def assert_reads(reader, reads, data=DATA):
    """Assert that every byte arrives and is counted."""
    before = reader.reads, reader.nbytes, reader.read_s
    reader.read(ranges_of(reads))
    assert_arrived(reads, data)
    assert reader.reads - before[0] == len(reads)
    assert reader.nbytes - before[1] == sum(r.nbytes for r in reads)
    assert reader.read_s > before[2] and reader._quiet.is_set()


@pytest.fixture
def flags_seen(monkeypatch):
    return watched(monkeypatch, native, "read", lambda table, flag=0, *_: flag)


def drop(file):
    """Drop a file from the page cache; try again, since Linux keeps pages that are in use."""
    for _ in range(100):
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not cached_nbytes(file.path):
            return
        time.sleep(0.01)
    pytest.skip("this file system keeps pages")


def spread(n=40):
    """Places of n ranges, no two on one page, each read into one, two or three views."""
    return [(4096 * i + i, [100 + i] * (1 + i % 3)) for i in range(n)]


sizes = st.lists(st.integers(1, 9000), min_size=1, max_size=4)
places = st.lists(st.tuples(st.integers(0, SIZE), sizes), min_size=1, max_size=12)


@needs_native
@tries(200)
@given(places)
def test_native_code_reads_what_python_reads(file, places):
    """Both read the same bytes of any ranges, or give the same error past the file's end."""
    errors = []
    for loop in (native.loop, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "loop", loop)
            reads = ask(File(file), places)
            try:
                read_ranges(ranges_of(reads))
                assert_arrived(reads)
            except ReadError as e:
                errors.append(str(e))
    past = any(offset + sum(sizes) > SIZE for offset, sizes in places)
    assert len(errors) == 2 * past and len({*errors}) == past


@needs_nowait
@pytest.mark.parametrize("limit", ["INLINE_NBYTES", "CACHED_NBYTES", None])
@pytest.mark.parametrize("cached", [0, 1, 17, 40])
def test_what_is_cached_and_what_is_not(cached, limit, file, of_8, monkeypatch):
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
    """One file descriptor is open for writing only, so that native code meets a real error."""
    if not nowait:
        monkeypatch.setattr(reader, "CACHED_NBYTES", 0)
    broken, reads = File(file), ask(of_8.open(file), spread())
    broken.fd = os.open(file, os.O_WRONLY)
    reads[n] = reads[n]._replace(file=broken)
    before = of_8.reads
    with pytest.raises(ReadError, match=f"{file}: bytes, expert {n}, offset {reads[n].offset}: "):
        of_8.read(ranges_of(reads))
    assert of_8.reads - before < len(reads)
    assert any(flags_seen) == nowait
    os.close(broken.fd)


@needs_native
@pytest.mark.parametrize("got", [-1, 0, 50])
def test_an_incomplete_read_is_made_again(got, file, of_8, monkeypatch):
    """If a read fails or gets too few bytes, Python reads the range again, or raises."""
    loop, wrong = native.loop(), b"\xa5" * 50

    def incomplete(table, n, flags, done):
        loop(table, n, flags, done)
        rows = np.ctypeslib.as_array((ctypes.c_int64 * (n * 9)).from_address(table)).reshape(n, 9)
        if n > 7:
            ctypes.memmove(ctypes.c_int64.from_address(int(rows[7, native.IOV])).value, wrong, 50)
            rows[7, native.GOT] = got
            ctypes.c_uint32.from_address(done).value = 0

    monkeypatch.setattr(native, "loop", lambda: incomplete)
    opened = of_8.open(file)
    assert_reads(of_8, ask(opened, spread()))

    failed = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(os, "preadv", Mock(side_effect=failed))
    with pytest.raises(ReadError, match="bytes, expert 7, .*Input/output error"):
        read_ranges(ranges_of(ask(opened, spread())))


@needs_native
@pytest.mark.parametrize("short", [False, True])
def test_the_flag_is_set_once_all_bytes_are_there(short, file, of_8):
    places = spread() + [(SIZE - 5, [10])] * short
    flag = ctypes.c_uint32()
    left = ranges_of(ask(of_8.open(file), places)).read(arrived=ctypes.addressof(flag))
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
    of_8.read_ahead(ranges_of(ask(opened, [(nbytes, [nbytes]), (3 * nbytes, [4096])])))
    end = time.monotonic() + 20
    while cached_nbytes(path) < nbytes + 4096 and time.monotonic() < end:
        time.sleep(0.01)
    assert nbytes + 4096 <= cached_nbytes(path) < 2 * nbytes
    assert of_8.nbytes == 0


@pytest.mark.parametrize("missing, asked_for", [(None, 0), (0, 40), (25, 40)])
def test_what_is_cached_is_not_asked_for(missing, asked_for, file, of_8, monkeypatch):
    opened, asked = of_8.open(file), []
    monkeypatch.setattr(reader.HERE, "read_ahead", lambda fd, *place: asked.append(place))
    monkeypatch.setattr(type(opened), "is_cached", lambda self, offset: offset != missing)
    of_8.read_ahead(ranges_of(ask(opened, [(i, [1]) for i in range(40)])))
    of_8._background.shutdown()
    assert asked == [(i, 1) for i in range(40)][:asked_for]


def test_reading_ahead_ends_when_the_reader_stops(file, of_8, monkeypatch):
    opened, others, asked = of_8.open(file), {*threading.enumerate()}, queue.SimpleQueue()

    def asks(_, *place):
        asked.put(place)
        while not of_8._stops:
            time.sleep(1e-4)

    monkeypatch.setattr(type(opened), "is_cached", lambda self, offset: False)
    monkeypatch.setattr(reader.HERE, "read_ahead", asks)
    of_8.read_ahead(ranges_of(ask(opened, [(0, [SIZE])]))[np.zeros(9, int)])
    asked.get(timeout=60)
    of_8.stop()
    assert {*threading.enumerate()} <= others and asked.empty()


needs_direct = pytest.mark.skipif(native.direct_loop() is None, reason="needs Linux and llvmlite")


@pytest.fixture(params=("without a thread", "threads"))
def direct(file, request):
    """A reader that reads past the page cache."""
    with contextlib.closing(Reader(8, direct=True)) as reading:
        if reading.open(file).direct is None:
            pytest.skip("this file system does not read past the page cache")
        if request.param == "threads":
            reading._queue = False  # as if each read needed a thread
        yield reading


@needs_direct
@tries(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places)
def test_the_same_bytes_past_the_page_cache(direct, file, places):
    """Ranges may begin and end anywhere, also at the end of the file."""
    places = [(at, sizes) for at, sizes in places if at + sum(sizes) <= SIZE] + [(SIZE - 5, [5])]
    assert_reads(direct, ask(direct.open(file), places))


@needs_direct
def test_what_goes_through_the_page_cache(direct, file, tmp_path, monkeypatch):
    """The page cache serves only ranges longer than the buffer, and what direct reads miss."""
    opened, path, size = direct.open(file), tmp_path / "long", native.BUFFER_NBYTES + 5
    drop(opened)
    direct.read(ranges_of(ask(opened, spread())))
    assert not cached_nbytes(file)
    data = np.random.default_rng(0).bytes(size + 9000)
    path.write_bytes(data)
    assert_reads(direct, ask(direct.open(path), [(3, [size]), (7, [40])]), data)
    with pytest.raises(ReadError, match="bytes, expert 0, .*expected 10 bytes, got 5"):
        direct.read(ranges_of(ask(opened, [(SIZE - 5, [10])])))
    monkeypatch.setattr(native, "read_direct", lambda table: None)  # GOT stays 0
    os.close(opened.direct)  # so that no read without a thread can begin
    opened._close_direct.detach()
    assert_reads(direct, ask(opened, spread()))


@needs_direct
@pytest.mark.parametrize("direct", ["without a thread"], indirect=True)
def test_many_reads_in_flight(tmp_path, direct, monkeypatch):
    """Threads make reads for which the queue has no room; a finished read makes room."""
    monkeypatch.setattr(flight, "DEPTH", 10)
    path, size = tmp_path / "large", 100_000
    data = np.random.default_rng(0).bytes(40 * size)
    path.write_bytes(data)
    reads = ask(direct.open(path), [(i * size, [size]) for i in range(40)])
    flights = [f for r in reads for f in direct.fly(ranges_of([r]))]
    assert len(flights) == 10
    for f in reversed(flights):
        f.result()
    assert_arrived(reads[: len(flights)], data)
    assert_reads(direct, reads, data)
    for r in reads[:2]:
        r.views[0][:] = bytes(size)
        assert direct.fly(ranges_of([r]))
    if not (fork := os.fork()):  # in a fork no read in flight ends
        signal.alarm(60)
        direct.close()
        os._exit(0)
    assert os.waitpid(fork, 0) == (fork, 0)
    direct.stop()  # ``stop`` ends reads whose flights and ranges nobody holds
    assert not direct._queue._flying
    assert_arrived(reads, data)


@needs_direct
def test_where_a_file_system_cannot_read_past_the_page_cache(file, monkeypatch):
    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with contextlib.closing(Reader(8, direct=True)) as reading:
        opened = reading.open(file)
        watched(monkeypatch, os, "open", refuse)
        assert_reads(reading, ask(opened, spread()))
    assert opened.direct is None
