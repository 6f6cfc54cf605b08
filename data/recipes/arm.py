"""Test kernels and reads, and write a text in each mode, on an emulated 64-bit ARM processor.

    python data/recipes/arm.py FOLDER

The script needs Debian or Ubuntu with qemu-user-static. It installs the system's Python for ARM and
the newest packages for this Python in FOLDER (600 MB). It runs every eighth test of the kernels and
of the reader. A run takes ten minutes or more.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLIBC = (35, 34, 31, 28, 27, 26, 24, 17)  # wheels are built for glibc 2.N with these N
TEXTS = """
import mlx_lm, moelab
for mode in ("resident", "serial", "buffers", "stacked", "fused"):
    model, tokenizer = moelab.load("data/models/tiny-moe", moelab.StreamConfig(mode=mode, slots=16))
    with model:
        print(mode, repr(mlx_lm.generate(model, tokenizer, "def read_json(path):", max_tokens=16)))
"""
TESTS = """
import pytest
class Sampled:
    def pytest_collection_modifyitems(self, items):
        items[:] = items[::8]
words = ["-q", "-m", "not slow", "tests/kernels", "tests/streaming/test_reader.py"]
raise SystemExit(pytest.main(words, plugins=[Sampled()]))
"""


def emulated(folder: Path) -> list[str]:
    """Return the command of an ARM Python with moelab's packages; install what is missing."""
    root, site, apt = (folder / name for name in ("root", "site", "apt"))
    if not root.is_dir():  # apt writes under ``folder``, not in this system's folders
        for part in ("lists/partial", "archives/partial"):
            (apt / part).mkdir(parents=True)
        (apt / "status").touch()
        given = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::Cache": apt}
        given |= {"Dir::State": apt, "Dir::State::status": apt / "status"}
        get = ["apt-get", "-q", "-y", *(f"-o{key}={value}" for key, value in given.items())]
        subprocess.run([*get, "update"], check=True)
        what = "install --no-install-recommends --download-only python3 libstdc++6 libgomp1"
        subprocess.run([*get, *what.split()], check=True)
        for package in (apt / "archives").glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, root], check=True)
    library = next((root / "usr/lib").glob("python3.*"))
    if not site.is_dir():
        needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        tags = [f"--platform=manylinux_2_{n}_aarch64" for n in GLIBC] + ["--only-binary=:all:"]
        tags += ["--platform=manylinux2014_aarch64", f"--python-version={library.name[6:]}"]
        words = [*needed, "pandas", "pytest<10", "hypothesis", "--target", site, *tags]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-warn-conflicts", *words],
            check=True,
        )
    # PATH has no g++: MLX would compile with g++ for the wrong machine.
    values = {"PYTHONHOME": root / "usr", "PYTHONPATH": f"{site}:{ROOT}", "PATH": "/nothing"}
    values |= {"MOELAB_FAST": 1, "MOELAB_FUZZ": 10, "HF_HUB_OFFLINE": 1}
    given = (word for key, value in values.items() for word in ("-E", f"{key}={value}"))
    return ["qemu-aarch64-static", "-L", root, *given, root / "usr/bin" / library.name]


def main(folder: str) -> bool:
    """Print how many texts are as on this machine, run the tests, return whether all passed."""
    arm = emulated(Path(folder).absolute())
    here, there = (
        subprocess.run([*python, "-c", TEXTS], cwd=ROOT, check=True, capture_output=True, text=True)
        for python in ([sys.executable], arm)
    )
    texts = [a == b for a, b in zip(here.stdout.splitlines(), there.stdout.splitlines())]
    print(f"{sum(texts)} of {len(texts)} texts are the same", flush=True)
    tests = subprocess.run([*arm, "-c", TESTS], cwd=ROOT)
    return len(texts) == 5 and all(texts) and not tests.returncode


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
