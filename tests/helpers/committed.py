"""What git has committed: no test judges what a user edited, ran or left in the working copy."""

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[2]


def _committed():
    """A folder with HEAD's files except weights, or the working copy if there is no clone."""
    command = ["git", "archive", "HEAD", ".", ":(exclude)*.safetensors"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return HERE, None
    folder = tempfile.TemporaryDirectory()
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder.name)  # no ``filter``, which Python 3.11.2 lacks
    return Path(folder.name), folder


ROOT, _folder = _committed()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
