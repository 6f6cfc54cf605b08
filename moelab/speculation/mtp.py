"""MTP: the draft head that a model was trained with, which mlx-lm leaves out of its own models.

One decoder layer guesses token i + 2 from the hidden state of token i and the embedding of token
i + 1 (DeepSeek-V3, arXiv 2412.19437, section 2.2). The layer's own output takes the place of the
hidden state for each further guess. The layer uses the target's embedding and output head.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import ArraysCache, make_prompt_cache, trim_prompt_cache

from ..checkpoint import CheckpointError, model_classes, read_header, read_json, readable
from ..checkpoint.checkpoint import check_fork, checked, remedy, say
from ..hooks import with_globals
from ..prompt import vocabulary
from .dflash import QUEUED_TOKENS
from .drafts import Choose, Draft
from .target import compute_alike, embedding_and_head

SIDECAR = "qwen3_5_mtp"  # the ``model_type`` of a folder that has a head alone
# Families whose head has tensors ``mtp.*`` (norms may be stored as weight - 1), and families whose
# head is stored as layer L.
QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
NEXTN = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
# The families' names of a head's parts, and the names that ``Head`` gives them.
PARTS = {
    "pre_fc_norm_embedding": "norm_embedding", "enorm": "norm_embedding",
    "pre_fc_norm_hidden": "norm_hidden", "hnorm": "norm_hidden",
    "fc": "fc", "eh_proj": "fc",
}  # fmt: skip
# Keys that give a family's model one layer, with full attention and experts.
ONE_LAYER = {"num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0}
ONE_LAYER |= {"mlp_only_layers": [], "decoder_sparse_step": 1}
# A file has weight - 1 for a norm if the norm's mean there is below this. In published heads of
# Qwen3.5 and 3.6 a mean weight is 1.7 (q, k) or 0.9 (layernorm), a mean of weight - 1 is at most
# 0.8 (q, k) or 0.4 (layernorm).
LEAST_MEAN = {"q_norm": 1.25, "k_norm": 1.25, "layernorm": 0.5}


class Head:
    """A mixin for the class of a one-layer mlx-lm model; ``stored`` comes from ``_stored``."""

    def __init__(self, args):
        super().__init__(args)
        _, trunk = _trunk(self)
        # Keep the trunk: a search takes 0.3 ms. In ``__dict__`` the trunk is no child module.
        self.__dict__["trunk"] = trunk
        D = trunk.embed_tokens.weight.shape[-1]
        for module in self.modules():
            module.pop("lm_head", None)
        # Only GLM-4.7-Flash's head has an embedding of its own.
        own = trunk.embed_tokens if self.stored.has_embedding else None
        trunk.embed_tokens, self.embedding = nn.Identity(), own
        trunk.ssm_idx = None  # the index of Qwen's first recurrent layer; a head has none
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.norm_embedding = nn.RMSNorm(D, trunk.norm.eps)
        self.norm_hidden = nn.RMSNorm(D, trunk.norm.eps)

    @property
    def hidden_size(self) -> int:
        """The hidden size D of the target."""
        return self.norm_hidden.weight.size

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: list) -> mx.array:
        """Compute ``[B, T, D]`` from the next tokens' embeddings and the tokens' hidden states."""
        both = self.norm_embedding(embedded), self.norm_hidden(hidden)
        return self.trunk(self.fc(mx.concatenate(both, axis=-1)), cache)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the head's weights among the weights of the files, by parameter name."""
        path, prefix, norms, own = _trunk(self)[0], self.stored.prefix, {}, {}
        for name, w in weights.items():
            if not name.startswith(prefix):
                continue
            name = name[len(prefix) :].removeprefix("layers.0.").removeprefix("shared_head.")
            part, _, rest = name.partition(".")
            if part in PARTS:
                name = f"{PARTS[part]}.{rest}"
            elif part == "embed_tokens" and self.embedding is not None:
                name = f"embedding.{rest}"
            elif part in ("norm", "head", "embed_tokens"):
                name = f"{path}.{name}" if part == "norm" else ""
            else:
                name = f"{path}.layers.0.{name}"
            if w.ndim == 1 and "norm" in name:  # ``sanitize`` of qwen3_next would add a second 1
                norms[name] = w
            elif name:
                own[name] = w
        if self.stored.family in QWEN:
            less = {k: _less_one(k, norms) for k in norms}
            norms = {k: (w.astype(mx.float32) + less[k]).astype(w.dtype) for k, w in norms.items()}
        mine = {k: w for k, w in own.items() if not k.startswith(path)}
        return super().sanitize({k: w for k, w in own.items() if k.startswith(path)}) | mine | norms


