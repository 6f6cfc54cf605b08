"""How near two arrays are."""

import numpy as np


def near(got, want, bound: float = 1e-5) -> bool:
    """Whether they differ by at most ``bound`` times the largest number of ``want``."""
    got, want = np.array(got, np.float64), np.array(want, np.float64)
    return got.shape == want.shape and np.abs(got - want).max() <= bound * np.abs(want).max()
