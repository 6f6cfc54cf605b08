"""Compute with experts in the page cache, without copying them into slots.

The file is mapped into memory, so an expert that is in the page cache can be used as it is. Its
first call takes 0.05 ms more and later ones nothing; a copy of 1.8 MB into a slot takes 0.2 ms
(Linux, Xeon). An expert that is not there as a whole (``mincore``) is read into a slot: through the
mapping it would come page by page.
"""

import mmap
import os
import sys
from itertools import pairwise

import mlx.core as mx
import numpy as np

from ... import kernels
from ...checkpoint import GATE_UP, ExpertTensor
from ...kernels import code
from ..reading import native
from ..reading.file import File, check_unchanged

# Bytes of an expert. Smaller ones gain, too (55 kB, tiny-moe, 16 slots: 5.5 ms a token with copies
# and 3.8 without; Xeon, 2 cores, n=3 by 200 tokens). But we know of no model in use that has any,
# and with tiny-moe we show what slots are worth.
LEAST_NBYTES = 256 * 1024


class Pages:
    """A layer's experts in the pages of their files.

    Args:
        tensors (dict[str, ExpertTensor]): By parameter, from opened files.
        linears (dict[str, nn.Module]): The layer's projections, by name.

    Attributes:
        matrices (tuple): As ``FastExperts.all_matrices``, of all E experts.
        addresses (np.ndarray): ``[E, 9]``, as ``kernels.addresses_of``.
    """

    def __init__(self, tensors: dict[str, ExpertTensor], linears: dict):
        views = {name: _view(t) for name, t in tensors.items()}
        self._files = {file for t in tensors.values() for file in t.files}

        def matrices(name):
            parts = (views.get(f"{name}.{part}") for part in ("weight", "scales", "biases"))
            return kernels.Matrices(*parts, *linears[name].form)

        self.matrices = [matrices(name) for name in GATE_UP], matrices("down_proj")
        self.addresses = kernels.addresses_of(self.matrices)
        weights = [views[f"{name}.weight"] for name in (*GATE_UP, "down_proj")]
        steps, nbytes = [w.strides[0] for w in weights], [w[0].nbytes for w in weights]
        first = np.array([w.ctypes.data for w in weights])
        begins = first + np.arange(len(weights[0]))[:, None] * steps
        pages = begins // mmap.PAGESIZE * mmap.PAGESIZE
        self._ranges = np.stack([pages, begins + nbytes - pages], axis=-1)  # [E, 3, 2]
        self._found = np.zeros(max(nbytes) // mmap.PAGESIZE + 2, np.uint8)
        self._asked = np.zeros((2, len(begins)), np.int64)  # experts, and the answers

    def check_unchanged(self) -> None:
        """As ``reading.file.check_unchanged``, of the files. Computing reads what they hold now."""
        check_unchanged(self._files)

    def held(self, experts: list[int]) -> list[int]:
        """Those of some experts that the page cache has: all their weights (scales are a ninth)."""
        n, (asked, answers) = len(experts), self._asked
        asked[:n] = experts
        ranges, asked, found, to = map(code.address, (self._ranges, asked, self._found, answers))
        native.resident()(ranges, self._ranges.shape[1], asked, n, found, to)
        return [e for e, is_held in zip(experts, answers[:n].tolist()) if is_held]


def pages_of(module: kernels.FastExperts, tensors: dict[str, ExpertTensor]) -> Pages | None:
    """The pages of a layer's experts; None where they cannot be computed there.

    Args:
        module (nn.Module): The layer's experts, as mlx-lm built them.
        tensors (dict[str, ExpertTensor]): By parameter, of files that are open. All that the module
            has, as they are in memory.
    """
    files = {file for t in tensors.values() for file in t.files}
    if (
        sys.platform != "linux"
        or native.resident() is None
        or sum(t.nbytes for t in tensors.values()) < LEAST_NBYTES
        or kernels.gate_up_down(module) is None
        or "gate_up_proj" in module
        # Of other files ``mincore`` says that all is there.
        or not all(os.stat(file.fd).st_uid == os.geteuid() for file in files)
        or not all(map(_is_regular, tensors.values()))
    ):
        return None
    return Pages(tensors, {name: module[name] for name in (*GATE_UP, "down_proj")})


def _is_regular(t):
    """Whether a tensor's experts lie in one file, at the same distance from each other."""
    steps = {b - a for a, b in pairwise(t.offsets)}
    return len(set(t.files)) == 1 and (not steps or (len(steps) == 1 and min(steps) > 0))


def _view(t):
    """``[E, ...]`` over a tensor's bytes in its mapped file."""
    file: File = t.files[0]
    kind = {mx.uint32: np.uint32, mx.bfloat16: np.uint16, mx.float32: np.float32}
    kind = np.dtype(kind.get(t.dtype, np.uint8))
    step = t.offsets[1] - t.offsets[0] if len(t.offsets) > 1 else t.nbytes
    inner = np.empty(t.shape, kind).strides
    return np.ndarray((len(t.offsets), *t.shape), kind, file.mapped, t.offsets[0], (step, *inner))