def _trunk(model: nn.Module) -> tuple[str, nn.Module]:
    """Return path and module of the part of an mlx-lm model that has embedding and layers."""
    return next((p, m) for p, m in model.named_modules() if "embed_tokens" in m and "layers" in m)


def _less_one(name: str, norms: dict[str, mx.array]) -> bool:
    """Whether a norm is stored as weight - 1: some converters add 1 to only some of the norms."""
    w = norms[name].astype(mx.float32)
    mean, least = w.mean().item(), (m for part, m in LEAST_MEAN.items() if part in name)
    if (w < 0).mean().item() > 0.02:  # hardly any weight is negative
        return True
    # Published final norms overlap: means of weight - 1 go up to 2.6, means of weight down to 2.2.
    if name.endswith(".norm.weight") and mean > 1:
        return _less_one("norm_embedding.weight", norms)
    return mean < next(least, 0)


def is_head(config: dict) -> bool:
    """Whether a configuration belongs to a folder that holds only a head."""
    return config.get("model_type") == SIDECAR


def _stored(path: Path, config: dict) -> SimpleNamespace:
    """Find where a head is and how it is stored; CheckpointError if no known head is there."""
    text, family = config.get("text_config", config), config.get("model_type")
    if is_head(config):
        family = "qwen3_5_moe" if text.get("num_experts") else "qwen3_5"
    if family not in (*QWEN, *NEXTN):
        raise CheckpointError(
            f"{path}: a draft head of {family} is not known here: expected one of "
            f"{', '.join((*QWEN, *NEXTN))}. Use another draft, or none."
        )
    fc = "fc.weight" if is_head(config) else "mtp.fc.weight"
    if family in NEXTN:
        fc = f"layers.{text['num_hidden_layers']}.eh_proj.weight"
    names = {f: read_header(f).keys() for f in sorted(path.glob("[!.]*.safetensors"))}
    found = [n for some in names.values() for n in some if f".{n}".endswith(f".{fc}")]
    if not found:
        raise CheckpointError(
            f"{path}: expected a tensor {fc} of a draft head, under any prefix, in its safetensors "
            "files, found none: mlx_lm.convert drops them. Give a folder that has the head alone "
            f"(model_type {SIDECAR}) as the draft, or take the original checkpoint."
        )
    prefix = re.sub(r"\w+\.weight$", "", max(found))
    mine = {f: {n for n in found if n.startswith(prefix)} for f, found in names.items()}
    layers = {n for found in mine.values() for n in found if re.search(r"\blayers\.1\.", n)}
    if family in QWEN and layers:
        raise CheckpointError(f"{path}: expected a draft head of one layer, got {min(layers)}.")
    return SimpleNamespace(
        files=[f for f, found in mine.items() if found],
        prefix=prefix,
        family=family,
        has_embedding=family == "glm4_moe_lite"
        and any(f"{prefix}embed_tokens.weight" in found for found in mine.values()),
    )


def load_head(path_or_hf_repo: str | Path) -> nn.Module:
    """Load the head of a checkpoint, or of a folder with a head alone, or raise CheckpointError."""
    check_fork()
    what = f"{path_or_hf_repo}: mlx-lm cannot build a draft head of its config.json and tensors:"
    with readable(what):  # a damaged configuration raises many types of errors
        path = Path(mlx_lm_utils._download(str(path_or_hf_repo)))
        config = read_json(path / "config.json")
    with readable(what, remedy(path, config)):
        stored = _stored(path, config)
        changes = dict(ONE_LAYER)
        if "text_config" in config:
            changes = {"text_config": config["text_config"] | ONE_LAYER}
        if "quantization" in config or "quantization_config" not in config:
            # Drop single modules' settings: the modules' names differ, and mlx-lm infers the bits.
            said = config.get("quantization", {"group_size": 64, "bits": 4})
            changes["quantization"] = {k: v for k, v in said.items() if type(v) in (int, str)}

        def classes(config):
            cls, args = model_classes({**config, "model_type": stored.family}, "mlx-lm")
            names = {"__module__": cls.__module__, "stored": stored}
            return checked(type(cls.__name__, (Head, cls), names), args, config)

        files = SimpleNamespace(glob=lambda pattern: list(map(str, stored.files)))
        load = with_globals(mlx_lm_utils.load_model, {"glob": files})
        head, _ = load(path, lazy=True, model_config=changes, get_model_classes=classes)
        zeros = mx.zeros((1, 1, head.hidden_size))  # MLX raises if types or shapes do not fit
        head(zeros, zeros, make_prompt_cache(head))
    mx.eval(head.parameters())  # another thread could not evaluate what this thread leaves lazy
    return head


