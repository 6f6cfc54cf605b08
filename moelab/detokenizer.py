"""How the tokens that a model writes become text, one by one."""

import codecs
import re
from functools import partial

from mlx_lm.tokenizer_utils import StreamingDetokenizer
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
CLEANED = "a . a ? a ! a , a ' a n't a 'm a 's a 've a 're"  # clean-up drops spaces of it
UNSURE = " 'nvr"  # after one of these the next character may let clean-up drop a space


class Detokenizer(StreamingDetokenizer):
    """The text of tokens after a prompt: ``decode(prompt + tokens)`` less the prompt's text.

    mlx-lm's detokenizers decode the tokens as if no prompt came before. Those of byte-level BPE and
    of SentencePiece drop a first space, which may be of an indentation; that of all others lets
    ``decode`` drop one after each line break, and has told what clean-up changes later. Here a
    token adds the bytes that it has amid a text. Half a character waits for the rest.

    Of bytes that are no UTF-8 the whole characters stay, as in mlx-lm. ``decode`` replaces them,
    too, in a row of SentencePiece's byte tokens. A decoder that looks at a token's neighbours, like
    GPT-1's, needs mlx-lm's own class.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._decode, self._clean = tokenizer, tokenizer.decode, None
        self._bytes = {}  # by token; copies share it
        encode = partial(tokenizer.encode, add_special_tokens=False)
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):  # fast BPE ignores it
            ids, plain = encode(CLEANED), partial(self._decode, clean_up_tokenization_spaces=False)
            if plain(ids) != self._decode(ids):
                self._decode, self._clean = plain, tokenizer.clean_up_tokenization
        self._amid = encode("a")  # put on both sides of a token to find its bytes
        self._before = len(self._decode(self._amid))
        self._behind = len(self._decode(2 * self._amid)) - self._before
        self.reset()

    def reset(self) -> None:
        """Begin another text, without a prompt's half character."""
        self.tokens, self._pieces, self.offset, self._held = [], [], 0, ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, prompt: list[int]) -> bool:
        """Begin the text after a prompt. Returns whether it has half a character of it."""
        self.reset()
        for token in prompt[-3:]:  # a token has a byte or more, half a character three at most
            self._utf8.decode(self.bytes_of(token))
        return bool(self._utf8.getstate()[0])

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def last_segment(self) -> str:
        """What was added since this was last asked for, without a copy of the whole text."""
        begin, self.offset = self.offset, len(self._pieces)
        return "".join(self._pieces[begin:])

    def add_token(self, token: int) -> None:
        """Add a token's text, as far as it cannot change."""
        self.tokens.append(token)
        self._add(self._utf8.decode(self.bytes_of(token)))

    def finalize(self) -> None:
        """Add what waited for more tokens."""
        self._add(self._utf8.decode(b"", final=True), last=True)

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes, before clean-up; several tokens may make one character."""
        if token not in self._bytes:
            whole = self._decode([*self._amid, token, *self._amid])
            text = whole[self._before : len(whole) - self._behind]
            piece = self._tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text else ""
            if byte := re.fullmatch("<0x(..)>", piece):
                made = bytes.fromhex(byte[1])
            elif piece and BYTES.keys() >= set(piece):
                made = bytes(BYTES[c] for c in piece)
            else:
                made = text.encode()
            self._bytes[token] = made
        return self._bytes[token]

    def _add(self, text, last=False):
        """Add decoded text, but for an end that clean-up may still change."""
        if self._clean:
            text = self._held + text
            end = len(text if last else text.rstrip(UNSURE))
            text, self._held = self._clean(text[:end]), text[end:]
        self._pieces.append(text)
