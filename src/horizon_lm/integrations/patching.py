"""Replace functions of TRL while one of its trainers is created."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def replaced(cls: type, replacements: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
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
