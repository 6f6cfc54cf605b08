"""Which experts are in memory. A layer and the session talk to ``Residency``. Below it are:

    table.py      which expert is in which slot of a layer, and which is evicted first
    bank.py       the memory of the slots
    layer.py      the slots of one layer: table, bank and the experts on their way

A GPU's host may keep all experts (host.py).
"""
