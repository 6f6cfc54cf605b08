"""Decides how many tokens to draft. It avoids numpy, which took 1.3% of tiny-moe's CPU time."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from operator import mul
from statistics import median

MAX_DRAFTS = 15  # in a round
GAIN = 1.03  # a number of drafts must promise this many times the undrafted speed
# Tokens become faster while slots fill, so 2 tokens are timed without drafts after 8 rounds with
# drafts. The number of rounds doubles each time, up to 64.
REFRESH_ROUNDS, REFRESH_TOKENS = (8, 64), 2
MIN_PLAIN_TOKENS = 4  # undrafted tokens that are timed before drafting is compared with them
ASK_EVERY = 4  # tokens between two decisions whether to draft: a decision costs time, too
COMPILE_FACTOR = 4  # a first draft that takes this many times its estimate was compiling kernels
FORGET_PLAIN = 0.995  # weight of earlier acceptance after an undrafted token: the text may change
FORGET_ROUND = 0.97  # weight of earlier acceptance after a round with drafts

# Before anything is known, 4 of 5 drafts count as accepted. Each position starts as if it had been
# tried twice, with the overall rate of acceptance.
PRIOR_ACCEPTED, PRIOR_TRIED, PRIOR_AT_POSITION = 4, 5, 2
# Until a verify pass has been measured, each position but its first is assumed to cost 0.65 times
# as much as a prompt's position, or a third of a plain token if no prompt was timed.
VERIFY_OVER_PROMPT, TOKEN_OVER_VERIFY = 0.65, 3
MIN_PROMPT_TOKENS = 32  # shorter parts of a prompt are not timed: their cost is mostly fixed
NUM_TIMES = 16  # latest times, of which a median or minimum is taken
NUM_TIMES_EACH = 8  # latest times that are kept for each number of drafts or positions


class Policy:
    """Chooses the number of drafts, 0 included, that promises the most tokens a second.

    The cost of a round is the time to draft n tokens and to verify n + 1 positions, measured or
    estimated from other n. The round brings 1 + a1 + a1 a2 + ... tokens, where ai is the acceptance
    rate of the i-th draft after accepted drafts.

    The loss is the time of the rounds with drafts, less the time of the same number of tokens
    without drafts. A round drafts only if the loss would stay within a limit with no draft
    accepted. The limit is ``risk`` times the time of the text without drafts, where the text counts
    as at least ``horizon`` tokens (``max_tokens`` if fewer). Time won in earlier texts raises the
    limit, at most to its double.

    One object serves one target and draft, and keeps what it has learned from text to text.
    """

    def __init__(self, max_draft_tokens: int = MAX_DRAFTS, risk: float = 0.015, horizon: int = 128):
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens: expected at least 1, got {max_draft_tokens}.")
        self.risk, self.horizon = risk, horizon
        # Blocks of 2, 4, 8, 16 tokens: few sizes, because a device may compile kernels for each.
        powers = (2**i - 1 for i in range(1, max_draft_tokens.bit_length()))
        self._numbers = sorted({*powers, max_draft_tokens})
        self._unused = set(self._numbers)  # numbers of drafts that were not tried yet
        self.plain_s = float("nan")  # seconds of a token without drafts
        self._plain_s = deque(maxlen=NUM_TIMES)
        self._verify_s = _Seconds()  # of a pass, by its number of positions
        self._draft_s = _Seconds()  # of drafting, by the number of tokens
        self._missed_s = deque(maxlen=NUM_TIMES)  # (tokens, seconds) of the draft's reads
        self._num_prompts = 0  # prompts that the draft has read
        self._position_s = None  # seconds of each position of a prompt
        self._tried, self._won = [0.0] * max_draft_tokens, [0.0] * max_draft_tokens
        self.lost_s = self._banked_s = 0.0  # of this text (below 0: won); won by earlier texts
        self.begin()

    def begin(self, max_tokens: int = -1) -> None:
        """Begin a text of at most ``max_tokens`` (-1: no limit). Its loss is 0."""
        self._banked_s = max(self._banked_s - self.lost_s, 0.0)
        self.num_tokens, self.lost_s = 0, 0.0
        self._rounds = 0  # rounds with drafts in a row; below 0: undrafted tokens still to time
        self._refresh = REFRESH_ROUNDS[0]
        self._expected = min(self.horizon, max_tokens) if max_tokens >= 0 else self.horizon

    def prompt(self, num_tokens: int, seconds: float) -> None:
        """Note that the target has read a part of a prompt."""
        if num_tokens >= MIN_PROMPT_TOKENS:
            self._position_s = seconds / num_tokens

    def read(self, num_tokens: int, seconds: float) -> None:
        """Note that the draft has read a prompt."""
        self._num_prompts += 1
        if num_tokens and self._num_prompts > 1:  # the first time may include compiling
            self._missed_s.append((num_tokens, seconds))

    def plain(self, seconds: float) -> None:
        """Note a token without drafts."""
        self.num_tokens += 1
        self._plain_s.append(seconds)
        self._rounds = min(self._rounds + 1, 0)
        self._forget(FORGET_PLAIN)

    def drafted(
        self,
        drafted: int,
        accepted: int,
        draft_s: float,
        verify_s: float,
        missed: int = 0,
        missed_s: float = 0.0,
    ) -> None:
        """Note a round with drafts. The draft read ``missed`` tokens before the round."""
        self.num_tokens += accepted + 1
        self._rounds += 1
        self._forget(FORGET_ROUND)
        for i in range(min(accepted + 1, drafted)):
            self._tried[i] += 1
            self._won[i] += i < accepted
        # A first pass allocates memory, and records or compiles kernels (36 ms instead of 14 on an
        # H200). So its time counts as no more than expected, as does a first draft that compiles.
        if drafted in self._unused:
            self._unused.discard(drafted)
            most_s = max(_interpolated(drafted, self._numbers, self.draft_s()), self.plain_s)
            draft_s = most_s if draft_s > COMPILE_FACTOR * most_s else draft_s
            verify_s = min(verify_s, _interpolated(drafted, self._numbers, self.verify_s()))
        if drafted:
            self._verify_s.add(drafted + 1, verify_s)
            self._draft_s.add(drafted, draft_s)
        if missed:
            self._missed_s.append((missed, missed_s))
        self.lost_s += missed_s + draft_s + verify_s - (accepted + 1) * self.plain_s

    def choose(self, missed: int = 0, most: float = float("inf")) -> int:
        """Choose how many tokens to draft, at most ``most``. The draft first reads ``missed``."""
        if self._rounds >= self._refresh:
            self._rounds = -REFRESH_TOKENS
            self._refresh = min(2 * self._refresh, REFRESH_ROUNDS[1])
        if len(self._plain_s) < MIN_PLAIN_TOKENS or self._rounds < 0:
            return 0
        if self._rounds == 0 and self.num_tokens % ASK_EVERY:
            return 0
        self.plain_s = median(self._plain_s)
        # The tokens that a round of 0, 1, 2 ... drafts brings.
        tokens = list(accumulate(accumulate([1.0, *self.acceptance()], mul)))
        # What this text may still lose by drafting.
        allowed_s = self.risk * self.plain_s * max(self.num_tokens, self._expected)
        left_s = allowed_s + min(allowed_s, self._banked_s) - self.lost_s
        missed_s = self.missed_s(missed)
        promising = []  # (gain, -drafts, seconds that may be lost)
        for n, draft_s, verify_s in zip(self._numbers, self.draft_s(), self.verify_s()):
            cost_s = draft_s + verify_s
            gain = tokens[n] * self.plain_s / cost_s
            if n <= most and gain > GAIN:
                promising.append((gain, -n, missed_s + cost_s - self.plain_s))
        # Try half of ``left_s`` first: so, after losses, drafts become shorter before they stop.
        for share in (0.5, 1):
            affordable = [p for p in promising if p[2] <= share * left_s]
            if affordable:
                return -max(affordable)[1]
        return 0

    def _forget(self, weight):
        """Multiply the counts of earlier drafts by ``weight``."""
        self._tried = [weight * n for n in self._tried]
        self._won = [weight * n for n in self._won]

    def acceptance(self) -> list[float]:
        """The acceptance rate of each draft ``[max_draft_tokens]`` after accepted drafts."""
        prior = (sum(self._won) + PRIOR_ACCEPTED) / (sum(self._tried) + PRIOR_TRIED)
        prior *= PRIOR_AT_POSITION
        return [(w + prior) / (t + PRIOR_AT_POSITION) for w, t in zip(self._won, self._tried)]

    def verify_s(self) -> list[float]:
        """Seconds of the pass over n + 1 positions, for each number n that may be drafted."""
        if self._verify_s.medians:
            return self._verify_s.at([n + 1 for n in self._numbers], {1: self.plain_s})
        if self._position_s is None:
            each_s = self.plain_s / TOKEN_OVER_VERIFY
        else:
            each_s = VERIFY_OVER_PROMPT * self._position_s
        return [self.plain_s + n * each_s for n in self._numbers]

    def draft_s(self) -> list[float]:
        """Seconds to draft each number of tokens that may be drafted; 0 before the first draft."""
        # If one number was timed, its time stands for all: one pass may draft blocks of any length.
        return self._draft_s.at(self._numbers, {} if self._draft_s.medians else {0: 0.0})

    def missed_s(self, num_tokens: int) -> float:
        """Seconds for the draft to read ``num_tokens``: the least estimate from measured reads."""
        reads = self._missed_s if num_tokens else ()
        return min((s * max(1, num_tokens / n) for n, s in reads), default=0.0)


class Always:
    """A policy that drafts a fixed number of tokens; callers limit the number to ``most``."""

    plain_s = 0.0

    def __init__(self, num_draft_tokens: int):
        self.num_draft_tokens = num_draft_tokens

    def choose(self, missed: int = 0, most: float = float("inf")) -> int:
        return self.num_draft_tokens

    def _ignore(self, *args):
        pass

    begin = prompt = read = plain = drafted = _ignore


class _Seconds:
    """Recent times for some numbers of drafts or positions, and estimates for other numbers."""

    def __init__(self):
        self._samples, self.medians = {}, {}

    def add(self, number: int, seconds: float) -> None:
        samples = self._samples.setdefault(number, deque(maxlen=NUM_TIMES_EACH))
        samples.append(seconds)
        self.medians[number] = median(samples)

    def at(self, numbers: list[int], more: dict[int, float]) -> list[float]:
        """Interpolate seconds; past the last point take the overall slope. ``more`` adds points."""
        xs, ys = zip(*sorted({**more, **self.medians}.items()))
        slope = max(ys[-1] - ys[0], 0) / max(xs[-1] - xs[0], 1)
        return [_interpolated(n, xs, ys) + slope * max(n - xs[-1], 0) for n in numbers]


def _interpolated(x, xs, ys):
    """Interpolate linearly at x; outside the points, return the value of the nearest end."""
    i = bisect_left(xs, x)
    if i in (0, len(xs)):
        return ys[min(i, len(xs) - 1)]
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])
