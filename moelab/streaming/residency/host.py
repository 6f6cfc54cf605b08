"""Keeps experts in pinned memory of the host, from which a kernel in MLX's graph fills GPU slots.

The kernel looks up slots, evicts and copies by itself if a call has at most S (token, expert)
pairs, so a token does not wait for the host. The host chooses slots while routing is recorded.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from ... import kernels
from ...memory import memory_available
from .. import cuda
from ..ranks import Ranks
from ..reading.reader import Reader
from ..reading.uploading import Begun
from .bank import SlotBank
from .layer import LayerSlots
from .table import GPU_POLICIES, SlotTable

# ``state`` has the slot of each expert (S if none), the expert of each slot (E if none), the time
# when each slot was used last, the time now, and hits and misses of prompts and of decoding. Every
# block of threads works out the same new state, and copies its part of the missing experts.
_FETCH = """
    constexpr int E = {E}, S = {S}, THREADS = {threads};
    __shared__ unsigned int slot_of[E], expert_of[S], used[S], needed[S], missing[S], into[S];
    __shared__ unsigned int held[S], hits, count, clock, best[THREADS], best_slot[THREADS];
    int t = threadIdx.x;
    for (int i = t; i < E; i += THREADS) slot_of[i] = state[i];
    for (int i = t; i < S; i += THREADS) {{
        expert_of[i] = state[E + i];
        held[i] = 0;
        used[i] = state[E + S + i];
    }}
    for (int i = t; i < n; i += THREADS) needed[i] = indices[i];
    if (t == 0) {{
        count = hits = 0;
        clock = state[E + 2 * S];
    }}
    __syncthreads();
    for (int i = t; i < n; i += THREADS) {{
        unsigned int slot = slot_of[needed[i]];
        if (slot < S) {{
            held[slot] = 1;
            atomicMax(used + slot, clock + i);
        }}
    }}
    __syncthreads();
    for (int i = t; i < S; i += THREADS)
        if (held[i]) atomicAdd(&hits, 1);
    for (int i = 0; i < n; ++i) {{
        if (slot_of[needed[i]] < S) continue;
        unsigned int least = 0xffffffff, at = 0;
        for (int s = t; s < S; s += THREADS)
            if (used[s] < least) {{
                least = used[s];
                at = s;
            }}
        best[t] = least;
        best_slot[t] = at;
        __syncthreads();
        for (int half = THREADS / 2; half > 0; half /= 2) {{
            if (t < half && best[t + half] < best[t]) {{
                best[t] = best[t + half];
                best_slot[t] = best_slot[t + half];
            }}
            __syncthreads();
        }}
        if (t == 0) {{
            unsigned int slot = best_slot[0], old = expert_of[slot];
            if (old < E) slot_of[old] = S;
            expert_of[slot] = needed[i];
            slot_of[needed[i]] = slot;
            used[slot] = clock + n + i;
            missing[count] = needed[i];
            into[count++] = slot;
        }}
        __syncthreads();
    }}
    if (blockIdx.x == 0) {{
        for (int i = t; i < n; i += THREADS) slots[i] = slot_of[needed[i]];
        for (int i = t; i < E; i += THREADS) new_state[i] = slot_of[i];
        for (int i = t; i < S; i += THREADS) {{
            new_state[E + i] = expert_of[i];
            new_state[E + S + i] = used[i];
        }}
        if (t < 5) {{
            int decoding = (int)phase[0];
            unsigned int more = t == 0 ? 2 * n : 0;
            if (t == 1 + 2 * decoding) more = hits;
            if (t == 2 + 2 * decoding) more = count;
            new_state[E + 2 * S + t] = state[E + 2 * S + t] + more;
        }}
    }}
    const word* row = (const word*)place;
    word base = row[0], expert_nbytes = row[1], chunks = row[2];
    row += 3;
    for (word c = blockIdx.x; c < count * chunks; c += gridDim.x) {{
        const word* chunk = row + 4 * (c % chunks);
        const char* source = (const char*)(base + missing[c / chunks] * expert_nbytes + chunk[0]);
        char* to = (char*)(chunk[1] + into[c / chunks] * chunk[2]);
        int nbytes = (int)chunk[3];
{copy}
    }}
"""


def check(mailbox: cuda.Mailbox | None, ranks: Ranks | None) -> None:
    """Refuse the source ``host`` if no GPU copies experts, or if there are ranks."""
    if mailbox is None or ranks is not None:
        raise ValueError(
            "StreamConfig.source: 'host' needs a CUDA GPU, cuda-bindings and no group of ranks. "
            "Use source 'disk': experts are read when they are needed."
        )


def hold(layers: list[LayerSlots], reader: Reader) -> None:
    """Read each layer's experts into ``host``; refuse experts that are converted or too large."""
    converted = next((layer for layer in layers if not layer.bank.as_read), None)
    if converted is not None:
        raise ValueError(
            f"StreamConfig.source: {converted.bank.path}: expected experts that lie in a slot as "
            "they do on disk, got some that are converted or have biases of their own. Leave dtype "
            "at its default, or use source 'disk'."
        )
    need = sum(layer.num_experts * layer.bank.disk_nbytes for layer in layers)
    if need > (there := memory_available()):
        raise ValueError(
            f"StreamConfig.source: the experts take {need / 1e9:.2f} GB, the host has "
            f"{there / 1e9:.2f} GB available. Use source 'disk': they are read when needed."
        )
    with tqdm(total=need, unit="B", unit_scale=True, desc="experts", disable=None) as bar:
        for layer in layers:
            layer.host = HostExperts(layer.bank, layer.table, layer.num_experts)
            for nbytes in layer.host.read(reader):
                bar.update(nbytes)


