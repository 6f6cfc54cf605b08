"""Who will be needed next: experts read into free slots before their layer asks for them.

A prefetcher guesses while one layer runs which experts another will want; a ``Job`` reads
them on threads of its own. A demand read goes first: what has not begun by then is given
up. A guess takes only slots whose experts it does not need itself, never the running
layer's.
"""

import threading
from time import perf_counter

import numpy as np

from .reader import ReadError


class Job:
    """Experts on their way into slots of one layer.

    Args:
        reader (Reader): Counts the reads.
        bank (SlotBank): Where they go.
        slots (dict[int, int]): The slot of each expert, nobody else's until ``settle``.
    """

    def __init__(self, reader, bank, slots):
        self._reader, self._bank, self._slots = reader, bank, slots
        self._waiting = dict(slots)
        self._running = set()
        self._took_s = {}  # None where the read failed
        self._changed = threading.Condition()

    @property
    def num_slots(self):
        """Slots that are still this job's."""
        return len(self._slots)

    def run(self):
        """Read one expert after another until none is left: the work of one thread."""
        while True:
            self._reader.give_way()
            with self._changed:
                if not self._waiting or self._reader.closed:
                    return
                e = next(iter(self._waiting))
                slot = self._waiting.pop(e)
                self._running.add(e)
            begin, took_s = perf_counter(), None
            try:
                self._reader.read_here(self._bank.reads(e, slot))
                self._bank.arrived(e, slot)
                took_s = perf_counter() - begin
            except ReadError:
                pass  # whoever needs it will read it and say so
            finally:
                with self._changed:
                    self._running.discard(e)
                    self._took_s[e] = took_s
                    self._changed.notify_all()

    def settle(self, needed, everything=False):
        """Give up what has not begun, wait for what is needed.

        Args:
            needed (set[int]): Experts to wait for if they are being read now.
            everything (bool): Wait for the others as well.

        Returns:
            tuple[dict, list, bool]: Of each expert that arrived its slot, the seconds that the read
            took and those spent waiting for it here; slots that are free again; whether nothing is
            being read any more.
        """
        arrived, waited_s = {}, {}
        with self._changed:
            free = list(self._waiting.values())
            for e in self._waiting:
                del self._slots[e]
            self._waiting.clear()
            for e in [e for e in self._running if everything or e in needed]:
                begin = perf_counter()
                while e in self._running:
                    self._changed.wait()
                waited_s[e] = perf_counter() - begin
            for e, took_s in self._took_s.items():
                slot = self._slots.pop(e)
                if took_s is None:
                    free.append(slot)
                else:
                    arrived[e] = slot, took_s, waited_s.get(e, 0.0)
            self._took_s.clear()
            return arrived, free, not self._running


class Last:
    """The experts of the last token (SwiftLM PR 26).

    With at least K slots they are all held still, so there is nothing left to read.
    """

    def __init__(self, layers, parents):
        self._layers = layers

    def ask(self, layer, x):
        """What to evaluate together with the routing of ``layer``: a list of arrays."""
        return []

    def guess(self, layer, asked):
        """Which layer will be next and what it will want: its number and ``[K]``; None: no idea."""
        following = (layer + 1) % len(self._layers)
        routed = self._layers[following].routed
        return None if routed is None else (following, routed)


class Lookahead:
    """The next layer's router on this layer's hidden state (MoE-Infinity; ds4 issue 849).

    The next block runs on this block's input up to the call of its experts; mlx is lazy,
    so nothing but its router is computed.
    """

    def __init__(self, layers, parents):
        self._layers, self._parents = layers, parents

    def ask(self, layer, x):
        if layer + 1 == len(self._layers):
            return []
        seen = []
        experts = self._layers[layer + 1]
        experts.probe = seen.append
        try:
            self._parents[layer + 1](x if x.ndim > 2 else x[None])
        except (TypeError, ValueError) as e:
            raise ValueError(
                f"StreamConfig.prefetch='lookahead': {experts.path}: this family's router cannot be asked ahead ({e}). "
                "Use prefetch='none'."
            ) from e
        finally:
            experts.probe = None
        return seen

    def guess(self, layer, asked):
        return (layer + 1, np.array(asked[0])) if asked else None


class Oracle:
    """What a recorded trace says: the upper bound of every prefetcher.

    ``foretell`` it the experts; until then it has no idea.
    """

    def __init__(self, layers, parents):
        self._layers = layers
        self._rows, self._next = (), 0

    def foretell(self, experts):
        """From the next token on, ``experts [T, L, K]`` will be needed."""
        self._rows, self._next = experts, 0

    def ask(self, layer, x):
        return []

    def guess(self, layer, asked):
        following = (layer + 1) % len(self._layers)
        if following == 0:
            self._next += 1
        if self._next >= len(self._rows):
            return None
        return following, self._rows[self._next][following]


PREFETCHERS = {"last": Last, "lookahead": Lookahead, "oracle": Oracle}
