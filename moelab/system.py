"""What depends on the operating system. ``HERE`` is the running one: Linux, macOS, or neither."""

import ctypes
import fcntl
import mmap
import os
import resource
import struct
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil


def on_cuda() -> bool:
    """Whether MLX computes with its CUDA kernels."""
    return mx.cuda.is_available() and mx.default_device() == mx.gpu


def on_metal() -> bool:
    """Whether MLX computes with its Metal kernels."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


class System:
    """An unknown system: its methods change nothing, and what they cannot say is None or false."""

    def drop_pages(self, fd: int) -> str:
        """Drop a file from the page cache, if that needs no root; return the system call's name."""
        return "nothing is dropped on this system"

    def only_what_is_asked(self, fd: int) -> None:
        """Turn the system's own readahead off for this descriptor."""

    def read_ahead(self, fd: int, offset: int, nbytes: int) -> None:
        """Ask the system to read a range into the page cache."""

    def open_direct(self, path: str | Path) -> int:
        """Open a file for reads that bypass the page cache, where the system can do that."""
        return os.open(path, os.O_RDONLY)

    def is_alive(self, thread: int) -> bool:
        """Whether the thread with this ``native_id`` still runs in this process."""
        return False

    def cpu_name(self) -> str | None:
        """The processor's name."""

    def memory(self) -> tuple[int, int]:
        """The machine's memory, and the part that programs may still take, in bytes."""
        found = psutil.virtual_memory()
        return found.total, found.available

    def swapped_pages(self) -> tuple[int, int] | None:
        """The pages read back from swap so far; that number plus the pages still in swap."""

    def pressure(self) -> int | None:
        """How short memory is: 1 not short, 2 short, 4 very short."""


class Linux(System):
    """Linux's C library and /proc."""

    def drop_pages(self, fd):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return "POSIX_FADV_DONTNEED"

    def only_what_is_asked(self, fd):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read_ahead(self, fd, offset, nbytes):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def open_direct(self, path):
        with suppress(OSError):  # the file system may not support it
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
        return super().open_direct(path)

    def is_alive(self, thread):
        return os.path.exists(f"/proc/self/task/{thread}")

    def cpu_name(self):
        with suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):  # on ARM no line does
                    return line.split(":", 1)[1].strip()

    def swapped_pages(self):
        with suppress(OSError):
            _, _, swap = Path("/proc/self/status").read_text().partition("VmSwap:")
            if pages := int(swap.split()[0]) * 1024 // mmap.PAGESIZE if swap else 0:
                faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
                return faults, faults + pages


class Mac(System):
    """macOS, by its C library. Python lacks most constants of the C headers, so they are here."""

    F_RDADVISE, F_RDAHEAD, F_NOCACHE = 44, 45, 48  # <sys/fcntl.h>
    MS_INVALIDATE = 2  # <sys/mman.h>
    THREAD, THREAD_NBYTES = 15, 112  # <sys/proc_info.h>: PROC_PIDTHREADID64INFO and its size
    # <mach/host_info.h>: HOST_VM_INFO64, then the indices of two counts of 4 bytes and of two of 8.
    # (psutil's counts are not used: psutil counts files' pages as swapped.)
    VM_INFO64, FREE, INACTIVE, DECOMPRESSIONS, COMPRESSIONS = 4, 0, 2, 12, 13
    # macOS 27 has new counts behind the old counts. It refuses some requests for the old counts
    # alone (MIG_ARRAY_TOO_LARGE), such as psutil 7.2's. The refusal says how many words there are.
    TOO_LARGE, MOST_WORDS = -307, 1024
    _words = 38  # how many words of 4 bytes to ask for; revision 1 has 38
    _last = np.zeros(MOST_WORDS, np.uint32), 0  # the last counts of pages, and what MLX held then

    @cached_property
    def libc(self) -> ctypes.CDLL:
        """The C library. (But ``fcntl`` is Python's own, which passes C's optional arguments.)"""
        return ctypes.CDLL(None, use_errno=True)

    def drop_pages(self, fd):
        if nbytes := os.fstat(fd).st_size:  # an empty file cannot be mapped
            with mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) as mapped:
                where = ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data)
                if self.libc.msync(where, ctypes.c_size_t(nbytes), self.MS_INVALIDATE):
                    raise OSError(ctypes.get_errno(), "msync(MS_INVALIDATE)")
        return "msync(MS_INVALIDATE)"

    def only_what_is_asked(self, fd):
        fcntl.fcntl(fd, self.F_RDAHEAD, 0)

    def read_ahead(self, fd, offset, nbytes):
        with suppress(OSError):  # the file system may not support it
            fcntl.fcntl(fd, self.F_RDADVISE, struct.pack("qi", offset, nbytes))

    def open_direct(self, path):
        fd = super().open_direct(path)
        fcntl.fcntl(fd, self.F_NOCACHE, 1)
        return fd

    def is_alive(self, thread):
        number, into = ctypes.c_uint64(thread), ctypes.create_string_buffer(self.THREAD_NBYTES)
        return self.libc.proc_pidinfo(os.getpid(), self.THREAD, number, into, len(into)) > 0

    def cpu_name(self):
        name = ctypes.create_string_buffer(256)
        return name.value.decode() if self._ask(b"machdep.cpu.brand_string", name) else None

    def swapped_pages(self):
        """Pages that the compressor unpacked and packed so far; None while memory is not short."""
        if self.pressure() in (None, 1) or (counts := self._pages()) is None:
            return None
        both = counts.view(np.uint64)
        return int(both[self.DECOMPRESSIONS]), int(both[self.COMPRESSIONS])

    def pressure(self):
        level = ctypes.c_int()
        return level.value if self._ask(b"kern.memorystatus_vm_pressure_level", level) else None

    def memory(self):
        if (counts := self._pages()) is None:
            raise OSError("macOS does not say how much memory is free (host_statistics64)")
        free = int(counts[self.FREE]) + int(counts[self.INACTIVE])  # as psutil counts
        page, held = os.sysconf("SC_PAGE_SIZE"), mx.get_active_memory() + mx.get_cache_memory()
        # macOS repeats an old answer if asked often: add what MLX took or freed since then.
        if not np.array_equal(counts, self._last[0]):
            self._last = counts, held
        return os.sysconf("SC_PHYS_PAGES") * page, free * page + self._last[1] - held

    def _pages(self):
        """Return macOS's counts of pages, in words of 4 bytes; None if macOS refuses."""
        counts = np.zeros(self.MOST_WORDS, np.uint32)
        into = ctypes.c_void_p(counts.ctypes.data)
        for _ in range(2):
            words = ctypes.c_uint32(self._words)
            asked = self._host, self.VM_INFO64, into, ctypes.byref(words)
            error = self.libc.host_statistics64(*asked)
            if error != self.TOO_LARGE or not self._words < words.value <= self.MOST_WORDS:
                break
            self._words = words.value
        return None if error else counts

    @cached_property
    def _host(self):
        """The port of macOS's kernel; each call of ``mach_host_self`` would add a right to it."""
        return ctypes.c_uint32(self.libc.mach_host_self())

    def _ask(self, name, value):
        """Read macOS's value of ``name`` into ``value``; return whether macOS has one."""
        nbytes = ctypes.c_size_t(ctypes.sizeof(value))
        nothing = None, ctypes.c_size_t(0)
        return not self.libc.sysctlbyname(name, ctypes.byref(value), ctypes.byref(nbytes), *nothing)


HERE = {"linux": Linux, "darwin": Mac}.get(sys.platform, System)()