class MTPDraft(Draft):
    """A model's own draft head (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    The head is loaded from the target's checkpoint, if that has the head's tensors, or from a
    folder with the head alone. ``cache`` lists two caches. The head's cache has an entry for each
    token but the first. The other cache has the hidden state ``[1, D]`` of the newest token that
    the target has read. For the methods see ``drafts.Draft``.

    Args:
        path_or_hf_repo (str or Path): The folder or Hub repository of the checkpoint or head.

    Raises:
        CheckpointError: If there is no head of a known family, or its files are damaged.
    """

    layer_ids = (-1,)  # the target's last layer; its final norm is computed here

    def __init__(self, path_or_hf_repo: str | Path):
        self.model = load_head(path_or_hf_repo)
        self._name = path_or_hf_repo
        # Counts over all texts. A round's drafts are compared up to the first refused one.
        self._drafted = self._compared = self._accepted = 0

    def make_cache(self) -> list:
        return [*make_prompt_cache(self.model), ArraysCache(1)]

    def read_zeros(self) -> list:
        caches, zeros = self.make_cache(), mx.zeros((1, 2, self.model.hidden_size))
        self.model(zeros, zeros, caches[:-1])
        caches[-1][0] = zeros[0, :1]
        return caches

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        self._embed, self._head = embedding_and_head(model)
        probe = self._embed(mx.array([[0]]))
        own, V = self.model.embedding, vocabulary(model)
        for what, expected, got in (
            ("hidden size", probe.shape[-1], self.model.hidden_size),
            ("vocabulary", V, V if own is None else len(own.weight)),
        ):
            if expected != got:
                raise ValueError(
                    f"draft: expected a {what} of {expected}, as the target has, got {got}. A "
                    "draft head serves only the model that it was trained with."
                )
        self._norm = _trunk(model)[1].norm
        self._embed = own or self._embed
        compute_alike(self.model, model, probe.dtype)
        self.cache = cache or self.make_cache()
        # Tokens that the head has not read, and the hidden state of the token before each. One more
        # state waits between two rounds: the newest token's, since its next token is unknown.
        self._tokens, self._hidden = [], [h for h in self.cache[-1].cache if h is not None]
        self._guessed = 0  # cache entries of guesses that the target may refuse

    def extend(self, tokens: mx.array, features: mx.array | None) -> None:
        if self._guessed > 1:  # the first entry stays: it comes from the target's hidden state
            trim_prompt_cache(self.cache[:-1], self._guessed - 1)
        if self._guessed:
            self._count(tokens.size)
        # Without a waiting state, the first token was read with the guesses or begins the text.
        self._tokens.append(tokens if self._hidden else tokens[1:])
        self._hidden.append(features)
        self._guessed = 0
        if sum(h.shape[0] for h in self._hidden) > QUEUED_TOKENS:
            self.propose(0, 0, None)

    def propose(self, last: int, n: int, choose: Choose) -> mx.array:
        guesses, nothing = [], mx.array([], mx.uint32)
        if not self._hidden:  # only the text's first token is there, as ``last``
            return nothing
        tokens = mx.concatenate([*self._tokens, mx.array([last] if n else [], mx.uint32)])
        hidden = mx.concatenate(self._hidden)
        T, out = tokens.size, None
        for i in range(0, T, QUEUED_TOKENS):
            if i:
                mx.eval([c.state for c in self.cache[:-1]])
            part = slice(i, min(i + QUEUED_TOKENS, T))
            out = self._read(tokens[part], self._norm(hidden[part]))
        self._tokens, self._hidden = [], [] if n else [hidden[T:]]
        if not n:
            self.cache[-1][0] = hidden[T:]
            mx.eval([c.state for c in self.cache])
            return nothing
        while True:
            guesses.append(choose(self._head(out[None])[0]))
            self._guessed = len(guesses)
            if len(guesses) == n:
                return mx.concatenate(guesses)
            out = self._read(guesses[-1], out)

    def _count(self, kept):
        """Count a round's ``kept`` tokens, and warn once if nearly all drafts are refused."""
        before, self._drafted = self._drafted, self._drafted + self._guessed
        self._compared += min(kept, self._guessed)
        self._accepted += kept - 1
        if before < 64 <= self._drafted and self._accepted < 0.1 * self._compared:
            say(
                f"{self._name}: {self._accepted / self._drafted:.0%} of the draft head's first "
                f"{self._drafted} drafts were accepted. It may be another model's, or stored in a "
                "way not known here: decode without it."
            )

    def _read(self, tokens, hidden):
        """Read tokens [T] and the hidden states before them; return the last output [1, D]."""
        return self.model(self._embed(tokens[None]), hidden[None], self.cache[:-1])[0, -1:]
