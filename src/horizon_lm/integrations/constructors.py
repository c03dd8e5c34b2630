"""The constructor of a trainer: its arguments by name, and functions of its modules that are replaced while it runs."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


def arguments_by_name(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer's constructor by name.

    The names are those of the first class in the order of base classes whose constructor names a ``model``. Arguments that it does not
    name are left out.
    """
    signatures = [inspect.signature(vars(each)["__init__"]) for each in cls.__mro__ if "__init__" in vars(each)]
    with_model = next(each for each in signatures if "model" in each.parameters)
    first_to_receive = next((each for each in signatures if not _passes_all_on(each)), signatures[0])
    # A subclass with a signature of its own may order arguments otherwise; then only those given by name are known.
    positional = args if first_to_receive is with_model else ()
    known = {name: value for name, value in kwargs.items() if name in with_model.parameters}
    self_argument = None
    return with_model.bind_partial(self_argument, *positional, **known).arguments


def _passes_all_on(signature: inspect.Signature) -> bool:
    """Return whether a constructor takes ``*args, **kwargs`` and nothing else."""
    kinds = {each.kind for each in list(signature.parameters.values())[1:]}
    return kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@contextmanager
def globals_replaced(cls: type, replacements: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Context manager: replace global names in the modules of a class and of its bases.

    Args:
        cls: class of a trainer.
        replacements: by name, a function of the original that returns what replaces it. Modules without a name keep it so.
    """
    modules = [sys.modules[name] for name in {each.__module__ for each in cls.__mro__} if name in sys.modules]
    with ExitStack() as stack:
        for module in modules:
            for name, replacement in replacements.items():
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, replacement(getattr(module, name))))
        yield
