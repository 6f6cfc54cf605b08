"""Decides by measured times whether to prefetch. It uses no numpy: a token may take only 4 ms."""

from collections import deque
from math import expm1, log, sqrt
from statistics import median

# Of ``WINDOW`` calls in a row, trials may cost the time of ``COST`` calls by their own estimate.
# (They cost the time of 0.3 to 1.1 calls on average in eight simulated regimes.)
WINDOW, COST = 128, 0.8
SETTLE = 2  # so many calls are not compared at first (they record programs) and after a prompt
# The most pairs of calls that are compared, and the fewest that decide (one may be disturbed).
MOST_PAIRS, LEAST_PAIRS = 64, 3
SURE = 3.5  # a gap of this many standard errors decides (fewer mislead: every pair is a new test)
# Calls between a decision and the next trial. The first number doubles, up to the second number,
# each time that a trial decides the same.
AGAIN = 256, 4096
MOST_LOG = 0.7  # a call that takes twice as long as its neighbour was disturbed
# The standard error counts four made-up pairs with a deviation of 15%: few pairs prove little.
PRIOR_PAIRS, PRIOR_DEVIATION = 4, 0.15
KEEP = 0.98  # the sums for a missing expert's cost are multiplied by this at each call
MEAN_CALLS = 32  # calls in the mean number of missing experts (needed, but in no slot)
CHANGED = 0.5  # a new trial begins when that mean has changed by more than this share


class Trial:
    """Says for each call whether to prefetch (``on``), and keeps the faster choice.

    It compares the times of two calls in a row, less the time of one call's extra missing experts.
    """

    def __init__(self, best: bool):
        self.on = self.best = best
        self.gap = 0.0  # log(time of a call with prefetching / time of one without)
        self._pairs = deque(maxlen=MOST_PAIRS)  # (log, extra missing experts with prefetching)
        self._ends = deque()  # the numbers of the calls that ended the last pairs
        self._calls, self._next = 0, SETTLE  # calls so far; the first call that may begin a pair
        # Calls until the next trial, whether this trial has decided, and the last decision.
        self._again, self._decided, self._was = AGAIN[0], False, None
        self._first = self._last = None  # the pair's first call, and the last call
        self._slopes = self._squares = 0.0  # sums for the time that a missing expert costs
        self._missing = self._then = self._slots = None  # mean now; mean and slots at the start

    def took(self, seconds: float, missing: int, slots: int = 0) -> None:
        """Note a call's seconds, and how many of its experts were ``missing`` from the slots."""
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
                return  # the next pair begins with this kind of call
        elif self._may_try():
            self._first, self.on = self._last, not self.on
            return
        self.on = self.best

    def part(self) -> None:
        """Do not compare the next call with the last call: a prompt came between."""
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
        """Begin a trial; the best choice so far stays until the trial decides otherwise."""
        self._pairs.clear()
        self._decided, self._then = False, self._missing
        self._next = min(self._next, self._calls)

    def _may_try(self):
        """Return whether a pair may begin: no decision is recent, and trials cost little enough."""
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
        slope = min(max(0.0, slope), 1 / many)  # all missing experts take at most the call's time
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
    """Return log(time of call a / time of call b), and how many more experts a missed than b."""
    return min(max(a[0] - b[0], -MOST_LOG), MOST_LOG), a[1] - b[1]
