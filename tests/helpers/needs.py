"""What some tests need of the machine."""

import pytest

from moelab import kernels

needs_kernels = pytest.mark.skipif(
    not kernels.available(), reason="the fast kernels need llvmlite and the CPU backend"
)
