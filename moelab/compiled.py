"""Makes MLX compile in a folder that this user owns.

On a CPU MLX compiles kernels in ``TMPDIR/mlx``, which belongs to the first user who ran MLX.
Another user's MLX cannot write there, and would run the kernels that the first user left there.
"""

import os
from contextlib import suppress
from pathlib import Path


def keep_own() -> None:
    """Set ``TMPDIR`` to a folder of this user if another user owns ``TMPDIR/mlx``."""
    with suppress(OSError):
        if Path(os.environ.get("TMPDIR") or "/tmp", "mlx").stat().st_uid != os.getuid():
            own = Path.home() / ".cache" / "moelab" / "tmp"
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ["TMPDIR"] = str(own)
