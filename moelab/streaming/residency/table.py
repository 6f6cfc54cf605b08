"""Which expert is in which slot of a layer, and which is evicted first.

A policy that weighs uses by their age is a line of ``EVICTION`` and some words in the help of
``StreamConfig.policy`` (``config.py``): ``StreamConfig``, the commands, ``SlotTable``, the replay
(``moelab/replay/eviction.py``) and their tests take it from there. Another kind of policy is a
subclass with its own ``_victims``, as the replay's Belady is. A test says what a policy means
(``tests/streaming/test_properties.py``).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from heapq import nsmallest
from itertools import islice

from ..config import EVICTION

# Policies by which a GPU chooses slots by itself if its experts are in the host's memory. With the
# other policies the host chooses, which takes longer.
GPU_POLICIES = ("lru",)
LARGEST = 2.0**300  # a use counts at most so much


def policy_of(policy: str, source: str) -> str:
    """The name of the eviction policy: ``auto`` is LRFU, or LRU if the source is ``host``."""
    auto = GPU_POLICIES[0] if source == "host" else "lrfu"
    return auto if policy == "auto" else policy


class SlotTable:
    """Which expert is in which slot of one layer.

    Use it in three steps: ``hits, misses = table.choose(experts)``, read the missing experts into
    the slots that it names, ``table.commit(misses)``. ``choose`` forgets the experts that it
    evicts, so a read that fails leaves their slots free and all other experts where they were.
    """

    def __init__(self, num_slots: int, policy: str = "lru"):
        if policy not in EVICTION:
            raise ValueError(f"policy: expected one of {', '.join(EVICTION)}, got {policy!r}.")
        self.num_slots = num_slots
        self.policy = policy
        self.slot_of = {}  # the slot of every expert held, least recently used first
        self._free = list(range(num_slots))[::-1]
        self._counts, self._decay = defaultdict(float), EVICTION[policy]
        # A use counts this much now. It grows from call to call, so earlier uses need not shrink.
        self._one = 1.0

    @property
    def num_free(self) -> int:
        """The number of slots that hold nothing and are not reserved."""
        return len(self._free)

    def fits(self, experts: Collection[int], taken: int = 0) -> bool:
        """Whether distinct experts fit into the slots, of which ``taken`` are not available."""
        return len(experts) + taken <= self.num_slots

    def waves(self, experts: list[int]) -> list[list[int]]:
        """Divide distinct experts into waves that fit; held experts come first, before eviction."""
        experts = sorted(experts, key=lambda e: e not in self.slot_of)
        return [experts[i : i + self.num_slots] for i in range(0, len(experts), self.num_slots)]

    def choose(
        self, experts: list[int], busy: Mapping[int, int] | None = None
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Choose slots for the distinct experts of a call; return the held and the missing ones.

        Both are expert to slot. ``busy`` experts, of an earlier choice, are not evicted and their
        slots not taken. More experts than slots raise ``ValueError`` and leave the table as it was.
        """
        busy = busy or {}
        if not self.fits(experts, len(busy)):
            raise ValueError(
                f"expected at most {self.num_slots - len(busy)} experts (the slots), "
                f"got {len(experts)}"
            )
        slot_of = self.slot_of
        if self._decay:
            self._count(experts)
        hits, missing = {}, []
        for e in experts:
            slot = slot_of.pop(e, None)
            if slot is None:
                missing.append(e)
            else:
                hits[e] = slot_of[e] = slot  # the last key is the most recently used
        misses, needed, taken, free = {}, hits, [], self._free
        if busy:
            needed, slots = hits | busy, set(busy.values())
            taken = [slot for slot in free if slot in slots]
            free = [slot for slot in free if slot not in slots]
        if missing:
            victims = iter(self._victims(needed, max(0, len(missing) - len(free))))
        for e in missing:
            misses[e] = free.pop() if free else slot_of.pop(next(victims))
        self._free = [*free, *taken, *misses.values()]  # free until ``commit``
        return hits, misses

    def commit(self, misses: dict[int, int]) -> None:
        """Hold experts whose bytes have arrived."""
        for e, slot in misses.items():
            self._free.remove(slot)
            self.slot_of[e] = slot

    def reserve(self, experts: list[int]) -> dict[int, int]:
        """Choose slots for those of the distinct experts that are not held.

        Other experts may be evicted for them, and none of ``experts``. The slots are neither held
        nor free until ``keep`` or ``release``.
        """
        slots = {}
        for e in experts:
            if e in self.slot_of:
                continue
            if not self._free:
                victims = self._victims(experts, 1)
                if not victims:
                    break
                self._free.append(self.slot_of.pop(victims[0]))
            slots[e] = self._free.pop()
        return slots

    def keep(self, expert: int, slot: int) -> None:
        """Hold the expert whose bytes have arrived in its reserved slot."""
        self.slot_of[expert] = slot

    def release(self, slots: Iterable[int]) -> None:
        """Free slots that were reserved."""
        self._free.extend(slots)

    def recover(self) -> None:
        """Free every slot that holds no expert, also those of prefetches, after an exception."""
        held = set(self.slot_of.values())
        self._free = [slot for slot in range(self.num_slots)[::-1] if slot not in held]

    def resize(self, num_slots: int) -> None:
        """Use the first ``num_slots`` slots, at most as many as at first, and forget the others.

        No slot may be chosen or reserved.
        """
        self.num_slots = num_slots
        self.slot_of = {e: slot for e, slot in self.slot_of.items() if slot < num_slots}
        self.recover()

    def _count(self, experts):
        counts, self._one = self._counts, self._one / self._decay
        if self._one > LARGEST:
            self._one /= LARGEST
            for e in counts:
                counts[e] /= LARGEST
        for e in experts:
            counts[e] += self._one

    def _victims(self, needed, num):
        """The experts to evict first: at most ``num``, and none that is needed."""
        candidates = (e for e in self.slot_of if e not in needed)  # least recently used first
        if not self._decay:
            return list(islice(candidates, num))
        return nsmallest(num, candidates, key=self._counts.__getitem__)
