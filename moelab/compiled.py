"""MLX's compiled code is this user's own.

On a CPU MLX compiles in ``TMPDIR/mlx``, which belongs to whoever of a machine's users was first:
it cannot write there for others, and would run what they put there.
"""

import os
from contextlib import suppress
from pathlib import Path


def keep_own() -> None:
    """Give MLX another ``TMPDIR`` if that has a folder ``mlx`` of another user's."""
    with suppress(OSError):
        if Path(os.environ.get("TMPDIR") or "/tmp", "mlx").stat().st_uid != os.getuid():
            own = Path.home() / ".cache" / "moelab" / "tmp"
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ["TMPDIR"] = str(own)
