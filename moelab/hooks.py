"""Listen to a module's calls, or change them: the one way in which this package does it."""

from contextlib import contextmanager
from functools import cache, partial


class _Hooked:
    """Mixed into the class of a module for as long as it has hooks."""


@contextmanager
def hooked(module, hook, method="__call__"):
    """Within, ``module`` calls ``hook(original, *args, **kwargs)`` in place of ``original``.

    A module may have several hooks, which may end in any order; one that began later is called
    first. Afterwards the module has its own class again.

    Args:
        module (nn.Module): Whose calls to hook.
        hook (Callable): Gets the method that it stands for, bound to the module, and the arguments.
        method (str): The method. Default: the module's call.
    """
    if not isinstance(module, _Hooked):
        # nn.Module would take a dict that is set as usual for parameters.
        object.__setattr__(module, "_hooks", {})
        module.__class__ = _hooked_class(type(module))
    if method not in vars(type(module)):
        setattr(type(module), method, _calling(type(module), method))
    hooks = module._hooks.setdefault(method, [])
    hooks.append(hook)
    try:
        yield
    finally:
        hooks.remove(hook)
        if not any(module._hooks.values()):
            module.__class__ = type(module)._unhooked
            object.__delattr__(module, "_hooks")


@cache
def _hooked_class(cls):
    return type(cls.__name__, (_Hooked, cls), {"__module__": cls.__module__, "_unhooked": cls})


def _calling(cls, name):
    def method(self, *args, **kwargs):
        call = getattr(super(cls, self), name)
        for hook in self._hooks.get(name, ()):
            call = partial(hook, call)
        return call(*args, **kwargs)

    return method