class HostExperts:
    """One layer's experts in pinned memory of the host, and which of them the GPU's slots hold.

    Only the GPU knows what its slots hold after a call of ``slots``; ``report`` updates the table.
    A call fills slots only once ``after``, the output of the call before, is computed.
    """

    def __init__(self, bank: SlotBank, table: SlotTable, num_experts: int):
        self._num_experts, self._nbytes = num_experts, bank.disk_nbytes
        self._memory = cuda.Pinned(num_experts * self._nbytes + 4)
        self._memory.bytes[-4:].view(np.uint32)[0] = 1  # the ``flag`` of all copies: none waits
        self._phases = [mx.array([i], mx.uint32) for i in range(2)]
        self.bind(bank, table)

    def bind(self, bank: SlotBank, table: SlotTable) -> None:
        """Fill the slots of another bank from now on, and forget the old ones."""
        self._bank, self._table = bank, table
        self._state, self.after = None, mx.zeros(1)
        self._into, rows = bank.into, []
        for source, to, stride, nbytes in self._into:
            for at in range(0, nbytes, cuda.CHUNK_NBYTES):
                size = min(cuda.CHUNK_NBYTES, nbytes - at)
                rows += (source + at, to + at, stride, size)
        place = [self._memory.address, self._nbytes, len(rows) // 4, *rows]
        self._place = mx.array(np.array(place, np.uint64))
        mx.eval(self._place, self.after, *self._phases)
        E, S = self._num_experts, bank.num_slots
        self._kernel = cuda.kernel(
            f"fetch_{E}_{S}",
            "const unsigned int* state, const unsigned int* phase, const word* place, "
            "const void* after",
            "slots new_state",
            _FETCH.format(E=E, S=S, threads=cuda.THREADS, copy=cuda.COPY),
        )

    def read(self, reader: Reader) -> Iterator[int]:
        """Read all experts, and yield the bytes of each step when they have arrived."""
        E, n = self._num_experts, max(1, 64 * 1024 * 1024 // self._nbytes)
        for first in range(0, E, n):
            places = self._bank.places(range(first, min(first + n, E)))
            reader.read(places.moved(self._memory.address + first * self._nbytes))
            yield places.nbytes

    def takes(self, indices: mx.array) -> bool:
        """Whether ``slots`` can serve a call: at most S pairs, and a policy that the GPU has."""
        return indices.size <= self._table.num_slots and self._table.policy in GPU_POLICIES

    def slots(self, indices: mx.array, decoding: bool) -> mx.array:
        """The slots (uint32) of at most S experts; computing this lazy array fills the slots."""
        if self._state is None:
            self._state = self._from_table()
        slots, self._state = self._kernel(
            indices,
            self._state,
            self._phases[int(decoding)],
            self._place,
            self.after,
            output_shapes=[indices.shape, self._state.shape],
            **cuda.launch(cuda.NUM_COPYING, 2),
        )
        return slots

    def start(self, slots: dict[int, int]) -> list[Begun]:
        """Return the copies of experts into slots that the table chose; nothing is read."""
        address = self._memory.address
        flag, copies = address + self._num_experts * self._nbytes, []
        for e, slot in slots.items():
            first = address + e * self._nbytes
            copies += [
                cuda.Copy(first + source, to + slot * stride, nbytes, flag)
                for source, to, stride, nbytes in self._into
            ]
        return [Begun(copies)]

    def report(self) -> list[list[int]]:
        """Update the table from the GPU; return new hits and misses of prompts and of decoding."""
        if self._state is None:
            return [[0, 0], [0, 0]]
        state, self._state = np.array(self._state), None
        E, S, table = self._num_experts, self._bank.num_slots, self._table
        expert_of, used = state[E : E + S].tolist(), state[E + S : E + 2 * S]
        order = np.argsort(used, kind="stable").tolist()
        table.slot_of = {expert_of[slot]: slot for slot in order if expert_of[slot] < E}
        table.recover()
        return state[-4:].reshape(2, 2).tolist()

    def forget(self) -> None:
        """Mark all slots empty after an exception, unless the host's table is up to date."""
        if self._state is not None:
            self._state = None
            self._table.slot_of.clear()
        self.after = mx.zeros(1)

    def _from_table(self):
        """Return the kernel's state, made from the host's table."""
        E, S, table = self._num_experts, self._bank.num_slots, self._table
        state = np.zeros(E + 2 * S + 5, np.uint32)
        slot_of, expert_of, used = state[:E], state[E : E + S], state[E + S : E + 2 * S]
        slot_of[:], expert_of[:] = S, E
        for i, (e, slot) in enumerate(table.slot_of.items()):
            slot_of[e], expert_of[slot], used[slot] = slot, e, 1 + i
        state[E + 2 * S] = 1 + len(table.slot_of)
        return kernels.to_mlx(state)
