"""Which experts are in memory.

``Residency`` is what a layer and the session talk to. One module for each part of it:

    table.py      which expert is in which slot of a layer, and which is evicted first
    bank.py       the memory of the slots
    layer.py      the slots of one layer: table, bank and the reads on their way
    arriving.py   the order in which a call's experts arrive
    ahead.py      experts that are read before their layer asks: prefetch, prompts
    job.py        such reads, on background threads

Where an expert comes from that is in no slot (``SOURCES`` in ``config.py``):

    disk.py         from the disk (``reading``), with CUDA through pinned memory (``gpu/cuda.py``)
    gpu/host.py     from the memory of a GPU's host
"""
