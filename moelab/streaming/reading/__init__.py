"""Concurrent reads of file ranges, straight into the memory of MLX arrays.

The ranges of a call are a table (``Ranges``), of which one call of native code, which holds no GIL,
reads many. If slots take nearly all of the memory, reads go past the page cache (``direct``). Such
a read takes a third of a core's time, since the system need not free a page for each page that it
reads. A layer that waits for experts calls ``Reader.start`` and ``finish``;
prefetches and fills of prompts (``Job``) call ``read_here`` on background threads, or ``fly``.

A read by native code that fails or comes back short is tried once more with ``preadv``. A read
also fails if it still comes back short or its file has changed. ``ReadError`` names the file and,
unless that has changed, tensor, expert and offset. The model's call raises it unchanged, or on CUDA
the next layer's call; a failed ``Job`` raises nothing, and the layer that needs the expert reads
it again. ``SlotTable.commit`` is not reached for failed reads, so the table holds no expert whose
bytes are missing. ``Session.call`` waits for the reads that threads have begun and cancels the
others, and the next call frees the slots that prefetches had reserved (``SlotTable.recover``). The
caller's prompt cache may hold the token in some layers and not in others: the caller begins again
with a new one.
"""
