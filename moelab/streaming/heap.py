"""Returns to the system freed memory that the C library keeps."""

import ctypes

# Where memory is short, glibc gives each array of so many bytes or more a mapping of its own, which
# goes back to the system when the array is freed. glibc's own limit rises to 32 MB, and below it
# freed arrays stay in the heap: 100 to 200 MB after a prompt. A mapping costs a page fault for each
# new page: a prompt of 400 tokens took 19% longer when arrays from 256 KB up had mappings, and 4%
# longer when only those from 8 MB up had.
MAPPED_NBYTES, M_MMAP_THRESHOLD = 8 << 20, -3


def return_free_memory():
    """Return to the system the memory that a prompt's arrays left free in glibc's heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def keep_no_holes():
    """Have the C library give each large array of this process its own mapping from now on."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_NBYTES)
