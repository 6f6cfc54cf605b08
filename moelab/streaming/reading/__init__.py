"""Concurrent reads of file ranges, straight into the memory of MLX arrays.

The ranges of a call are a table (``Ranges``), of which one call of native code, which holds no GIL,
reads many. If slots take nearly all of the memory, reads go past the page cache (``direct``). On
Linux the disk then writes into the slots by itself (``Queue``): no thread reads, no core copies.
Where that cannot be, threads read through a buffer each.

Another source of experts, as a network store, is a ``Reader`` that reads the same ranges in another
way (``UploadingReader`` is one), and is chosen in ``Session``.

A layer that waits for experts calls ``Reader.start`` and ``finish``. What is read before a layer
asks begins with ``start_ahead``; threads read it behind what layers wait for.

A read by native code that fails or comes back short is tried once more with ``preadv``. A read
also fails if it still comes back short or its file has changed. ``ReadError`` names the file and,
unless that has changed, tensor, expert and offset. The model's call raises it unchanged, or on CUDA
the next layer's call; what fails ahead of its layer raises nothing, and the layer reads it again.
``SlotTable.commit`` is not reached for failed reads, so the table holds no expert whose bytes are
missing. ``Session.call`` waits for the reads that have begun and cancels the others, and the next
call frees the slots that prefetches had reserved (``SlotTable.recover``). The caller's prompt cache
may hold the token in some layers and not in others: the caller begins again with a new one.
"""
