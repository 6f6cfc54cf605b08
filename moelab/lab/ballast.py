"""Hold memory so that others cannot: the limit of last resort, for machines that let nobody set one.

Run as a program of its own (``Ballast`` does), it holds as many bytes as its argument says, and lets go of them when its
standard input ends: also when whoever started it was killed.
"""

import ctypes
import errno
import json
import mmap
import subprocess
import sys

CHUNK_NBYTES = 64 << 20


class Refused(OSError):
    """This system does not let the process hold memory."""


class Ballast:
    """Memory held by another process, for as long as the ``with`` block lasts.

    Args:
        nbytes (int): How much.

    Attributes:
        held_nbytes (int): How much it is.
        how (str): ``locked``, or ``touched`` where nothing can be swapped out anyway.

    Raises:
        Refused: If the system allows neither.
    """

    def __init__(self, nbytes):
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            answer = json.loads(self._process.stdout.readline() or '{"refused": "it was killed"}')
            if "refused" in answer:
                raise Refused(answer["refused"])
        except BaseException:
            self.close()
            raise
        self.held_nbytes, self.how = answer["held"], answer["how"]

    @property
    def lost(self):
        """Whether it was killed, as the kernel does first of all when memory runs out."""
        return self._process.poll() is not None

    def close(self):
        """Let go."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _swap_nbytes():
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("SwapTotal"))
    except (OSError, StopIteration):
        return None  # not Linux: it may always swap or compress


def _hold(nbytes):
    """New memory that stays where it is: the mapping and how it is kept."""
    m = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    libc = ctypes.CDLL(None, use_errno=True)
    at = ctypes.addressof(ctypes.c_char.from_buffer(m))
    if libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(nbytes)) == 0:
        return m, "locked"
    error = ctypes.get_errno()
    if _swap_nbytes() != 0:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = (
            "no limit" if soft == resource.RLIM_INFINITY else f"RLIMIT_MEMLOCK is {soft >> 10} KiB"
        )
        raise Refused(
            error,
            f"memory cannot be locked ({errno.errorcode.get(error, error)}, {allowed}), and may be swapped out",
        )
    for first in range(0, nbytes, mmap.PAGESIZE):  # without swap it cannot leave either
        m[first] = 1
    return m, "touched"


def _main(nbytes):
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    try:
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")  # if memory runs out, this goes before anything of the user's
    except OSError:
        pass
    chunks, held, how = [], 0, "locked"
    try:
        while (chunk := min(CHUNK_NBYTES, nbytes - held) // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
            kept, how = _hold(chunk)
            chunks.append(kept)
            held += chunk
        answer = {"held": held, "how": how}
    except OSError as e:
        answer = {"refused": e.strerror or str(e)}
    print(json.dumps(answer), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
