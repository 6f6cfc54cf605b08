"""Opens the draft that a command line names, and writes text with a draft."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, stream_generate

from ..checkpoint import read_json
from ..speculation.dflash import DFlashDraft
from ..speculation.drafts import Draft, LookupDraft, ModelDraft, learned_policy
from ..speculation.generate import speculative_generate
from ..speculation.mtp import MTPDraft, is_head
from ..speculation.policy import Policy
from ..streaming.config import StreamConfig
from ..streaming.model import load
from ..streaming.session import session_of
from ..system import on_cuda

LOOKUP, MTP = "lookup", "mtp"


def open_draft(
    draft: str | Path | None, kernels: str = "auto", target: str | Path | None = None
) -> Draft | None:
    """Open a draft: ``lookup``, ``mtp`` (the head in the target's folder), or a folder's draft."""
    if draft is None:
        return None
    if on_cuda():  # cuDNN plans attention anew for each text length; each round changes the length
        os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")  # MLX reads it at the first attention
    if draft == LOOKUP:
        return LookupDraft()
    config = {} if draft == MTP else draft_config(draft)
    if draft == MTP or is_head(config):
        found = MTPDraft(target if draft == MTP else draft)
    elif "dflash_config" in config:
        found = DFlashDraft(draft)
    else:
        return ModelDraft(load(draft, StreamConfig(mode="resident", kernels=kernels))[0])
    if mx.default_device() == mx.cpu:  # on a CPU the target computes in float32
        found.model.set_dtype(mx.float32)
    mx.eval(found.model.parameters())  # so that a later plan counts the draft's memory
    return found


def draft_config(path: str | Path, words: tuple[str, ...] = (LOOKUP, MTP)) -> dict:
    """Read the configuration in a draft's folder; the error says that ``words`` are taken, too."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"draft {str(path)!r}: expected {', '.join(words)}, or the folder of a model, of a "
            "DFlash draft or of a draft head; found no config.json there."
        )
    return read_json(file)


def shared_policy(model: nn.Module, draft: Draft, num_draft_tokens: int | str) -> Any:
    """Return ``num_draft_tokens``; for ``auto`` on several ranks, a policy that they share."""
    ranks = session_of(model).ranks
    if ranks is None or num_draft_tokens != "auto":
        return num_draft_tokens
    policy = learned_policy(model, draft)
    # Each rank measures other times, so rank 0 chooses for all ranks.
    policy.choose = lambda *given: ranks.gather(Policy.choose(policy, *given))[0]
    return policy


def write(
    model: nn.Module, tokenizer, prompt: list[int], draft: Draft | None, drafted: int | str, **given
) -> Iterator[GenerationResponse]:
    """Write a text as ``stream_generate`` does; a draft guesses ``drafted`` tokens a round."""
    if draft is None:
        return stream_generate(model, tokenizer, prompt, **given)
    given["num_draft_tokens"] = shared_policy(model, draft, drafted)
    return speculative_generate(model, tokenizer, prompt, draft, **given)
