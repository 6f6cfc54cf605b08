"""A routing that is a function of the token, with the locality of a recorded trace.

Every token takes the experts that the trace gave it most often. The hit rate of a cache for a
quarter of all experts then differs by at most 0.04 from the trace's hit rate (mean of layers).
"""

from dataclasses import dataclass

import numpy as np

from ..streaming.trace import Trace
from .locality import decode_trace, lru_hit_rate

SHARE = 0.25  # ``fit`` compares hit rates with this share of a layer's experts in slots
SPREADS = np.linspace(0, 1, 33)
KINDS_OF_THE_TRACE = 0.75  # the largest share of kinds that have a single token each
GROUP_SIZE = 64  # of the quantization; mlx-lm's own default
# These projections write to the residual stream, as the embedding does.
WRITERS = ("o_proj", "out_proj", "down_proj")
# A router's logits for the most and the least frequent expert of a route. The other experts of the
# route have logits between these two; experts outside the route have logits near 0.
LOGITS = (4.0, 3.0)
SIZES = ("hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok", "vocab_size")


@dataclass(frozen=True, eq=False)
class TokenRouting:
    """Which experts each token takes."""

    kinds: np.ndarray  # ``[V]``, the kind of each token; tokens of one kind route alike
    experts: np.ndarray  # ``[kinds, L, K]``, the most frequent first
    num_experts: int  # E
    wanted: np.ndarray  # ``[L]``, the wanted hit rates, taken from the trace's layers
    hit_rate: np.ndarray  # ``[L]``, the hit rate of the trace's text with this routing

    def route(self, tokens: np.ndarray) -> Trace:
        """Route a text, as if all of it were decoded."""
        return decode_trace(self.experts[self.kinds[tokens]], self.num_experts)


def hit_rate(trace: Trace, prompt: int = 0) -> np.ndarray:
    """Return the LRU hit rates ``[L]`` with a quarter of the experts in slots, after a prompt."""
    slots = max(trace.experts.shape[2], round(SHARE * trace.num_experts))
    return lru_hit_rate(trace, prompt)[:, slots]


def fit(trace: Trace, L: int, E: int, K: int, V: int, kinds: int, seed: int = 0) -> TokenRouting:
    """Route each token to the experts that a trace gave it most often, in another model's shape.

    The trace has L' layers and E' experts. Layer l follows the trace's layer ``l * L' // L``. If E
    is below E', expert numbers are taken modulo E. If E is n times E', expert e has n variants e,
    e + E', ...: a token takes e or, with the probability ``spread``, a variant drawn for
    the token. Each layer's spread is chosen so that the hit rate of the trace's text is nearly that
    of the trace. There are ``kinds`` routes; tokens rare in the trace or not in it share routes.
    """
    base = min(E, trace.num_experts)
    tokens, row_of, counts = np.unique(trace.tokens, return_inverse=True, return_counts=True)
    if len(tokens) < 2 or not 0 <= tokens[0] <= tokens[-1] < V or base < K:
        raise ValueError(
            f"routing: expected a trace of a text with token ids below {V}, and at least {K} "
            f"experts in trace and model, got {trace} with {len(tokens)} different tokens up to "
            f"{tokens[-1] if len(tokens) else 'none'}, for a model with {E} experts."
        )
    layer = np.arange(L) * trace.experts.shape[1] // L  # the trace's layer that each layer follows
    chosen = np.zeros((len(tokens), trace.experts.shape[1], base))
    where = row_of[:, None, None], np.arange(chosen.shape[1])[:, None], trace.experts % base
    np.add.at(chosen, where, 1)
    best = np.argsort(-(chosen + chosen.sum(0) / chosen.sum()), axis=-1)[..., :K][:, layer]

    rng = np.random.default_rng(seed)
    own = np.argsort(-counts, kind="stable")[: int(kinds * KINDS_OF_THE_TRACE)]
    shared = rng.choice(len(tokens), kinds - len(own), p=counts / counts.sum())
    kind_of = rng.integers(len(own), kinds, V)
    kind_of[tokens[own]] = np.arange(len(own))
    best = best[np.concatenate([own, shared])]
    variants = (E - 1 - best) // base + 1  # how many variants each expert has
    draw = rng.random(best.shape)
    variant = base * (rng.random(best.shape) * variants).astype(np.int64)

    prompt = int((trace.phase == "decode").argmax())  # tokens before the first decoded one, or 0
    wanted = hit_rate(trace, prompt)[layer]
    got, experts = np.full(L, np.inf), best.copy()
    for s in SPREADS:
        tried = best + np.where(draw < s, variant, 0)
        rate = hit_rate(decode_trace(tried[kind_of[trace.tokens]], E), prompt)
        better = abs(rate - wanted) < abs(got - wanted)
        got[better], experts[:, better] = rate[better], tried[:, better]
    return TokenRouting(kind_of, experts, E, wanted, got)


