"""A model's shape, and the memory that it takes, as ``plan`` says."""

from dataclasses import dataclass

from ..streaming.config import MOST_NBYTES, StreamConfig
from ..streaming.plan import Plan, plan


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
        """The sizes of a folder as commands load it, with memory for process and page cache."""
        config = StreamConfig(lazy_logits=True)
        return cls.planned(plan(path, config, memory_nbytes=int(min(memory_nbytes, MOST_NBYTES))))

    @classmethod
    def planned(cls, plan: Plan) -> "ModelSizes":
        """The sizes of the model that slots were planned for."""
        facts = plan.facts
        experts = facts.num_layers * facts.num_experts * facts.disk_nbytes
        return cls(
            checkpoint_nbytes=facts.checkpoint_nbytes,
            other_nbytes=plan.other_nbytes,
            expert_nbytes=facts.disk_nbytes,
            slot_nbytes=facts.slot_nbytes,
            L=facts.num_layers,
            E=facts.num_experts,
            K=facts.top_k,
            token_nbytes=facts.checkpoint_nbytes - experts - facts.table_nbytes,
            layers=facts.num_blocks,
            prompt_tokens=plan.prompt_tokens,
            slots=plan.slots,
        )

    @property
    def active_nbytes(self) -> int:
        """Bytes of the checkpoint that a decoded token needs."""
        return self.token_nbytes + self.L * self.K * self.expert_nbytes

    def fits(self, memory_nbytes: float) -> int:
        """The most slots in each layer with which the model fits in so much memory, at most E."""
        return int(min(self.E, max(0, memory_nbytes - self.other_nbytes) / self.slot_nbytes))
