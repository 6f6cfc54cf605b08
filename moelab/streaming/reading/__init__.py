"""Concurrent reads of file ranges, straight into the memory of MLX arrays.

The ranges of a call are a table (``Ranges``). One call of native code, which holds no GIL, reads
many ranges. If slots take nearly all of the memory, reads go past the page cache (``direct``). On
Linux the disk then writes into the slots by itself (``Queue``): no thread reads, no core copies.
Where that is not possible, threads read, each of them through a buffer of its own.

To add a source of experts, such as a network store, write a subclass of ``Reader`` whose ``start``
and ``start_ahead`` get the same ranges in another way (``UploadingReader`` is an example), and
choose it in ``Session``. (``StreamConfig.source`` is about a GPU's host, see residency/host.py.)

If a read by native code fails or comes back short, ``preadv`` reads again. If that fails, too, or
if the file has changed, the layer's call raises ``ReadError``. (If only the GPU waits for the read,
the next layer's call or the end of the model's call raises it.) A read ahead that fails raises
nothing: the layer reads again. Failed reads do not reach ``SlotTable.commit``, so the table holds
no expert whose bytes are missing. After an error the caller's prompt cache may hold the token in
some layers and not in others: the caller must begin again with a new prompt cache.
"""
