"""What a model takes of memory, as ``plan`` says, and its shape."""

import re
from dataclasses import dataclass

from ..checkpoint import Checkpoint
from ..streaming.config import StreamConfig
from ..streaming.footprint import footprint
from ..streaming.plan import plan


@dataclass(frozen=True)
class ModelSizes:
    """What a model is made of, in bytes, and its shape.

    Attributes:
        checkpoint_nbytes (int): The tensors on disk.
        other_nbytes (int): What the process takes beside its slots while it decodes.
        expert_nbytes (int): One expert on disk.
        slot_nbytes (int): One more slot in every layer, in memory.
        L (int): MoE layers.
        E (int): Experts in each.
        K (int): Experts per token.
        token_nbytes (int): What a token needs of the checkpoint beside experts: all but the table
            of embeddings, which is the head's, too, in some models.
        layers (int): All layers, those without experts as well.
        prompt_tokens (int): Of a prompt, computed at once.
        slots (int): In each layer, as ``plan`` chooses them for the memory given.
    """

    checkpoint_nbytes: int
    other_nbytes: int
    expert_nbytes: int
    slot_nbytes: int
    L: int
    E: int
    K: int
    token_nbytes: int = 0
    layers: int = 0
    prompt_tokens: int = 2048
    slots: int = 0

    @classmethod
    def of(cls, path, memory_nbytes: float = float("inf")) -> "ModelSizes":
        """The sizes of a model folder, without reading its weights.

        Args:
            path (str or Path): A model folder.
            memory_nbytes (float): For the process and its page cache.

        Raises:
            ValueError: If the model does not fit in the memory with K slots.
        """
        found = footprint(path, StreamConfig(mode="resident"))
        memory = int(min(memory_nbytes, 1 << 60))  # infinity is no int
        planned = plan(path, memory_nbytes=memory)
        tensors = Checkpoint(path).tensors
        experts = found.num_layers * found.num_experts * found.expert_nbytes
        is_tied = not any("head" in name for name in tensors)
        table = 0 if is_tied else sum(t.nbytes for n, t in tensors.items() if "embed" in n)
        layers = {n[0] for name in tensors if (n := re.findall(r"layers\.(\d+)\.", name))}
        return cls(
            checkpoint_nbytes=found.checkpoint_nbytes,
            other_nbytes=planned.other_nbytes,
            expert_nbytes=found.expert_nbytes,
            slot_nbytes=sum(planned.expert_nbytes),
            L=planned.num_layers,
            E=planned.num_experts,
            K=planned.top_k,
            token_nbytes=found.checkpoint_nbytes - experts - table,
            layers=len(layers),
            prompt_tokens=planned.prompt_tokens,
            slots=planned.slots,
        )

    @property
    def active_nbytes(self) -> int:
        """What a decoded token needs of the checkpoint."""
        return self.token_nbytes + self.L * self.K * self.expert_nbytes

    @property
    def held_expert_nbytes(self) -> int:
        """One expert in a slot of one layer."""
        return self.slot_nbytes // self.L

    def fits(self, memory_nbytes: float) -> int:
        """The most slots in each layer with which the model fits in so much memory, at most E."""
        return int(min(self.E, max(0, memory_nbytes - self.other_nbytes) / self.slot_nbytes))
