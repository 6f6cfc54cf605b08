"""A model's shape, and the memory that it takes, as ``plan`` says."""

import re
from dataclasses import dataclass

from ..checkpoint import Checkpoint
from ..streaming.config import StreamConfig
from ..streaming.footprint import footprint
from ..streaming.plan import plan


@dataclass(frozen=True)
class ModelSizes:
    """What a model is made of, in bytes, and its shape."""

    checkpoint_nbytes: int  # all tensors on disk
    other_nbytes: int  # the process's memory beside its slots while it decodes
    expert_nbytes: int  # one expert on disk
    slot_nbytes: int  # one more slot in every layer, in memory
    L: int  # layers with experts
    E: int  # experts in each
    K: int  # experts per token
    # A token needs so much of the checkpoint beside experts: all but the table of embeddings, which
    # in some models is the head too.
    token_nbytes: int = 0
    layers: int = 0  # all layers, those without experts as well
    prompt_tokens: int = 2048  # tokens of a prompt that are computed at once
    slots: int = 0  # in each layer, as ``plan`` chooses them for the memory given

    @classmethod
    def of(cls, path, memory_nbytes: float = float("inf")) -> "ModelSizes":
        """The sizes of a model folder, without reading its weights.

        ``memory_nbytes`` is for the process and its page cache.
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
        """Bytes of the checkpoint that a decoded token needs."""
        return self.token_nbytes + self.L * self.K * self.expert_nbytes

    @property
    def held_expert_nbytes(self) -> int:
        """Bytes of one expert in a slot of one layer."""
        return self.slot_nbytes // self.L

    def fits(self, memory_nbytes: float) -> int:
        """The most slots in each layer with which the model fits in so much memory, at most E."""
        return int(min(self.E, max(0, memory_nbytes - self.other_nbytes) / self.slot_nbytes))
