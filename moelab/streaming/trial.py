"""Decides by measured times whether to prefetch; without numpy, as a token may take 4 ms."""

from collections import deque
from math import expm1, log, sqrt
from statistics import median

# In any ``WINDOW`` calls in a row the slower side may cost the time of so many calls. The trial
# knows the cost from its own measures, which at first are often too low: with 0.8 the true cost was
# 0.3 to 1.1 calls, the mean of each of eight simulated regimes.
WINDOW, COST = 128, 0.8
SETTLE = 2  # calls that are not compared: they record programs, or follow a prompt
# Pairs of calls that are compared, and the fewest that decide: a single call may be disturbed.
MOST_PAIRS, LEAST_PAIRS = 64, 3
SURE = 3.5  # standard errors; fewer are often wrong, as every pair is a look at the evidence
# Calls between a decision and the next trial; twice as many each time that it decides the same.
AGAIN = 256, 4096
MOST_LOG = 0.7  # a call that takes twice as long as its neighbour was disturbed
# As if four pairs had been seen before, that differ by 15%: a few alike prove little.
PRIOR_PAIRS, PRIOR_DEVIATION = 4, 0.15
KEEP = 0.98  # weight of what a missing expert costs, after each call
MEAN_CALLS = 32  # of the experts that a call needs and no slot holds
CHANGED = 0.5  # a change of that mean, as a share, after which all is tried again


class Trial:
    """Says for each call whether to prefetch (``on``): what takes less time stays.

    Two calls in a row, one with and one without, are a pair; the second's kind begins the next one.
    Their times are compared for equal numbers of missing experts, which differ from call to call.
    """

    def __init__(self, best: bool):
        self.on = self.best = best
        self.gap = 0.0  # the logarithm of a call's time with, over that without
        self._pairs = deque(maxlen=MOST_PAIRS)  # (logarithm, more missing experts with)
        self._ends = deque()  # the calls that ended the last pairs
        self._calls, self._next = 0, SETTLE  # so many were there; when to try
        self._again, self._decided, self._was = AGAIN[0], False, None  # what was best then
        self._first = self._last = None  # the pair's first call, and the last call
        self._slopes = self._squares = 0.0  # of the time by the number of missing experts
        self._missing = self._then = self._slots = None  # now, and at the trial's begin

    def took(self, seconds: float, missing: int, slots: int = 0) -> None:
        """A call took so long, and ``missing`` of its experts were in no slot before."""
        self._calls += 1
        self._look(missing, slots)
        last, self._last = self._last, (log(seconds), missing, self.on)
        if last is not None and last[2] == self.on and self._calls > SETTLE:
            slower, more = _difference(self._last, last)
            self._slopes = KEEP * self._slopes + slower * more
            self._squares = KEEP * self._squares + more * more
        first, self._first = self._first, None
        if first is not None:
            pair = (self._last, first) if self.on else (first, self._last)
            self._pairs.append(_difference(*pair))
            self._ends.append(self._calls)
            self._judge()
            if self._may_try():
                return  # this kind begins the next pair
        elif self._may_try():
            self._first, self.on = self._last, not self.on
            return
        self.on = self.best

    def part(self) -> None:
        """The next call is no neighbour of the last one: a prompt came between."""
        self._first = self._last = None
        self._next = max(self._next, self._calls + SETTLE)
        self.on = self.best

    def _look(self, missing, slots):
        """Try again if the missing experts or the slots have changed since the trial began."""
        if self._then is None:
            self._missing, self._then, self._slots = missing, missing, slots
        weight = 1 / min(self._calls, MEAN_CALLS)
        self._missing += weight * (missing - self._missing)
        changed = abs(self._missing - self._then) > CHANGED * self._then + 1
        if changed or abs(slots - self._slots) > self._slots // 8:
            self._was, self._slots = None, slots
            self._begin()

    def _begin(self):
        """Begin a trial; what was best stays until it says otherwise."""
        self._pairs.clear()
        self._decided, self._then = False, self._missing
        self._next = min(self._next, self._calls)

    def _may_try(self):
        """Whether a pair may begin: unless all is decided, or it would cost too much."""
        if self._calls < self._next:
            return False
        if self._decided:
            self._begin()
        while self._ends and self._ends[0] <= self._calls - WINDOW:
            self._ends.popleft()
        if not self._ends or (self._pairs and (self.gap < 0) != self.best):
            return True
        return (len(self._ends) + 1) * expm1(abs(self.gap)) <= COST

    def _judge(self):
        """Estimate the gap; end the trial once it is sure or ``MOST_PAIRS`` were timed."""
        n, many = len(self._pairs), self._missing + 1
        slope = self._slopes / (self._squares + 0.1 * many * many)
        slope = min(max(0.0, slope), 1 / many)  # reads take no more than all of the time
        logs = [slower - slope * more for slower, more in self._pairs]
        if n > LEAST_PAIRS:
            middle = median(logs)
            most = 3 * median(abs(x - middle) for x in logs)
            logs = [min(max(x, middle - most), middle + most) for x in logs]
        self.gap = sum(logs) / n
        squares = sum((x - self.gap) ** 2 for x in logs) + PRIOR_PAIRS * PRIOR_DEVIATION**2
        error = sqrt(squares / (n + PRIOR_PAIRS) / n)
        if n < LEAST_PAIRS:
            return
        if abs(self.gap) > 2 * error or n == MOST_PAIRS:
            self.best = self.gap < 0
        if n == MOST_PAIRS or abs(self.gap) > SURE * error:
            same = self.best == self._was
            self._again = min(2 * self._again, AGAIN[1]) if same else AGAIN[0]
            self._decided, self._was, self._next = True, self.best, self._calls + self._again


def _difference(a, b):
    """The logarithm of a call's time over another's, and how many more experts were missing."""
    return min(max(a[0] - b[0], -MOST_LOG), MOST_LOG), a[1] - b[1]
