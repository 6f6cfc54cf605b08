"""Embedding tables that stay on disk: a token needs only a few rows of an n-gram table."""

from collections import OrderedDict
from types import SimpleNamespace

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
        self._table, self._hot = _Places(shards, places), OrderedDict()
        self._dims, self._packing = dims, None
        if hasattr(shards[0], "bits"):
            names = "group_size", "bits", "mode"
            self._packing = SimpleNamespace(**{name: getattr(shards[0], name) for name in names})
        self._reader, self._dtype = None, mx.float32

    @property
    def hot_nbytes(self) -> int:
        """The most bytes that the rows in memory take."""
        table = self._table
        return min(HOT_NBYTES, int(table.starts[-1]) * (table.row_nbytes + ROW_NBYTES))

    def open(self, reader: Reader, dtype: mx.Dtype) -> None:
        """Read rows with ``reader`` from now on, and return them in ``dtype``."""
        self._table.open(reader)
        self._reader, self._dtype = reader, dtype

    def __call__(self, ids: mx.array) -> mx.array:
        """Return the rows ``[..., dims]`` of ``ids`` ``[...]``; the ids are evaluated."""
        if self._reader is None:
            return mx.zeros((*ids.shape, self._dims), self._dtype)
        rows, which = np.unique(np.array(ids), return_inverse=True)
        parts = self._table.arrays(self._read(rows.tolist()))
        parts = {n: a if a.dtype == mx.uint32 else a.astype(self._dtype) for n, a in parts.items()}
        y = parts.pop("weight")
        if self._packing is not None:
            y = mx.dequantize(y, **parts, **vars(self._packing))
        return y[mx.array(which)].reshape(*ids.shape, self._dims)

    def _read(self, rows):
        """Return bytes ``[n, row]`` of distinct rows, from memory if used lately, or from disk."""
        table, hot = self._table, self._hot
        cold = [row for row in rows if row not in hot]
        arrived = np.empty((len(cold), table.row_nbytes), np.uint8)
        if cold:
            self._reader.read(Ranges.of([*table.reads(cold, arrived)]))
        hot.update(zip(cold, map(bytes, arrived)))
        for row in rows:
            hot.move_to_end(row)
        found = np.frombuffer(b"".join([hot[row] for row in rows]), np.uint8)
        while len(hot) > HOT_NBYTES // (table.row_nbytes + ROW_NBYTES):
            hot.popitem(last=False)
        return found.reshape(len(rows), table.row_nbytes)


class _Places:
    """Finds a table's rows on disk. ``places`` has each shard's tensors by parameter name."""

    def __init__(self, shards, places):
        self.starts = np.cumsum([0] + [len(shard.weight) for shard in shards])
        self.places, self.files = places, {}
        self.sizes = {n: t.nbytes // t.shape[0] for n, t in places[0].items()}
        self.row_nbytes = sum(self.sizes.values())

    def open(self, reader):
        self.files = {t.file: reader.open(t.file) for p in self.places for t in p.values()}

    def reads(self, rows, into):
        """Yield reads of rows into memory ``[n, row_nbytes]``, in the form for ``Ranges.of``."""
        if not 0 <= rows[0] <= rows[-1] < self.starts[-1]:
            raise IndexError(f"expected rows from 0 to {self.starts[-1] - 1}, got {rows[-1]}")
        for row, memory in zip(rows, into):
            shard = int(np.searchsorted(self.starts, row, "right")) - 1
            at = 0
            for name, size in self.sizes.items():
                tensor = self.places[shard][name]
                offset = tensor.offset + (row - int(self.starts[shard])) * size
                yield self.files[tensor.file], offset, [memoryview(memory[at : at + size])]
                at += size

    def arrays(self, rows):
        """Turn the bytes ``[n, row_nbytes]`` of n rows into the parameters ``[n, ...]``."""
        ends = np.cumsum([*self.sizes.values()])
        parts = zip(self.places[0].items(), np.split(rows, ends[:-1], axis=1))
        return {
            name: mx.array(np.ascontiguousarray(part)).view(tensor.dtype)
            for (name, tensor), part in parts
        }


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
