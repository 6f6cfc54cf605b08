"""Which expert is in which slot of a layer, and which is evicted first.

A new eviction policy is a line of ``EVICTION`` and a word in ``StreamConfig``'s docstring:
``StreamConfig``, the commands, ``SlotTable`` and the replay (``moelab/replay/eviction.py``) take it
from there, and so do their tests. What a policy means is tested by a test of its own
(``tests/streaming/test_properties.py``). With experts in its host's memory a GPU chooses slots by
itself if the policy is one of ``GPU_POLICIES``. With another one the host chooses, which takes
longer.
"""

from collections import ChainMap, defaultdict
from collections.abc import Collection, Iterable, Mapping
from heapq import nsmallest
from itertools import islice

# The eviction policies. A use of an expert counts 1, and with each later call of the layer it
# counts that many times less. Of the experts held and not needed now, the one whose uses count
# least is evicted, and of equal ones the least recently used. (Lee et al., LRFU, 2001.) With 0.98,
# 1 to 43% fewer experts are read than with ``lru``, and from 3% more to 15% fewer than with ``lfu``
# (the five traces of ``data/traces``, 10 to 56 of 64 slots, replayed; medians 6 and 3%).
EVICTION = {
    "lru": 0.0,  # least recently used
    "lfu": 1.0,  # least frequently used
    "lrfu": 0.98,  # least recently and frequently used
}
# Those by which a GPU chooses slots by itself (``host``). With the others the host chooses them.
GPU_POLICIES = ("lru",)
POLICIES = ChainMap(EVICTION, {"auto": None})  # what ``StreamConfig`` takes
LARGEST = 2.0**300  # what a use counts, at most


def policy_of(policy: str, source: str) -> str:
    """The name of the eviction policy. ``auto``: LRFU, with source ``host`` LRU.

    Args:
        policy, source (str): As in ``StreamConfig``.
    """
    auto = GPU_POLICIES[0] if source == "host" else "lrfu"
    return auto if policy == "auto" else policy


class SlotTable:
    """Which expert is in which slot of one layer.

    Use it in three steps: ``hits, misses = table.choose(experts)``, read the missing experts into
    the slots that it names, ``table.commit(misses)``. ``choose`` forgets the experts that it
    evicts, so a read that fails leaves their slots free and all other experts where they were.

    Args:
        num_slots (int): S.
        policy (str): One of ``EVICTION``.

    Attributes:
        num_slots (int): As above.
        policy (str): As above.
        slot_of (dict[int, int]): The slot of every expert held, least recently used first.
    """

    def __init__(self, num_slots: int, policy: str = "lru"):
        if policy not in EVICTION:
            raise ValueError(f"policy: expected one of {', '.join(EVICTION)}, got {policy!r}.")
        self.num_slots = num_slots
        self.policy = policy
        self.slot_of = {}
        self._free = list(range(num_slots))[::-1]
        self._counts, self._decay = defaultdict(float), EVICTION[policy]
        # What a use counts now: it grows, in place of the earlier ones getting smaller.
        self._one = 1.0

    def fits(self, experts: Collection[int], taken: int = 0) -> bool:
        """Whether distinct experts can be held at once.

        Args:
            experts (Collection[int]): The experts.
            taken (int): Slots that are not available.
        """
        return len(experts) + taken <= self.num_slots

    def waves(self, experts: list[int]) -> list[list[int]]:
        """Divide distinct experts into waves that fit.

        Cached experts come first, so that they are used before they are evicted.

        Args:
            experts (list[int]): Distinct.

        Returns:
            list[list[int]]: The experts of each wave, for one ``choose`` after another.
        """
        experts = sorted(experts, key=lambda e: e not in self.slot_of)
        return [experts[i : i + self.num_slots] for i in range(0, len(experts), self.num_slots)]

    def choose(
        self, experts: list[int], busy: Mapping[int, int] | None = None
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Choose slots for the experts of one call.

        Args:
            experts (list[int]): The distinct experts needed, at most S.
            busy (Mapping[int, int]): Expert to slot, chosen earlier: those that are not
                committed yet and those that must not be evicted.

        Returns:
            tuple[dict[int, int], dict[int, int]]: Expert to slot, of those that are held and of
            those that must be read.

        Raises:
            ValueError: If there are more experts than slots; the table is unchanged.
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
        """Hold experts whose bytes have arrived.

        Args:
            misses (dict[int, int]): As ``choose`` returned it.
        """
        for e, slot in misses.items():
            self._free.remove(slot)
            self.slot_of[e] = slot

    def reserve(self, experts: list[int]) -> dict[int, int]:
        """Choose slots for experts that may be needed. None of these experts is evicted.

        The slots are neither held nor free until ``keep`` or ``release``.

        Args:
            experts (list[int]): Distinct, at most S.

        Returns:
            dict[int, int]: Expert to slot, of those that are not held.
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
        """Hold the expert whose bytes have arrived in its reserved slot.

        Args:
            expert (int): The expert.
            slot (int): As ``reserve`` returned it.
        """
        self.slot_of[expert] = slot

    def set_aside(self, num: int, busy: Mapping[int, int] | None = None) -> list[int]:
        """Take slots to fill them with experts that are read ahead, of this layer or another.

        Args:
            num (int): At most so many.
            busy (Mapping[int, int] or None): Expert to slot, chosen or held: these stay, and others
                are evicted, by the policy. Default: no expert is evicted; ``choose`` must not have
                chosen slots that are not committed yet.

        Returns:
            list[int]: The slots, until ``release``.
        """
        kept = set(busy.values()) if busy else ()
        slots = [slot for slot in self._free[::-1] if slot not in kept][:num]
        if busy is not None:
            slots += [self.slot_of.pop(e) for e in self._victims(busy, num - len(slots))]
        self._free = [slot for slot in self._free if slot not in slots]
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Free slots that were reserved or set aside.

        Args:
            slots (Iterable[int]): As ``reserve`` or ``set_aside`` returned them.
        """
        self._free.extend(slots)

    def recover(self) -> None:
        """After an exception: free every slot that holds no expert, those of prefetches too."""
        held = set(self.slot_of.values())
        self._free = [slot for slot in range(self.num_slots)[::-1] if slot not in held]

    def resize(self, num_slots: int) -> None:
        """Set how many slots are in use, from the first on. No slot may be chosen or reserved.

        Args:
            num_slots (int): At most as many as at first. What is held in the others is forgotten.
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
        """The experts to evict first, at most so many and none that is needed."""
        candidates = (e for e in self.slot_of if e not in needed)  # least recently used first
        if not self._decay:
            return list(islice(candidates, num))
        return nsmallest(num, candidates, key=self._counts.__getitem__)
