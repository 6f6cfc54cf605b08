"""Makes text of the tokens that a model writes, one token at a time."""

import codecs
import re
from functools import partial

from mlx_lm.tokenizer_utils import StreamingDetokenizer
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
CLEANED = "a . a ? a ! a , a ' a n't a 'm a 's a 've a 're"  # clean-up drops spaces from this text
UNSURE = " 'nvr"  # the character after one of these may make clean-up drop a space


class Detokenizer(StreamingDetokenizer):
    """The text of tokens after a prompt: ``decode(prompt + tokens)`` less the prompt's text.

    mlx-lm's detokenizers decode the tokens as if no prompt came before. The classes for byte-level
    BPE and SentencePiece drop the first space, which may belong to an indentation. The naive class
    drops a space after each line break, and adds text that clean-up later changes. Here a token
    adds the same bytes as in the middle of a text; half a character waits for its other bytes.

    If bytes are not valid UTF-8, the whole characters among them stay, as in mlx-lm. ``decode``
    would also replace the whole characters in a run of SentencePiece's byte tokens. A tokenizer
    whose decoder looks at a token's neighbours, like GPT-1's, needs mlx-lm's own class.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._decode, self._clean = tokenizer, tokenizer.decode, None
        self._bytes = {}  # the bytes of each token; copies of this object share them
        encode = partial(tokenizer.encode, add_special_tokens=False)
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):  # fast BPE ignores this flag
            ids, plain = encode(CLEANED), partial(self._decode, clean_up_tokenization_spaces=False)
            if plain(ids) != self._decode(ids):
                self._decode, self._clean = plain, tokenizer.clean_up_tokenization
        self._amid = encode("a")  # tokens on both sides of a token whose bytes are looked for
        self._before = len(self._decode(self._amid))
        self._behind = len(self._decode(2 * self._amid)) - self._before
        self.reset()

    def reset(self) -> None:
        """Begin a new text, and drop the bytes of an unfinished character."""
        self.tokens, self._pieces, self.offset, self._held = [], [], 0, ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, prompt: list[int]) -> bool:
        """Begin the text after a prompt; return whether the prompt ends in half a character."""
        self.reset()
        for token in prompt[-3:]:  # half a character has at most three bytes
            self._utf8.decode(self.bytes_of(token))
        return bool(self._utf8.getstate()[0])

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def last_segment(self) -> str:
        """The text added since this property was last read; the whole text is not copied."""
        begin, self.offset = self.offset, len(self._pieces)
        return "".join(self._pieces[begin:])

    def add_token(self, token: int) -> None:
        """Add a token, and the part of its text that later tokens cannot change."""
        self.tokens.append(token)
        self._add(self._utf8.decode(self.bytes_of(token)))

    def finalize(self) -> None:
        """Add the text that waited for more tokens."""
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
        """Add decoded text, except for an end that clean-up may still change."""
        if self._clean:
            text = self._held + text
            end = len(text if last else text.rstrip(UNSURE))
            text, self._held = self._clean(text[:end]), text[end:]
        self._pieces.append(text)
