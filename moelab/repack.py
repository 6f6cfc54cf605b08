"""``repack``: write a checkpoint in which one read brings one expert.

In mlx-lm's layout an expert is nine ranges of a file, gigabytes apart. In the packed layout each
MoE layer has a safetensors file with one tensor of bytes, ``experts [E, stride]``: row e begins on
a page and holds expert e's parameters in ``packing_order``. ``moelab.load`` reads both layouts.
``measure_gain`` says how much faster this machine would read packed experts.
"""

import errno
import random
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils as mlx_lm_utils

from .checkpoint import Checkpoint, CheckpointError, ExpertTensor, mlx_lm_model, new_folder, try_out
from .checkpoint.headers import DTYPE_NAMES, PAGE_NBYTES, header_bytes, packed_header, packing_order
from .experts import expert_modules, expert_parameters
from .streaming.facts import ModelFacts
from .streaming.reading.native import ROOM, address_of, huge_pages
from .streaming.reading.ranges import Ranges
from .streaming.reading.reader import Reader
from .streaming.residency.bank import ranges

# ``measure_gain`` takes ``PAIRS`` pairs of samples of about ``SAMPLE_NBYTES`` each. After
# ``MEASURE_S`` seconds, ``FEWEST`` pairs are enough. The first pair (new memory) does not count.
SAMPLE_NBYTES, PAIRS, FEWEST, MEASURE_S = 16_000_000, 7, 4, 0.3


class Gain(NamedTuple):
    """How fast this machine reads experts: in the pieces that lie on disk, and in one piece."""

    reads: int  # pieces in which an expert lies on disk
    bytes_per_s: np.ndarray  # ``[n, 2]``: in their pieces, in one piece; timed back to back

    @property
    def quartiles(self) -> np.ndarray:
        """The speedup of reading an expert in one piece: lower quartile, median, upper quartile."""
        return np.percentile(self.bytes_per_s[:, 1] / self.bytes_per_s[:, 0], (25, 50, 75))

    def speedups(self, time_s: float, wait_s: float) -> np.ndarray:
        """Return a repack's speedups for a run of ``time_s`` that waits ``wait_s`` for reads."""
        return time_s / (time_s - wait_s * (1 - 1 / self.quartiles))

    def __str__(self):
        lies, packed = np.median(self.bytes_per_s, 0) / 1e9
        low, ratio, high = self.quartiles
        return (
            f"an expert in one piece is read {ratio:.2f} [{low:.2f}, {high:.2f}] times as fast "
            f"here ({packed:.2f} GB/s, in its {self.reads} pieces {lies:.2f}, "
            f"n={len(self.bytes_per_s)})"
        )


