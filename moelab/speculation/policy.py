"""How many tokens to draft now, from what drafting has cost and brought so far."""

from collections import deque
from statistics import median

import numpy as np

GAIN = 1.03  # what an estimate must promise before it is believed
REFRESH = 64  # rounds with drafts before the time without is measured again


class Policy:
    """Chooses the number of drafts that promises most tokens a second, 0 included, and never loses more than it may.

    A round that drafts n tokens costs the draft's time d(n) and a pass over n + 1 positions v(n + 1): the fixed part, the arithmetic of every position and
    the reads for the union of their experts, whatever the slots and the page cache hold of them. Nothing of that is predicted; it is measured as it comes.
    A round brings 1 + a1 + a1 a2 + ... tokens, where ai is how often the i-th draft was accepted once those before it were. Not to draft costs t1 a token.

    Losses are bounded whatever the estimates say: what drafting has cost more than its tokens would have without it, and what the next round would if
    nothing were accepted, together stay below `risk` of the time that the text takes without drafts. So a draft that does not help is tried rarely, and one
    that begins badly is asked for less: where any number promises enough with half of what may still be lost, no more is risked. What drafting has won in
    earlier texts may be lost again, as much as `risk` once more.

    One object serves one pair of target and draft; given to several generations in turn it keeps what it has learned. What a device needs once, to
    compile its kernels for another number of positions, is neither an estimate nor a loss that drafting less would win back.

    Args:
        max_draft_tokens (int): The most to draft.
        risk (float): The part of the undrafted time that may be lost; twice that after texts in which drafting won.
        horizon (int): Tokens that a text is expected to have at least, if `max_tokens` allows; `risk` is of these before they are written.
    """

    def __init__(self, max_draft_tokens: int = 15, risk: float = 0.015, horizon: int = 128):
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens: expected at least 1, got {max_draft_tokens}.")
        self.max_draft_tokens, self.risk, self.horizon = max_draft_tokens, risk, horizon
        self.plain_s = float("nan")  # seconds of a token without drafts
        self._plain_s = deque(maxlen=16)
        self._verify_s = _Seconds()  # of a pass over so many positions
        self._draft_s = _Seconds()  # to draft so many tokens
        self._missed_s = deque(
            maxlen=16
        )  # (tokens, seconds) that the draft has read, the prompts included
        self._num_prompts = 0
        # Blocks of 2, 4, 8, 16: few different ones, as a device may compile its kernels for each.
        self._numbers = np.array(
            sorted({*(2**i - 1 for i in range(1, max_draft_tokens.bit_length())), max_draft_tokens})
        )
        self._first = set(self._numbers.tolist())  # those not drafted yet
        self._banked_s = self.lost_s = (
            0.0  # what earlier texts have won, and what this one has lost
        )
        self._position_s = None  # seconds of each position of a prompt
        self._tried, self._won = np.zeros(max_draft_tokens), np.zeros(max_draft_tokens)
        self.begin()

    def begin(self, max_tokens: int = -1) -> None:
        """A text begins: the account starts at zero."""
        self._banked_s = max(self._banked_s - self.lost_s, 0.0)
        self.num_tokens, self.lost_s, self._rounds = 0, 0.0, 0
        self._expected = min(self.horizon, max_tokens) if max_tokens >= 0 else self.horizon

    def prompt(self, num_tokens: int, seconds: float) -> None:
        """The target has read a part of a prompt."""
        if num_tokens >= 32:  # of fewer the fixed part would be most
            self._position_s = seconds / num_tokens

    def read(self, num_tokens: int, seconds: float) -> None:
        """The draft has read a prompt too."""
        self._num_prompts += 1
        if num_tokens and self._num_prompts > 1:  # the first time is no measure of the next
            self._missed_s.append((num_tokens, seconds))

    def plain(self, seconds: float) -> None:
        """A token came without drafts."""
        self.num_tokens += 1
        self._plain_s.append(seconds)
        self.plain_s = median(self._plain_s)
        self._rounds = min(self._rounds + 1, 0)
        self._tried *= 0.995  # what was learned ages: the text may have changed
        self._won *= 0.995

    def drafted(
        self,
        drafted: int,
        accepted: int,
        draft_s: float,
        verify_s: float,
        missed: int = 0,
        missed_s: float = 0.0,
    ) -> None:
        """A round with drafts is over. Before, the draft read `missed` tokens in `missed_s` that were written without it."""
        self.num_tokens += accepted + 1
        self._rounds += 1
        self._tried *= 0.97
        self._won *= 0.97
        self._tried[: min(accepted + 1, drafted)] += 1
        self._won[:accepted] += 1
        round_s = draft_s + verify_s
        if drafted:
            usual_s = np.interp(
                drafted, self._numbers, np.maximum(self.draft_s(), self.plain_s) + self.verify_s()
            )
            if (
                drafted in self._first and round_s > 4 * usual_s
            ):  # kernels were compiled (0.2 s on CUDA)
                round_s = usual_s
            else:
                self._verify_s.add(drafted + 1, verify_s)
                self._draft_s.add(drafted, draft_s)
            self._first.discard(drafted)
        if missed:
            self._missed_s.append((missed, missed_s))
        self.lost_s += missed_s + round_s - (accepted + 1) * self.plain_s

    def choose(self, missed: int = 0, most: float = float("inf")) -> int:
        """How many tokens, at most `most`, to draft in the next round, before which the draft would read `missed` tokens."""
        if self._rounds >= REFRESH:
            self._rounds = -2
        if (
            len(self._plain_s) < 4
            or self._rounds < 0
            or (self._rounds == 0 and self.num_tokens % 4)
        ):  # to ask costs time too
            return 0
        allowed = self.risk * self.plain_s * max(self.num_tokens, self._expected)
        allowed += min(allowed, self._banked_s)
        cost = self.draft_s() + self.verify_s()
        tokens = 1 + np.cumsum(np.cumprod(self.acceptance()))[self._numbers - 1]
        gain = np.where(self._numbers <= most, tokens * self.plain_s / cost, 0)
        risked_s = self.missed_s(missed) + cost - self.plain_s
        for share in (
            0.5,
            1,
        ):  # half of what may still be lost if it will do, so that a bad beginning makes drafts shorter and not rare
            within = np.where(risked_s <= share * (allowed - self.lost_s), gain, 0)
            best = int(np.argmax(within))
            if within[best] > GAIN:
                return int(self._numbers[best])
        return 0

    def acceptance(self) -> np.ndarray:
        """How often the i-th draft is accepted once those before it are; hopeful where little is known."""
        overall = (self._won.sum() + 4) / (self._tried.sum() + 5)
        return (self._won + 2 * overall) / (self._tried + 2)

    def verify_s(self) -> np.ndarray:
        """Seconds of a pass over one position more than each number that it may draft."""
        if not self._verify_s.medians:  # nothing to go by but the prompt (whose reads a verify pass does not have to make), or a third of a token each
            each = 0.65 * self._position_s if self._position_s is not None else self.plain_s / 3
            return self.plain_s + self._numbers * each
        return self._verify_s.at(self._numbers + 1, {1: self.plain_s})

    def draft_s(self) -> np.ndarray:
        """Seconds to draft each number of tokens that it may; 0 before the first. A block draft makes any number in one go: until the contrary is seen, so may any."""
        return (
            self._draft_s.at(self._numbers, {})
            if self._draft_s.medians
            else np.zeros(len(self._numbers))
        )

    def missed_s(self, num_tokens: int) -> float:
        """Seconds for the draft to read so many tokens: no more than for more of them, nor than for fewer as often as it takes."""
        return (
            min((s * max(1, num_tokens / n) for n, s in self._missed_s), default=0.0)
            if num_tokens
            else 0.0
        )


class Always:
    """The policy of a fixed number of drafts."""

    plain_s = 0.0

    def __init__(self, num_draft_tokens: int):
        self.num_draft_tokens = num_draft_tokens

    def choose(self, missed: int = 0, most: float = float("inf")) -> int:
        return self.num_draft_tokens

    def _note(self, *args):
        pass

    begin = prompt = read = plain = drafted = _note


class _Seconds:
    """Recent seconds for some numbers, and estimates for the others."""

    def __init__(self):
        self._samples, self.medians = {}, {}

    def add(self, number, seconds):
        samples = self._samples.setdefault(number, deque(maxlen=8))
        samples.append(seconds)
        self.medians[number] = median(samples)

    def at(self, numbers, more):
        """A line between neighbours, and beyond the last on from the first."""
        xs, ys = zip(*sorted({**more, **self.medians}.items()))
        slope = max(ys[-1] - ys[0], 0) / max(xs[-1] - xs[0], 1)
        return np.interp(numbers, xs, ys) + slope * np.maximum(numbers - xs[-1], 0)
