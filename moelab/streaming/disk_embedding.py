"""Embedding tables that stay on disk: a token needs only a few rows of an n-gram table."""

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from ..checkpoint import Checkpoint, Tensor
from ..experts import unchanged
from .reading.ranges import Ranges
from .reading.reader import Reader

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
HOT_NBYTES = 64 << 20  # of a table: so many bytes of rows, those used last, stay in memory
ROW_NBYTES = 200  # bytes that Python takes beside each row in memory


class DiskEmbedding(nn.Module):
    """Replaces an embedding or its shards. All rows are 0 until ``open`` is called."""

    def __init__(self, shards: list[nn.Module], places: list[dict[str, Tensor]], dims: int):
        super().__init__()
        # The first row of each shard, the shard's tensors by parameter name, and a row's bytes.
        self._starts = [*accumulate((len(shard.weight) for shard in shards), initial=0)]
        self._places = places
        self._sizes = {n: t.nbytes // t.shape[0] for n, t in places[0].items()}
        self._row_nbytes, self._dims = sum(self._sizes.values()), dims
        packing = "group_size", "bits", "mode"
        self._packing = {n: getattr(shards[0], n) for n in packing if hasattr(shards[0], n)}
        self._hot, self._reader, self._dtype = OrderedDict(), None, mx.float32

    @property
    def hot_nbytes(self) -> int:
        """The most bytes that the rows in memory take."""
        return min(HOT_NBYTES, self._starts[-1] * (self._row_nbytes + ROW_NBYTES))

    def open(self, reader: Reader, dtype: mx.Dtype) -> None:
        """Read rows with ``reader`` from now on, and return them in ``dtype``."""
        for tensor in (t for shard in self._places for t in shard.values()):
            reader.open(tensor.file)
        self._reader, self._dtype = reader, dtype

    def __call__(self, ids: mx.array) -> mx.array:
        """Return the rows ``[..., dims]`` of ``ids`` ``[...]``; the ids are evaluated."""
        if self._reader is None:
            return mx.zeros((*ids.shape, self._dims), self._dtype)
        rows, which = np.unique(np.array(ids), return_inverse=True)
        ends, parts = np.cumsum([*self._sizes.values()]), {}
        columns = np.split(self._read(rows.tolist()), ends[:-1], axis=1)
        for (name, tensor), part in zip(self._places[0].items(), columns):
            a = mx.array(np.ascontiguousarray(part)).view(tensor.dtype)
            parts[name] = a if a.dtype == mx.uint32 else a.astype(self._dtype)
        y = parts.pop("weight")
        if self._packing:
            y = mx.dequantize(y, **parts, **self._packing)
        return y[mx.array(which)].reshape(*ids.shape, self._dims)

    def _read(self, rows):
        """Return bytes ``[n, row]`` of distinct rows, from memory if used lately, or from disk."""
        hot, row_nbytes = self._hot, self._row_nbytes
        cold = [row for row in rows if row not in hot]
        arrived = np.empty((len(cold), row_nbytes), np.uint8)
        if cold:
            self._reader.read(Ranges.of([*self._reads(cold, arrived)]))
        hot.update(zip(cold, map(bytes, arrived)))
        for row in rows:
            hot.move_to_end(row)
        found = np.frombuffer(b"".join([hot[row] for row in rows]), np.uint8)
        while len(hot) > HOT_NBYTES // (row_nbytes + ROW_NBYTES):
            hot.popitem(last=False)
        return found.reshape(len(rows), row_nbytes)

    def _reads(self, rows, into):
        """Yield reads of rows into memory ``[n, row_nbytes]``, in the form for ``Ranges.of``."""
        starts, sizes, places = self._starts, self._sizes, self._places
        if not 0 <= rows[0] <= rows[-1] < starts[-1]:
            raise IndexError(f"expected rows from 0 to {starts[-1] - 1}, got {rows[-1]}")
        for row, memory in zip(rows, into):
            shard, at = bisect_right(starts, row) - 1, 0
            for name, size in sizes.items():
                tensor = places[shard][name]
                offset = tensor.offset + (row - starts[shard]) * size
                yield self._reader.open(tensor.file), offset, [memoryview(memory[at : at + size])]
                at += size


def keep_on_disk(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Replace each table that has more rows than the vocabulary by a ``DiskEmbedding``."""
    text = checkpoint.config.get("text_config") or checkpoint.config
    words = text.get("vocab_size") or checkpoint.config.get("vocab_size")
    inside = set()
    for path, module in sorted(model.named_modules(), key=lambda named: named[0]):
        shards = {path: module}
        if [*module.children()] == ["shards"]:  # in the order of paths, shards follow ``module``
            shards = {f"{path}.shards.{i}": shard for i, shard in enumerate(module.shards)}
        if path in inside or not all(isinstance(shard, EMBEDDINGS) for shard in shards.values()):
            continue
        inside |= shards.keys()
        if not words or sum(len(s.weight) for s in shards.values()) <= words:
            continue
        wanted = {f"{p}.{n}": a for p, s in shards.items() for n, a in s.parameters().items()}
        found = unchanged(model, checkpoint, wanted)
        if found.keys() == wanted.keys():  # else the model's rows differ from those on disk
            first = next(iter(shards.values()))
            dims = getattr(first, "dims", first.weight.shape[-1])
            places = [{n: found[f"{p}.{n}"] for n in s.parameters()} for p, s in shards.items()]
            table = DiskEmbedding([*shards.values()], places, dims)
            model.update_modules(tree_unflatten([(path, table)]))
