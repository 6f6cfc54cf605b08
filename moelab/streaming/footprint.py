"""``footprint`` predicts the memory that ``load`` will take, without reading any weights."""

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import Checkpoint
from ..experts import expert_modules, locate_experts, num_experts
from .build import build_model
from .config import StreamConfig
from .plan import plan_of, sizes_of


@dataclass(frozen=True)
class Footprint:
    """The memory that a loaded model takes, in bytes.

    Attributes:
        backbone_nbytes (int): Everything but the experts.
        slots_nbytes (int): All slots. In other modes the buffers (``buffers``), one expert a layer
            (``serial``) or all experts (``resident``).
        resident_nbytes (int): Parameters kept for all E experts.
        checkpoint_nbytes (int): The tensors on disk.
        expert_nbytes (int): One expert on disk.
        num_layers (int): MoE layers.
        num_experts (int): E, the largest of any layer.
        top_k (int): K.
    """

    backbone_nbytes: int
    slots_nbytes: int
    resident_nbytes: int
    checkpoint_nbytes: int
    expert_nbytes: int
    num_layers: int
    num_experts: int
    top_k: int

    @property
    def total_nbytes(self) -> int:
        """Backbone, slots and resident parameters together."""
        return self.backbone_nbytes + self.slots_nbytes + self.resident_nbytes


def footprint(path: str | Path, config: StreamConfig | None = None) -> Footprint:
    """Predict the memory of ``load(path, config)`` without reading any weights.

    With ``slots="auto"`` it is that of the slots that ``plan`` finds now.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig or None): How to stream. Default: ``StreamConfig()``.

    Returns:
        Footprint: The bytes, without a prompt's activations and caches.

    Raises:
        CheckpointError: If the files are damaged.
        ValueError: If ``config`` does not fit the model.
    """
    config = StreamConfig.checked(config)
    checkpoint = Checkpoint(path)
    model, _, top_k = build_model(checkpoint, config)
    if config.asks_for_slots:
        config = plan_of(model, checkpoint, config.resolved(), top_k).config
    backbone, resident, experts = sizes_of(model, config)
    modules = expert_modules(model)
    slots = one = 0
    for (_, m), nbytes in zip(modules, experts):
        E = num_experts(m)
        rows = {"resident": E, "serial": 1, "buffers": top_k}.get(config.mode)
        slots += nbytes * (min(config.slots, E) if rows is None else rows)
    located = locate_experts(model, checkpoint)
    if modules:
        first = modules[0][0] + "."
        one = sum(t.nbytes for name, t in located.items() if name.startswith(first))
    return Footprint(
        backbone,
        slots,
        resident,
        checkpoint.nbytes,
        one,
        len(modules),
        max((num_experts(m) for _, m in modules), default=0),
        top_k,
    )
