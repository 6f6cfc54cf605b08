"""``hooked`` observes or replaces a module's calls, and leaves nothing behind."""

import itertools

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from moelab.hooks import hooked


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = mx.array(2.0)

    def __call__(self, x, times=1):
        return x * self.weight.item() * times


def add(n):
    return lambda original, *args, **kwargs: original(*args, **kwargs) + n


def times(n):
    return lambda original, *args, **kwargs: original(*args, **kwargs) * n


def test_a_hook_replaces_a_call_until_the_block_ends_or_fails():
    """The module keeps its parameters and takes new ones; the last hook is called first."""
    module, seen = Double(), []

    def hook(original, *args, **kwargs):
        seen.append((args, kwargs, original(*args, **kwargs)))
        return "replaced"

    with hooked(module, hook):
        assert module(3, times=4) == "replaced"
    assert seen == [((3,), {"times": 4}, 24)] and module(3) == 6
    with pytest.raises(ZeroDivisionError), hooked(module, lambda original, x: original(x) / 0):
        module(3)
    assert type(module) is Double and module(3) == 6
    with hooked(module, add(1)), hooked(module, times(10)):
        assert module(3) == (6 + 1) * 10
    with hooked(module, times(10)), hooked(module, add(1), innermost=True):
        assert module(3) == (6 + 1) * 10
        assert [k for k, _ in tree_flatten(module.parameters())] == ["weight"]
        module.update({"weight": mx.array(5.0)})
    assert module(3) == 15


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_hooks_end_in_any_order(order):
    """A hook that is set twice counts as two; another module of the class has no hook."""
    module, other, amounts = Double(), Double(), (1, 300, 300)
    twice = add(300)
    hooks = [hooked(module, hook).install() for hook in (add(1), twice, twice)]
    left = sum(amounts)
    for i in order:
        assert (module(3), other(3)) == (6 + left, 6)
        assert isinstance(module, Double) and type(module).__name__ == "Double"
        hooks[i].remove()
        left -= amounts[i]
    assert module(3) == 6 and type(module) is Double and not hasattr(module, "_hooks")
