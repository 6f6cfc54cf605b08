"""How a prompt becomes the text and the tokens that a model reads."""

from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .checkpoint import describe


@dataclass(frozen=True)
class Template:
    """Makes from a prompt the text that the model reads, as ``mlx_lm.generate`` does."""

    ignore: bool = False  # keep the prompt as it is, without the tokenizer's chat template
    system_prompt: str | None = None
    prefill_response: str | None = None  # the answer begins with it
    config: dict | None = None  # more arguments of the template

    def applies(self, tokenizer: TokenizerWrapper) -> bool:
        """Whether there is a template to apply."""
        return tokenizer.has_chat_template and not self.ignore

    def text(self, tokenizer: TokenizerWrapper, prompt: str) -> str:
        """The text that the model reads."""
        if not self.applies(tokenizer):
            return prompt
        said = {"system": self.system_prompt, "user": prompt, "assistant": self.prefill_response}
        messages = [
            {"role": role, "content": text} for role, text in said.items() if text is not None
        ]
        prefill = self.prefill_response is not None
        flags = {"continue_final_message": prefill, "add_generation_prompt": not prefill}
        return render(tokenizer, messages, self.config, **flags)

    def text_after(self, tokenizer: TokenizerWrapper, prompt: str) -> str:
        """The text that the model reads if its cache already holds how the message begins."""
        text, mark = self.text(tokenizer, prompt), "<query>"
        before, found, _ = self.text(tokenizer, mark).partition(mark)
        if not found:
            raise ValueError(
                "chat template: expected one that writes a message as it is, this one changes it, "
                "so the prompt cannot go on from a prompt cache file."
            )
        return text[len(before) :]


def render(
    tokenizer: TokenizerWrapper, messages: list[dict], config: dict | None = None, **options: bool
) -> str:
    """Apply the chat template; ``config``: the user's arguments, ``options``: mlx-lm's flags."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options, **config or {})
    except Exception as error:  # whatever a template or its arguments raise
        given = f" with {', '.join(config)}" if config else ""
        raise ValueError(
            f"chat template of the tokenizer: expected one for messages of "
            f"{', '.join(m['role'] for m in messages)}{given}, it fails: {describe(error)}. Leave "
            "out what it does not take."
        ) from error


def encode(tokenizer: TokenizerWrapper, text: str, special: bool = True) -> list[int]:
    """The tokens of a prompt, at least one; ``special`` adds those that begin a text."""
    ids = tokenizer.encode(text, **({} if special else {"add_special_tokens": False}))
    if not len(ids):
        raise ValueError(
            f"prompt {text!r}: expected a text of at least one token, the tokenizer made none. "
            "Give another."
        )
    return ids