def bf16(x: np.ndarray) -> np.ndarray:
    """Return the 16 bits of the nearest bfloat16 of each float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def float32(bits: np.ndarray) -> np.ndarray:
    """Return the float32 of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Routers:
    """Routers that choose by the token alone, written into a checkpoint's random weights.

    The first R dimensions of the residual stream hold a code for the token's kind: a row of a
    Hadamard matrix. Only the embedding writes the code. A router's weights are a sum over all
    kinds: the wanted logits of a kind times the code of the kind.
    """

    def __init__(self, config: dict, tensors: list, trace: Trace, seed: int):
        text = config.get("text_config", config)
        D, L, E, K, V = (text.get(key, 0) for key in SIZES)
        gates = [t.name for t in tensors if t.name.endswith(".mlp.gate.scales")]
        if len(gates) != L or D < 2 * GROUP_SIZE:
            raise ValueError(
                "routing: expected a model with a quantized router mlp.gate in each of its "
                f"layers, and a hidden size of at least {2 * GROUP_SIZE}; got {len(gates)} such "
                f"routers in {L} layers, and {D}."
            )
        self.layer_of = {name.removesuffix(".scales"): i for i, name in enumerate(gates)}
        self.bits = {t.name: 32 * t.shape[-1] // D for t in tensors if t.dtype == "U32"}
        self.hidden, self.reserved = D, 1 << (D // 2).bit_length() - 1
        self.routing = fit(trace, L, E, K, V, self.reserved, seed)
        self.codes = np.ones((1, 1), np.float32)
        while len(self.codes) < self.reserved:
            self.codes = np.block([[self.codes, self.codes], [self.codes, -self.codes]])
        self._last = None, None

    def write(self, path: str, leaf: str, row: int, out: np.ndarray) -> None:
        """Change ``out``: rows of a weight (in bytes), scales or biases, starting at ``row``."""
        rows = slice(row, row + len(out))
        if path.endswith("embed_tokens"):
            new = self._quantized(path, lambda: self.codes)[leaf][self.routing.kinds[rows]]
        elif path in self.layer_of:
            new = self._quantized(path, lambda: self._router(self.layer_of[path]))[leaf][rows]
            if leaf != "weight":
                out[:] = 0
        elif path.endswith(WRITERS) and leaf != "weight":
            out[np.arange(row, row + len(out)) % self.hidden < self.reserved] = 0
            return
        else:
            return
        out[:, : new.shape[1]] = new

    def _router(self, layer):
        """Compute a router's weights for the code's dimensions, ``[E, R]``."""
        experts = self.routing.experts[:, layer]
        logits = np.zeros((len(experts), self.routing.num_experts), np.float32)
        np.put_along_axis(logits, experts, np.linspace(*LOGITS, experts.shape[1]), 1)
        return logits.T @ self.codes / len(self.codes)

    def _quantized(self, path, weights):
        """Quantize weights symmetrically around zero; cache the last path's three tensors."""
        if self._last[0] != path:
            bits = self.bits[f"{path}.weight"]
            half = 1 << bits - 1
            groups = weights().reshape(-1, self.reserved // GROUP_SIZE, GROUP_SIZE)
            scales = bf16(np.maximum(abs(groups).max(-1), 1e-6) / (half - 1))
            exact = float32(scales)
            levels = np.rint(groups / exact[..., None]).clip(1 - half, half - 1) + half
            levels = levels.astype(np.uint8).reshape(-1, self.reserved)
            if bits == 4:
                levels = levels[:, ::2] | levels[:, 1::2] << 4
            self._last = path, {"weight": levels, "scales": scales, "biases": bf16(-half * exact)}
        return self._last[1]
