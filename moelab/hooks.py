"""``hooked`` replaces calls for a while; ``call_instead`` replaces a function for good."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any

import mlx.nn as nn


@dataclass(eq=False)
class hooked:
    """Inside the block, a call of ``module`` is a call of ``hook(original, *args, **kwargs)``.

    Hooks may end in any order; the module has its own class again after the last hook ends. The
    hook that began last is called first; an ``innermost`` hook is called last. Entering the block
    again takes about 2 us, so a pass may hook every layer.
    """

    module: object
    hook: Callable
    method: str = "__call__"
    innermost: bool = False

    def install(self) -> "hooked":
        """Begin to call the hook, as entering the block does."""
        module, method = self.module, self.method
        if not hasattr(type(module), "_unhooked"):
            # A plain assignment would register the dictionary as the module's parameters.
            object.__setattr__(module, "_hooks", {})
            module.__class__ = _hooked_class(type(module))
        cls = type(module)
        if method not in cls.__dict__:
            setattr(cls, method, _hooked_method(cls, method))
        hooks = module._hooks.setdefault(method, [])  # innermost first
        hooks.insert(0 if self.innermost else len(hooks), self.hook)
        return self

    def remove(self, *_) -> None:
        """End the hook, as leaving the block does. Undoes an interrupted ``install``, too."""
        module = self.module
        if not hasattr(type(module), "_unhooked"):
            return
        hooks = module._hooks
        if self.hook in (installed := hooks.get(self.method, ())):
            installed.remove(self.hook)
        if not any(hooks.values()):
            module.__class__ = unhooked(module)
            object.__delattr__(module, "_hooks")

    __enter__, __exit__ = install, remove


def methods(cls: type) -> dict[str, Callable]:
    """Map names to the Python methods of a class, or to the copies that ``call_instead`` made."""
    mro = [c for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    return {
        name: getattr(f, "copy", f)
        for c in reversed(mro)
        for name, f in vars(c).items()
        if isinstance(f, FunctionType)
    }


def with_globals(f: Callable, names: dict[str, Any]) -> Callable:
    """Copy a function; ``names`` replaces some globals of the copy."""
    copy = FunctionType(f.__code__, f.__globals__ | names, None, f.__defaults__, f.__closure__)
    copy.__kwdefaults__ = f.__kwdefaults__
    return copy


def replaced(originals: Iterable[tuple[Any, str, Any]]) -> str:
    """Return the name of the first original that another library has replaced; "" for none.

    An original is a triple: the owner (a class, a Python module or its globals), a name in it,
    and the value that the name had at first.
    """
    for owner, name, value in originals:
        found = owner.get(name) if type(owner) is dict else getattr(owner, name, None)
        if found is not value:
            return f"{owner['__name__'] if type(owner) is dict else owner.__name__}.{name}"
    return ""


def call_instead(module: nn.Module, name: str, replace: Callable[[Callable], Callable]) -> None:
    """Let a module's methods call ``replace(f)`` in place of f, the global function ``name``.

    The module gets a subclass of its class. The former class's method runs in training, and
    while another library has replaced f or that method.
    """
    cls = type(module)
    own = ((key, getattr(cls, key)) for key in methods(cls))  # inherited methods, too
    found = tuple(
        (key, f, f.__globals__[name])
        for key, f in own
        if name in f.__code__.co_names and name in f.__globals__
    )
    if found:
        module.__class__ = _calling(cls, name, replace, found)


@cache
def _calling(cls, name, replace, found):
    changed = {
        key: _unless_replaced(cls, key, f, name, replace(called)) for key, f, called in found
    }
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **changed})


def _unless_replaced(cls, key, own, name, instead):
    """Make a method that calls ``instead`` unless somebody has replaced ``own`` or its callee."""
    originals = (cls, key, own), (own.__globals__, name, own.__globals__[name])
    copy = with_globals(own, {name: instead})

    @wraps(own)
    def method(self, *args, **kwargs):
        f = getattr(cls, key) if self.training or replaced(originals) else copy
        return f(self, *args, **kwargs)

    method.copy = copy
    return method


def unhooked(module: object) -> type:
    """The module's own class, whether it has hooks or not."""
    return getattr(type(module), "_unhooked", type(module))


@cache
def _hooked_class(cls):
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "_unhooked": cls})


def _hooked_method(cls, name):
    def method(self, *args, **kwargs):
        call = getattr(super(cls, self), name)
        for hook in self._hooks.get(name, ()):
            call = partial(hook, call)
        return call(*args, **kwargs)

    return method
