"""Concurrent reads of file ranges, straight into MLX buffers.

On a CPU, experts are read by ``Reader.start`` or ``Reader.read_here``. On CUDA the GPU then copies
the bytes read (``cuda``), and ``StreamConfig(source="host")`` reads each expert once. ``preadv``
writes into the memory of an evaluated MLX array and releases the GIL, so a few Python threads keep
an SSD busy. The ranges of a call with slots (``Ranges``) are read by one call of native code
(``native``). On Linux the calling thread first takes what the page cache holds. This also starts
the reads of the other ranges, all at once. Where memory has little room for pages beside the slots,
reads go past the page cache (``Reader.direct``): a MB then takes 0.3 ms of a core's time and not 1,
since the system need not free a page for each page that it reads.

When a read fails, comes back short or its file has changed, ``read_here`` raises ``ReadError``
with the file, tensor, expert and offset, and the model's call raises it unchanged.
``SlotTable.commit`` is not reached for these reads, so the table holds no expert whose bytes are
missing; the experts that it evicted for them stay evicted. ``Session.call`` cancels the reads that
have not begun and waits for the others, and the next call frees the slots that prefetches had
reserved (``Session._recover``, ``SlotTable.recover``). The caller's prompt cache may hold the token
in some layers and not in others: it begins again with a new one. A prefetch that fails
is not reported: its expert is read again when a layer needs it.
"""