def measure_gain(facts: ModelFacts, reader: Reader) -> Gain | None:
    """Compare reads of random experts in their pieces with reads in one piece, for some 0.2 s.

    Each read asks for as many experts as a token needs in a layer. Pages in the page cache are read
    from there, unless the reader reads past it. Returns None if experts lie in one piece already.
    """
    layers = expert_ranges(facts.located)
    reads = max(map(len, layers), default=1)
    if reads == 1:
        return None
    one = max(sum(n for _, n in layer) for layer in layers)
    asked = max(1, min(facts.top_k, SAMPLE_NBYTES // one))
    memory, speeds, begin = memory_for(layers, asked), [], time.perf_counter()

    def speed(packed):
        nbytes = seconds = 0
        for _ in range(max(1, SAMPLE_NBYTES // (asked * one))):
            wanted, layer = [], random.choice(layers)
            for e in random.choices(range(len(layer[0][0].offsets)), k=asked):
                lies = [(t.files[e], t.offsets[e], n) for t, n in layer]
                wanted += _in_one_piece(lies) if packed else lies
            nbytes += sum(n for *_, n in wanted)
            seconds += read_s(reader, wanted, memory)
        return nbytes / seconds

    while len(speeds) < (FEWEST if time.perf_counter() - begin > MEASURE_S else PAIRS):
        first = len(speeds) % 2  # so that neither layout is always second
        pair = speed(first), speed(1 - first)
        speeds.append(pair[::-1] if first else pair)
    return Gain(reads, np.array(speeds[1:]))


def _in_one_piece(lies):
    """Return one range of the first piece's file, with as many bytes as all pieces together."""
    (file, first, _), size = lies[0], lies[0][0].stat().st_size
    nbytes = min(size, sum(n for *_, n in lies))
    return [(file, min(first, size - nbytes) // PAGE_NBYTES * PAGE_NBYTES, nbytes)]


def expert_ranges(located: Mapping[str, ExpertTensor]) -> list[list[tuple[ExpertTensor, int]]]:
    """List for each layer the ranges that hold an expert, each as (first parameter, bytes)."""
    layers = {}
    for name, t in located.items():
        layers.setdefault(name.rsplit(".", 2)[0], {})[name] = t
    return [
        [(of[names[0]], sum(of[n].nbytes for n in names)) for names in ranges(of)]
        for of in layers.values()
    ]


def memory_for(layers: list[list[tuple[ExpertTensor, int]]], experts: int) -> memoryview:
    """Make memory into which ``read_s`` can read ``experts`` experts of any layer."""
    return huge_pages(experts * max(sum(n + PAGE_NBYTES for _, n in layer) for layer in layers))


def read_s(reader: Reader, wanted: Iterable[tuple[Path, int, int]], memory: memoryview) -> float:
    """Return the seconds that one call takes to read all ``wanted``: (file, first byte, bytes)."""
    reads, rooms, at = [], [], 0
    for file, first, nbytes in wanted:
        # A range begins at the same byte of a page in memory and in the file, as direct reads need.
        at += (first - at) % PAGE_NBYTES
        reads.append((reader.open(file), first, [memory[at : at + nbytes]]))
        rooms.append(address_of(memory) + at - first % PAGE_NBYTES)
        at += nbytes
    made = Ranges.of(reads)
    made.table[:, ROOM] = rooms
    begin = time.perf_counter()
    reader.read(made)
    return time.perf_counter() - begin


def repack(
    model: str | Path, out: str | Path, progress: bool = True, library: str = "auto"
) -> Path:
    """Write a model folder for ``moelab.load`` with each expert's bytes in one piece.

    ``library`` is as in ``StreamConfig``. ``out`` appears only when all its bytes are on disk and
    were compared with the source.
    """
    out = Path(out)
    source = Checkpoint(model)
    if source.packed:
        raise CheckpointError(
            f"{source.path}: its experts are packed already, there is nothing to do."
        )
    loaded, config = mlx_lm_model(source, library=library)
    try_out(source, loaded)
    experts = expert_modules(loaded)
    if not experts:
        raise CheckpointError(
            f"{source.path}: expected a model with experts, found none: there is nothing to pack."
        )
    layers = [_Layer(path, module) for path, module in experts]
    packed = {f"{layer.path}.{name}" for layer in layers for name in layer.names}
    backbone = {n: p for n, p in tree_flatten(loaded.parameters()) if n not in packed}

    total = sum(layer.nbytes for layer in layers) + sum(p.nbytes for p in backbone.values())
    made = ("config.json", "model.safetensors.index.json")
    others = (f for f in source.path.iterdir() if f.suffix != ".safetensors" and f.name not in made)
    copied = [f for f in others if f.is_file() and f.name[0] != "."]  # not Finder's .DS_Store
    # The files of a Hub snapshot link into one folder. Another link may lead to a secret file.
    places = {source.path.resolve(), *(file.resolve().parent for file in source.files)}
    for file in copied:
        if file.resolve().parent not in places:
            raise CheckpointError(
                f"{file}: expected a file beside the weights, got a link to {file.resolve()}. Copy "
                "it to its place, or remove the link."
            )
    source.check_unchanged(*copied)
    with new_folder(out, total, progress) as (folder, bar):
        for i, layer in enumerate(layers):
            try:
                layer.write(folder / f"experts-{i:05d}.safetensors")
            except RuntimeError as error:  # MLX failed to read
                raise OSError(f"{source.path}: {layer.path}: {error}. Check the disk.") from error
            finally:
                source.check_unchanged()
            bar.update(layer.nbytes)
        mx.save_safetensors(str(folder / "model.safetensors"), backbone, metadata={"format": "mlx"})
        written = mx.load(str(folder / "model.safetensors"))
        for name, p in backbone.items():
            _compare(np.array_equal(_bits(written[name]), _bits(p)), folder, name)
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        mlx_lm_utils.save_config(config, folder / "config.json")
        source.check_unchanged(*copied)
    return out


class _Layer:
    """The experts of one layer; ``write`` lets MLX read one parameter of all experts at a time."""

    def __init__(self, path, module):
        self.path, self._module, parameters = path, module, expert_parameters(module)
        # Vectors, such as biases, are a few KB for each expert and stay with the backbone.
        self.names = packing_order(name for name, p in parameters.items() if p.ndim > 2)
        self._E = parameters[self.names[0]].shape[0]
        named = [(n, DTYPE_NAMES[parameters[n].dtype], parameters[n].shape[1:]) for n in self.names]
        header = packed_header(path, named, self._E)
        self._header = header_bytes(header, PAGE_NBYTES)  # so that the data begins on a page
        self._stride = header["experts"]["shape"][1]
        self.nbytes = self._E * self._stride

    def write(self, file):
        """Write the packed file, and compare it with the source."""
        with open(file, "wb+") as f:
            offset = f.write(self._header)
            f.truncate(offset + self.nbytes)
            for name in self.names:
                rows = _bits(expert_parameters(self._module)[name]).reshape(self._E, -1)
                for e, row in enumerate(rows):
                    f.seek(offset + e * self._stride)
                    f.write(row)
                for e, row in enumerate(rows):
                    f.seek(offset + e * self._stride)
                    _compare(f.read(len(row)) == row.tobytes(), file, f"{name}, expert {e}")
                offset += rows.shape[1]
                self._module.update(tree_unflatten([(name, mx.array(0))]))  # frees its memory


def _compare(is_same, file, what):
    if not is_same:
        raise OSError(errno.EIO, f"{file}: {what} is not what was written: check the disk")


def _bits(array):
    # MLX counts an axis in 32 bits: too few for the bytes of a large parameter of all experts.
    return np.asarray(mx.contiguous(mx.atleast_1d(array)).view(mx.uint8)).reshape(-1)
