"""Which expert is in which slot of a layer, and which is evicted first.

To add a policy that weighs uses by their age, add a line to ``EVICTION``; ``StreamConfig.policy``
names the policy that slots use. Other kinds of policies (Belady) are subclasses with their own
``_victims``: the replay tries them, and slots cannot use them.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import islice

# The eviction policies. A use of an expert counts 1 at first; each later call of the layer
# multiplies this count by the policy's number. The expert with the smallest sum is evicted, unless
# it is needed now. Of equal experts the least recently used is evicted. (Lee et al., LRFU, 2001.)
EVICTION = {
    "lru": 0.0,  # least recently used
    "lfu": 1.0,  # least frequently used
    "lrfu": 0.98,  # least recently and frequently used
}

# If the experts are in the host's memory, a GPU chooses slots by itself by these policies. By the
# other policies the host chooses, which takes longer.
GPU_POLICIES = ("lru",)
LARGEST = 2.0**300  # the most that one use may add to a count


class SlotTable:
    """Which expert is in which slot of one layer.

    Use it in three steps: ``hits, misses = table.choose(experts)``, read the missing experts into
    the slots in ``misses``, ``table.commit(misses)``. ``choose`` forgets the experts that it
    evicts. If a read fails, ``release`` the slots of the missing experts, or call ``recover``; the
    experts in other slots stay.
    """

    def __init__(self, num_slots: int, policy: str = "lru"):
        if policy not in EVICTION:
            raise ValueError(f"policy: expected one of {', '.join(EVICTION)}, got {policy!r}.")
        self.num_slots = num_slots
        self.policy = policy
        self.slot_of = {}  # the slot of every expert held, least recently used first
        self._free = list(range(num_slots))[::-1]
        self._counts, self._decay = defaultdict(float), EVICTION[policy]
        # A use of an expert adds this number to the expert's count. The number grows from call to
        # call, so that the counts of earlier uses need not shrink.
        self._one = 1.0

    def fits(self, experts: Collection[int], taken: int = 0) -> bool:
        """Whether distinct experts fit into the slots if ``taken`` slots are not available."""
        return len(experts) + taken <= self.num_slots

    def choose(
        self, experts: list[int], busy: Collection[int] = ()
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Choose slots for the distinct experts of a call; return the held and the missing ones.

        Both dicts give experts' slots. ``busy`` experts, of an earlier choice, are not evicted.
        More experts than slots raise ``ValueError`` and leave the table as it was.
        """
        if not self.fits(experts, len(busy)):
            raise ValueError(
                f"expected at most {self.num_slots - len(busy)} experts (the slots), "
                f"got {len(experts)}"
            )
        if self._decay:
            self._count(experts)
        hits = {e: self.slot_of.pop(e) for e in experts if e in self.slot_of}
        self.slot_of |= hits  # the last key is the most recently used
        return hits, self._take([e for e in experts if e not in hits], {*hits, *busy})

    def commit(self, misses: dict[int, int]) -> None:
        """Hold experts whose bytes have arrived in the slots that were chosen or reserved."""
        self.slot_of |= misses

    def reserve(self, experts: list[int], kept: Collection[int] = ()) -> dict[int, int]:
        """Choose slots for missing experts while slots last; keep ``experts`` and ``kept``."""
        return self._take([e for e in experts if e not in self.slot_of], {*experts, *kept})

    def release(self, slots: Iterable[int]) -> None:
        """Free slots that were chosen or reserved."""
        self._free.extend(slots)

    def recover(self) -> None:
        """Free every slot that holds no expert, also if it was chosen or reserved."""
        held = set(self.slot_of.values())
        self._free = [slot for slot in range(self.num_slots)[::-1] if slot not in held]

    def resize(self, num_slots: int) -> None:
        """Use the first ``num_slots`` slots and forget the others; none may be reserved."""
        self.num_slots = num_slots
        self.slot_of = {e: slot for e, slot in self.slot_of.items() if slot < num_slots}
        self.recover()

    def _count(self, experts):
        """Count a use of each expert; scale all counts down before they get too large."""
        counts, self._one = self._counts, self._one / self._decay
        if self._one > LARGEST:
            self._one /= LARGEST
            for e in counts:
                counts[e] /= LARGEST
        for e in experts:
            counts[e] += self._one

    def _take(self, experts, needed):
        """Take slots for experts not held: first free slots, then the slots of evicted experts."""
        more = len(experts) - len(self._free)
        for e in self._victims(needed, more) if more > 0 else ():
            self._free.insert(0, self.slot_of.pop(e))
        return {e: self._free.pop() for e in experts[: len(self._free)]}

    def _victims(self, needed, num):
        """The experts to evict first: at most ``num``, and none that is needed."""
        candidates = (e for e in self.slot_of if e not in needed)  # least recently used first
        if not self._decay:
            return list(islice(candidates, num))
        return sorted(candidates, key=self._counts.__getitem__)[:num]
