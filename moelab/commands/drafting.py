"""A draft by the name that a command line gives it, and text written with it."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import GenerationResponse, stream_generate

from ..checkpoint import read_json
from ..speculation.dflash import DFlashDraft
from ..speculation.drafts import Draft, LookupDraft, ModelDraft, learned_policy
from ..speculation.generate import speculative_generate
from ..speculation.policy import Policy
from ..streaming.config import StreamConfig
from ..streaming.model import load
from ..streaming.plan import grown_nbytes
from ..streaming.ranks import Ranks
from ..streaming.session import session_of

LOOKUP = "lookup"


def open_draft(draft: str | Path, kernels: str = "auto") -> Draft:
    """A draft by its name.

    Args:
        draft (str or Path): ``lookup``, or the folder of a language model or of a DFlash draft.
        kernels (str): As in ``StreamConfig``, of a model. A DFlash draft takes its target's.

    Raises:
        ValueError: If it is none of these.
    """
    if draft == LOOKUP:
        return LookupDraft()
    if "dflash_config" in draft_config(draft):
        found = DFlashDraft(draft)
        if mx.default_device() == mx.cpu:  # its target computes in float32 there
            found.model.set_dtype(mx.float32)
        mx.eval(found.model.parameters())  # so that a plan made after this counts its memory
        return found
    model, _ = load(draft, StreamConfig(mode="resident", kernels=kernels))
    return ModelDraft(model)


def leave_room(config: StreamConfig, draft: Draft | None) -> StreamConfig:
    """The configuration of a draft's target, whose slots must leave the draft its memory.

    Args:
        config (StreamConfig): The target's.
        draft (Draft or None): From ``open_draft``.
    """
    model = getattr(draft, "model", None)  # a lookup has none, and keeps a text's tokens only
    if model is None or not config.asks_for_slots:
        return config
    caches = draft.make_cache()
    if isinstance(draft, DFlashDraft):
        args = model.args
        values = len(args.target_layer_ids) * args.hidden_size
        model.extend(mx.zeros((1, 2, values)), caches)
    else:
        model(mx.zeros((1, 2), mx.int32), cache=caches)
    reserved = config.reserved_nbytes + grown_nbytes(caches, config.context)
    memory = config.memory_nbytes
    if memory is not None:  # what is available has become less already
        memory = max(1, memory - sum(p.nbytes for _, p in tree_flatten(model.parameters())))
    return replace(config, reserved_nbytes=reserved, memory_nbytes=memory)


def draft_config(path: str | Path, words: tuple[str, ...] = (LOOKUP,)) -> dict:
    """The configuration of a draft's folder.

    Args:
        path (str or Path): The folder.
        words (tuple[str, ...]): What may be given in place of a folder, for the error.

    Raises:
        ValueError: If there is no such folder, or its configuration is not an object in JSON.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"draft {str(path)!r}: expected {', '.join(words)}, or the folder of a model or "
            "of a DFlash draft with its config.json; found no such folder."
        )
    return read_json(file)


def prompt_step(model: nn.Module, most: int = 2048) -> int:
    """Prompt tokens in one pass: as many as mlx-lm takes, and as there is memory for.

    Args:
        model (nn.Module): From ``moelab.load``.
        most (int): As many as the caller wants. Default: mlx-lm's.
    """
    plan = session_of(model).plan
    return min(most, plan.prompt_tokens) if plan else most


def say_plan(model: nn.Module) -> None:
    """If ``plan`` chose the slots, say on stderr how many and why. Of ranks, rank 0 does."""
    session = session_of(model)
    if (plan := session.plan) and not (session.ranks and session.ranks.rank):
        print(f"moelab: {plan}", file=sys.stderr)


class _Shared:
    """A policy whose numbers rank 0 chooses for all ranks: they follow from times, which differ."""

    def __init__(self, policy: Policy, ranks: Ranks):
        self._policy, self._ranks = policy, ranks

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def choose(self, missed: int = 0, most: float = float("inf")) -> int:
        return self._ranks.gather(self._policy.choose(missed, most))[0]


def shared_policy(
    model: nn.Module, draft: Draft, num_draft_tokens: int | str
) -> int | str | _Shared:
    """What ``speculative_generate`` takes for ``num_draft_tokens``, the same on all ranks.

    Args:
        model (nn.Module): The target.
        draft (Draft): What guesses its tokens.
        num_draft_tokens (int or str): A number or ``auto``.
    """
    ranks = session_of(model).ranks
    if ranks is None or num_draft_tokens != "auto":
        return num_draft_tokens
    return _Shared(learned_policy(model, draft), ranks)


def write(
    model: nn.Module,
    tokenizer,
    prompt: list[int],
    draft: Draft | None = None,
    num_draft_tokens: int | str = "auto",
    **kwargs,
) -> Iterator[GenerationResponse]:
    """The text that ``mlx_lm.stream_generate`` writes, with a draft or without.

    Args:
        model (nn.Module): The target.
        tokenizer (TokenizerWrapper): Its tokenizer.
        prompt (list[int]): Token ids.
        draft (Draft or None): What guesses the target's tokens.
        num_draft_tokens (int or str): As for ``speculative_generate``.
        kwargs: As for ``mlx_lm.stream_generate``.
    """
    if draft is None:
        return stream_generate(model, tokenizer, prompt, **kwargs)
    num_draft_tokens = shared_policy(model, draft, num_draft_tokens)
    return speculative_generate(
        model, tokenizer, prompt, draft, num_draft_tokens=num_draft_tokens, **kwargs
    )
