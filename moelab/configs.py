"""Published configurations of models, with the keys that mlx-lm's classes need.

From them ``synthesize`` writes checkpoints of real shapes, and ``python -m moelab plan`` knows the
sizes of a model before its download. Each model's total of parameters is within 1% of the published
total. mlx-lm's defaults stand in for values that were not found and that change no size.

Three models use the class of another model, for their sizes only. deepseek-v4-flash uses
deepseek_v41's class, whose compressors have 0.04 B more parameters; the real model's first three
layers route by a table. qwen3.8-flash-next uses mlx-vlm's class or, if mlx-vlm is not installed,
Qwen3.5's class, which lacks hyper-connections, indexers, the n-gram table (51 B) and the table's
readers (0.7 B). glm-5.3-flash uses Kimi K3's class, which has another activation and lacks indexers
and hyper-connections (0.12 B). kimi-k3 leaves out the vision part. deepseek-v4.1-flash leaves out
the vision part, engram (mlx-lm refuses it) and the three draft layers. The vocabulary and untied
head of olmoe-1b-7b are transformers' defaults. Kimi's lists number the layers from 1.
"""

import json
from argparse import ArgumentTypeError
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text())
for _name, _config in CONFIGS.items():
    _stand_in = _config.pop("without_mlx_vlm", _config)
    CONFIGS[_name] = _config if find_spec("mlx_vlm") else _stand_in


class Unknown(ValueError, ArgumentTypeError):
    """A name that is none of a list; a command line's parser shows the text of this error."""


def one_of(names: Iterable[str], given: str, also: str = "") -> str:
    """Return the name that is ``given`` but for case and dashes; an error lists the names."""
    plain = {_plain(name): name for name in names}
    if _plain(given) in plain:
        return plain[_plain(given)]
    near = [plain[n] for n in get_close_matches(_plain(given), plain)]
    expected = " or ".join(near) or f"one of {', '.join(plain.values())}"
    raise Unknown(f"expected {also}{expected}, got {given!r}")


def _plain(name):
    return "".join(filter(str.isalnum, name.lower())).removeprefix("apple")
