"""Text for the models in ``data/``: collect, select, split, tokenize."""

import sysconfig
from pathlib import Path

VOCAB_SIZE = 8192
PAD, EOS, MASK = "<|pad|>", "<|endoftext|>", "<|mask|>"
SPECIAL_TOKENS = [PAD, EOS, MASK, "<|im_start|>", "<|im_end|>"]
SPECIAL_TOKENS += [f"<|extra_{i}|>" for i in range(16 - len(SPECIAL_TOKENS))]

# Qwen's pattern, but a line end keeps the indentation that follows it: code needs a third fewer tokens for its layout.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:\n[ \t]*)*|\s*\n[ \t]*|\s+(?!\S)|\s+"


def train_tokenizer(texts, vocab_size=VOCAB_SIZE):
    """Train a byte-level BPE; every text decodes to itself exactly.

    Args:
        texts (Iterable[str]): What to learn the merges from.
        vocab_size (int): Number of ids, the 16 special tokens included.

    Returns:
        transformers.PreTrainedTokenizerFast: The tokenizer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=EOS,
        mask_token=MASK,
        extra_special_tokens=SPECIAL_TOKENS[3:],
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def stdlib_texts():
    """The standard library's own modules, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="ignore")
