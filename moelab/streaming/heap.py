"""Freed memory that the C library keeps, and how it goes back to the system."""

import ctypes

# Where memory is short, glibc gives each array of this size or more a mapping of its own, which
# goes back to the system when the array is freed. glibc's own limit rises to 32 MB, and below it
# freed arrays stay in the heap: 100 to 200 MB after a prompt. The price is a page fault for each
# new page: from 256 KB on a prompt of 400 tokens at 956 MB takes 2.96 s, from 8 MB on 2.57, with
# glibc's own limit 2.48, and it needs 876, 891 and 913 MB (35B layers, n=4).
MAPPED_NBYTES, M_MMAP_THRESHOLD = 8 << 20, -3


def return_free_memory():
    """Return to the system what a prompt's arrays left free in the C library's heap.

    glibc keeps it otherwise: 400 MB after 2,000 tokens of tiny-moe, which the page cache needs.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def keep_no_holes():
    """From now on, have the C library give a large array of this process its own mapping."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_NBYTES)
