"""What a model takes of memory, and how many slots fit."""

from dataclasses import dataclass

from ..streaming.config import StreamConfig
from ..streaming.footprint import footprint

# Python and MLX without any weights: 73 to 77 MB (Linux, CPU), rounded up.
PROCESS_NBYTES = 80_000_000
# Room for activations, the caches of a short text and the pages that are being read: estimated.
SPARE_NBYTES = 70_000_000


@dataclass(frozen=True)
class ModelSizes:
    """What a model is made of, in bytes, and its shape.

    Attributes:
        checkpoint_nbytes (int): The tensors on disk.
        backbone_nbytes (int): Everything but the experts, in memory.
        expert_nbytes (int): One expert on disk.
        slot_nbytes (int): One more slot in every layer, in memory.
        L (int): MoE layers.
        E (int): Experts in each.
        K (int): Experts per token.
    """

    checkpoint_nbytes: int
    backbone_nbytes: int
    expert_nbytes: int
    slot_nbytes: int
    L: int
    E: int
    K: int

    @classmethod
    def of(cls, path) -> "ModelSizes":
        """The sizes of a model folder, without reading its weights."""
        found = footprint(path, StreamConfig(mode="resident"))
        slots = footprint(path, StreamConfig(slots=found.top_k)).slots_nbytes
        return cls(
            checkpoint_nbytes=found.checkpoint_nbytes,
            backbone_nbytes=found.backbone_nbytes,
            expert_nbytes=found.expert_nbytes,
            slot_nbytes=slots // found.top_k,
            L=found.num_layers,
            E=found.num_experts,
            K=found.top_k,
        )

    @property
    def held_expert_nbytes(self) -> int:
        """One expert in a slot of one layer."""
        return self.slot_nbytes // self.L

    @property
    def other_nbytes(self) -> int:
        """What the process takes beside its slots: backbone, interpreter, MLX."""
        return self.backbone_nbytes + PROCESS_NBYTES

    @property
    def resident_nbytes(self) -> int:
        """The least memory for the model with all of its experts."""
        return self.other_nbytes + SPARE_NBYTES + self.E * self.slot_nbytes

    @property
    def least_nbytes(self) -> int:
        """The least memory for the model with K slots in each layer."""
        return self.other_nbytes + SPARE_NBYTES + self.K * self.slot_nbytes

    def fits(self, memory_nbytes: float) -> int:
        """The most slots in each layer with which the model fits in so much memory, at most E."""
        free = memory_nbytes - self.other_nbytes - SPARE_NBYTES
        return int(min(self.E, free // self.slot_nbytes))
