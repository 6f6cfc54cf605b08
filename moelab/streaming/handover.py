"""Moves small numbers between the host and MLX's graph: routing to the host, slots back."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .. import kernels
from . import cuda

# The most tokens of a decoding call: a token of each text of a batch, or a token and its drafts. A
# call of more tokens is a prompt: its large outputs and states are evaluated on the way, its last
# logits may wait (``lazy_logits``), and slots lend memory to it.
FEW_TOKENS = 64


class Handover:
    """Hands slot numbers to MLX, by pinned memory if asked and possible; notes what reads slots."""

    def __init__(self, through_pinned: bool):
        self.mailbox = cuda.Mailbox() if through_pinned and cuda.available() else None
        # The last layer's output or an array that depends on it, which reads slots when evaluated.
        self.pending = []

    def to_device(
        self, numbers: np.ndarray, indices: mx.array, copies: Sequence[cuda.Copy] = ()
    ) -> mx.array:
        """Return the host's numbers as uint32; the GPU makes ``copies`` before it reads them."""
        if self.mailbox and numbers.size <= cuda.MAILBOX_SIZE:
            return self.mailbox.send(numbers, indices, copies)
        return kernels.to_mlx(numbers)

    def settle(self) -> None:
        """Evaluate the arrays that read slots."""
        mx.eval(self.pending)
        self.pending = []
