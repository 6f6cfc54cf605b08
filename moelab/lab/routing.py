"""What a trace says about locality, and synthetic traces that say the same for other shapes."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Locality:
    """What a synthetic trace is made from.

    Attributes:
        zipf (tuple[float]): For each layer the exponent a of the popularity ``rank ** -a``.
        stickiness (tuple[float]): For each layer the probability that a token keeps an expert of the last one.
    """

    zipf: tuple
    stickiness: tuple


def fit(trace):
    """The parameters with which ``synthesize`` makes traces like this one.

    Args:
        trace (Trace): Its decoded tokens count; all of them if none is decoded.

    Returns:
        Locality: For each of the trace's layers.
    """
    raise NotImplementedError


def synthesize(locality, T, L, E, K, seed=0):
    """A random trace with given locality, for any number of layers and experts.

    Args:
        locality (Locality): From ``fit`` or made by hand. Layer l takes the parameters of layer ``l * n // L`` of its n.
        T (int): Tokens, all decoded.
        L (int): Layers.
        E (int): Experts.
        K (int): Experts per token, distinct.
        seed (int): The same seed gives the same trace.

    Returns:
        Trace: ``[T, L, K]``.
    """
    raise NotImplementedError


def popularity(trace):
    """How often each expert was chosen.

    Returns:
        np.ndarray: ``[L, E]``, shares of tokens; each row sums to K.
    """
    T, L, K = trace.experts.shape
    flat = trace.experts + np.arange(L)[:, None] * trace.num_experts
    return np.bincount(flat.ravel(), minlength=L * trace.num_experts).reshape(L, -1) / T
