"""Compiled kernels on disk: a mode takes two to five seconds to compile and a tenth of one to read.

numba's own cache does not find a kernel again that is composed of other functions: it knows these by their identity in a process.
"""

import hashlib
import os
import pickle
import platform
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher

_PACKAGE = Path(__file__).parents[2]
_DIGEST_BYTES = 32
_NAME_DIGITS = 16


def name_by_parts(function: FunctionType) -> FunctionType:
    """Add to the name of a function a digest of its parts (`_parts`), and return the function.

    Machine code is linked by name. numba makes names distinct by counting the functions of a process, so kernels that
    two processes compiled may share one, and a kernel would then call whichever of them was loaded first.
    """
    parts = [
        (part.__module__, part.__qualname__, part.__code__.co_firstlineno)
        if isinstance(part, FunctionType)
        else repr(part)
        for part in _parts(function)
    ]
    function.__qualname__ += f"_{hashlib.sha256(repr(parts).encode()).hexdigest()[:_NAME_DIGITS]}"
    return function


def keep(kernel: Any) -> None:
    """Let a kernel, named by `name_by_parts`, keep its machine code on disk, unless it calls functions of other packages: their sources
    may change unnoticed.
    """
    if all(part.__module__.startswith("horizon_lm.") for part in _parts(kernel) if isinstance(part, FunctionType)):
        kernel._cache = _KernelCache(kernel.py_func)


def _parts(value: Any) -> Iterator[Any]:
    """Yield a function, and the functions and plain values that it or one of these closes over."""
    part = value.py_func if isinstance(value, Dispatcher) else value
    yield part
    if isinstance(part, FunctionType):
        for cell in part.__closure__ or ():
            yield from _parts(cell.cell_contents)


class _KernelCache(NullCache):
    """The compiled forms of a kernel; numba calls it. Without a usable folder it keeps nothing, and finds nothing."""

    def __init__(self, function: FunctionType) -> None:
        self._identity = (function.__module__, function.__qualname__)

    def load_overload(self, types: Any, context: Any) -> Any:
        """Return the machine code for arguments of these types from its file; None if there is none, or a damaged one."""
        context.refresh()
        with suppress(OSError):
            if (folder := _folder()) and (path := folder / self._name(types, context.codegen())).exists():
                content = path.read_bytes()
                if hashlib.sha256(content[_DIGEST_BYTES:]).digest() == content[:_DIGEST_BYTES]:
                    return CompileResult._rebuild(context, *pickle.loads(content[_DIGEST_BYTES:]))
        return None

    def save_overload(self, types: Any, compiled: Any) -> None:
        """Write the machine code for arguments of these types. The file gets its name once it is complete."""
        with suppress(OSError):
            if folder := _folder():
                content, part = pickle.dumps(compiled._reduce()), folder / uuid.uuid4().hex
                try:
                    part.write_bytes(hashlib.sha256(content).digest() + content)
                    part.replace(folder / self._name(types, compiled.codegen))
                finally:
                    part.unlink(missing_ok=True)

    def _name(self, types: Any, codegen: Any) -> str:
        """Return the name of the file of a compiled form: a hash of all that its machine code depends on."""
        key = (_versions(), codegen.magic_tuple(), self._identity, str(types))
        return hashlib.sha256(repr(key).encode()).hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    """Return the versions that kernels depend on, and a hash of all sources: a kernel has parts of several modules."""
    sources = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        sources.update(path.read_bytes())
    return sources.hexdigest(), numba.__version__, np.__version__, platform.python_version()


def _folder() -> Path | None:
    """Create the folder of kernels if it is missing, and return it; None if others may write to it, because its content is run."""
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "horizon-lm" / "kernels"
    if not folder.is_absolute():  # a user without a home
        return None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    return folder if status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None
