"""What each slot of a loaded model is used for."""

import mlx.nn as nn

from moelab.streaming.session import session_of


def assert_every_slot_is_there(model: nn.Module) -> None:
    """Each slot holds one expert, is free or is reserved for a read ahead."""
    for layer in session_of(model).layers:
        table, ahead = layer.slots.table, layer.slots.ahead
        reserved = [slot for g in ahead for slot in (g.slots | g.others).values()]
        every = [*table.slot_of.values(), *table._free, *reserved]
        assert sorted(every) == list(range(table.num_slots)), layer.path
