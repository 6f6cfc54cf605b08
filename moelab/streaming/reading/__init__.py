"""Concurrent reads of file ranges, straight into MLX buffers.

``preadv`` writes into the memory of an evaluated MLX array and releases the GIL, so a few Python
threads keep an SSD busy. The ranges of a call with slots are a table (``Ranges``), of which one
call of native code can read many (``native``). On Linux the calling thread of a small call first
takes what the page cache holds. This also starts the reads of the other ranges, all at once. Where
memory has little room for pages beside the slots, reads go past the page cache
(``StreamConfig.reads``): a read then takes a third of a core's time, since the system need not free
a page for each page that it reads.

Who reads an expert, and what a failed read does:

    mode ``resident``           MLX reads, in ``load``, and a packed layer is read by
                                ``experts.read_experts``: ``load`` raises
    ``serial``, ``buffers``     ``Reader.read``, of plain ranges: the model's call raises
    ``stacked``, ``fused``      ``LayerSlots.begin`` and ``finish`` call ``Reader.start`` and
                                ``finish``: the model's call raises
    the same on CUDA            ``UploadingReader`` reads into pinned memory, from which the GPU
                                copies: the call raises, at the next layer or its end
    ``source="host"``           ``residency/host.py``, each expert once, in ``load``, which raises
    prefetch, fills of prompts  ``Job``, with ``Reader.read_here``, or past the page cache with
                                ``Reader.fly``: nothing is raised, the layer that needs the expert
                                reads it again
    with ranks                  each rank reads its own experts in one of these ways. A rank whose
                                call raised raises ``RankError`` in later calls; the other ranks
                                notice when the process ends

A read by native code that fails or comes back short is tried once more with ``preadv``. A read
also fails if it still comes back short or its file has changed. ``ReadError`` names the file and,
unless that has changed, tensor, expert and offset. The model's call raises it unchanged.
``SlotTable.commit`` is not reached for these reads, so the table holds no expert whose bytes are
missing; the experts that it evicted for them stay evicted. ``Session.call`` waits for the reads
that threads have begun and cancels the others, and the next call frees the slots that prefetches
had reserved (``Session._recover``, ``SlotTable.recover``). The caller's prompt cache may hold the
token in some layers and not in others: the caller begins again with a new one.
"""
