"""Decides which rank holds and reads which expert."""

import numpy as np


def by_number(layers: int, num_experts: int, ranks: int) -> np.ndarray:
    """The rank of each expert, ``[L, E]``, if every N-th expert is the same rank's."""
    return np.tile(np.arange(num_experts) % ranks, (layers, 1))


def balanced(experts: np.ndarray, num_experts: int, ranks: int) -> np.ndarray:
    """The rank of each expert, ``[L, E]``, by a trace's ``[T, L, K]``; ranks hold equally many.

    Experts that tokens use together go to different ranks: two are swapped while that helps.
    """
    owners = by_number(experts.shape[1], num_experts, ranks)
    for layer, of in enumerate(owners):
        used = np.zeros((len(experts), num_experts), np.float32)
        np.put_along_axis(used, experts[:, layer].astype(np.intp), 1, 1)
        together = used.T @ used
        np.fill_diagonal(together, 0)
        while True:
            beside = together @ np.eye(ranks, dtype=np.float32)[of]  # [E, N]
            own = beside[np.arange(num_experts), of]
            other = beside[:, of]  # [i, j]: how often i is used with the experts of j's rank
            gain = own[:, None] + own - other - other.T + 2 * together
            gain[of[:, None] == of] = 0
            i, j = np.unravel_index(gain.argmax(), gain.shape)
            if gain[i, j] <= 0:
                break
            of[[i, j]] = of[[j, i]]
    return owners
