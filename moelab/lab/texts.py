"""Texts to decode and to predict: the built-in prompts and a model's held-out files."""

import bisect
import io
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..shipped import shipped

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

PROMPTS = (
    "def read_lines(path):\n    with open(path) as f:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    parser =",
    "for name, value in sorted(options.items()):\n    if value is None:\n",
    '    """Return the number of rows that match.\n\n    Args:\n        query (str):',
    "def test_empty_input():\n    with pytest.raises(ValueError):\n",
    "try:\n    import numpy as np\nexcept ImportError:\n    np = None\n\n\ndef mean(values):\n",
    "    def __repr__(self):\n        return f'<{type(self).__name__}",
)


def heldout_files(folder: str | Path) -> dict[str, str]:
    """Read a folder's texts (as a rule ``MODEL/heldout``) by file name, in the order of names."""
    files = sorted(p for p in Path(folder).glob("*") if p.suffix in (".py", ".md", ".txt"))
    if not files:
        raise FileNotFoundError(
            f"{folder}: expected files of text (.py, .md, .txt), found none. Give a folder with "
            "some."
        )
    return {p.name: p.read_bytes().decode() for p in files}


def heldout_code(model: str | Path) -> dict[str, str]:
    """Read the Python files among a model's held-out texts, by name."""
    texts = heldout_files(Path(model) / "heldout")
    return {name: text for name, text in texts.items() if name.endswith(".py")}


def heldout_starts(
    model: str | Path, num: int, tokens: int, tokenizer: "TokenizerWrapper"
) -> list[str]:
    """Cut ``num`` prompts of ``tokens`` tokens from held-out Python files, 400 characters apart."""
    files, prompts = list(heldout_code(model).values()), []
    for i in range(num):
        text = files[i % len(files)][400 * (1 + i // len(files)) :]
        prompts.append(tokenizer.decode(tokenizer.encode(text[: 8 * tokens])[:tokens]))
    return prompts


def heldout_ids(model: str | Path, lengths: Sequence[int], rounds: int) -> list[list[int]]:
    """Encode prompts of tiny-moe's held-out code, one for each round, in alternating lengths."""
    from mlx_lm.utils import load_tokenizer

    tokenizer, tiny = load_tokenizer(Path(model)), shipped("models", "tiny-moe")
    most = -(-rounds // len(lengths))
    starts = [heldout_starts(tiny, most, length, tokenizer) for length in lengths]
    turns = (zip(lengths, texts) for texts in zip(*starts))
    return [tokenizer.encode(text)[:length] for turn in turns for length, text in turn]


def prose_spans(text: str) -> list[tuple[int, int]]:
    """Find the character ranges of triple-quoted strings in Python; nearly all are prose."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    spans = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and token.string.endswith(('"""', "'''")):
            (a, b), (c, d) = token.start, token.end
            spans.append((starts[a - 1] + b, starts[c - 1] + d))
    return spans


def heldout_prompts(model: str | Path, kind: str, length: int) -> list[list[int]]:
    """Return ids of ``code`` or ``prose`` prompts, up to four from each held-out Python file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    prompts = []
    for text in heldout_code(model).values():
        encoding = tokenizer.encode(text, add_special_tokens=False)
        spans, ids = prose_spans(text), encoding.ids
        ends = enumerate(encoding.offsets[length:], length)
        cuts = [i for i, (at, _) in ends if _may_end(text, at, kind, spans)]
        step = max(len(cuts) // 4, 1)
        prompts += [ids[i - length : i] for i in cuts[step // 2 :: step][:4]]
    return prompts


def spaced_prompts(path: str | Path, kind: str, length: int, num: int) -> list[list[int]]:
    """Return the token ids of ``num`` held-out prompts, evenly spaced over all files."""
    every = heldout_prompts(path, kind, length)
    return every[:: max(1, len(every) // num)][:num]


def _may_end(text, at, kind, spans):
    """Whether a prompt may end before character ``at``: only within a line, not after a blank."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    if not line.strip() or text[at - 1].isspace():
        return False
    j = bisect.bisect_right(spans, (at, len(text))) - 1
    if kind == "prose":
        # The prompt ends so deep in a docstring that the model must go on in prose.
        return j >= 0 and spans[j][0] + 40 <= at <= spans[j][1] - 80
    return (j < 0 or at >= spans[j][1]) and "#" not in line
