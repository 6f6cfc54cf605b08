"""Which experts are in memory.

A layer and the session talk to ``Residency``. Each of its parts has a module:

    table.py      which expert is in which slot of a layer, and which is evicted first
    bank.py       the memory of the slots
    layer.py      the slots of one layer: table, bank and the experts on their way

An expert that is in no slot is read from the disk (``reading``), or copied from the memory of a
GPU's host (host.py).
"""
