"""Small numbers between the host and MLX's graph: routing to the host, slots to the device."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from .. import kernels
from .gpu import cuda


class Handover:
    """Evaluates a layer's routing, and hands the layer's slots over to MLX.

    Args:
        through_pinned (bool): Whether both go through pinned memory (``cuda``), if that is
            possible here.

    Attributes:
        mailbox (cuda.Mailbox or None): That memory; None where MLX moves the numbers.
        pending (list[mx.array]): The last layer's output or what follows from it, or nothing.
            Until it is evaluated it reads slots.
    """

    def __init__(self, through_pinned: bool):
        self.mailbox = cuda.Mailbox() if through_pinned and cuda.available() else None
        self.pending = []

    def routing(
        self,
        indices: mx.array,
        beside: Sequence[mx.array],
        meanwhile: Callable[[], None],
        needs_beside: bool,
    ) -> np.ndarray:
        """The experts of a call, evaluated because the host needs them.

        What the layer before computed is evaluated too: a later call may overwrite its slots. By
        now it nearly always is.

        Args:
            indices (mx.array): ``[..., K]``, the experts of the call.
            beside (Sequence[mx.array]): Other arrays. They are evaluated if MLX moves the numbers.
            meanwhile (Callable): Is called before this thread waits.
            needs_beside (bool): Whether ``beside`` must be evaluated: then MLX moves the numbers.

        Returns:
            np.ndarray: ``[..., K]``.
        """
        if self.mailbox and indices.size <= cuda.MAILBOX_SIZE and not needs_beside:
            self.mailbox.post(indices, *(self.pending or [indices]))
            # Before this thread watches the mailbox, which would keep others from the GIL.
            meanwhile()
            routed = self.mailbox.collect(indices)
        else:
            meanwhile()
            mx.eval(indices, self.pending, beside)
            routed = np.array(indices)
        self.pending = []
        return routed

    def to_device(
        self, numbers: np.ndarray, indices: mx.array, copies: Sequence[cuda.Copy] = ()
    ) -> mx.array:
        """Small numbers of the host as an array, for the call whose routing was evaluated last.

        Args:
            numbers (np.ndarray): uint32.
            indices (mx.array): Of the same shape, the experts of that call.
            copies (Sequence[cuda.Copy]): What the GPU copies before the call computes; only with a
                ``mailbox``.

        Returns:
            mx.array: uint32.
        """
        if self.mailbox and numbers.size <= cuda.MAILBOX_SIZE:
            return self.mailbox.send(numbers, indices, copies)
        return kernels.to_mlx(numbers)

    def settle(self) -> None:
        """Evaluate what reads slots."""
        mx.eval(self.pending)
        self.pending = []
