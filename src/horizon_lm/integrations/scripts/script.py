"""A script or a module that is run as the main program of this process, and places in it."""

import inspect
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Self

from horizon_lm.common.paths import near_path
from horizon_lm.errors import ConfigError, first_line


@dataclass(frozen=True, slots=True)
class Script:
    """A script.

    Attributes:
        path: its file.
        arguments: its command-line arguments.
        module: its name, if it is run as a module.
    """

    path: Path
    arguments: tuple[str, ...]
    module: str | None = None

    @classmethod
    def of_file(cls, path: str, arguments: Sequence[str]) -> Self:
        """Return the script in a file. Raise ConfigError if there is none."""
        if not Path(path).is_file():
            raise ConfigError(f"{path}: no such script{near_path(Path(path))}")
        return cls(Path(path).absolute(), tuple(arguments))

    @classmethod
    def of_module(cls, name: str, arguments: Sequence[str]) -> Self:
        """Return the script that ``python -m NAME`` runs. Raise ConfigError if there is none."""
        sys.path.insert(0, os.getcwd())  # as Python does
        try:
            spec = find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = find_spec(f"{name}.__main__")
        except ModuleNotFoundError as error:
            raise ConfigError(f"-m {name}: {first_line(error)}") from error
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"-m {name}: there is no such module that can be run; check its name and where it is installed"
            )
        return cls(Path(spec.origin), tuple(arguments), name)

    def run(self) -> None:
        """Run the script as ``__main__``, with its arguments in ``sys.argv``."""
        sys.argv = [str(self.path), *self.arguments]
        if self.module is not None:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            return
        sys.path.insert(0, str(self.path.parent))  # as Python does
        runpy.run_path(str(self.path), run_name="__main__")

    def place(self, error: BaseException | None = None) -> str:
        """Return the innermost line of the script, or of a file beside it, as FILE:LINE: the one that is running, or that an error
        passed through. An empty string if there is none.
        """
        frames: list[tuple[FrameType, int]] = []
        if error is None:
            frame: FrameType | None = inspect.currentframe()
            while frame is not None:
                frames.append((frame, frame.f_lineno))
                frame = frame.f_back
        else:
            traceback = error.__traceback__
            while traceback is not None:
                frames.insert(0, (traceback.tb_frame, traceback.tb_lineno))
                traceback = traceback.tb_next
        for each, line in frames:
            path = Path(each.f_code.co_filename)
            if self._is_own(path):
                is_near = self.module is None and path.is_relative_to(Path.cwd())
                return f"{path.relative_to(Path.cwd()) if is_near else path.name}:{line}"
        return ""

    def _is_own(self, path: Path) -> bool:
        """Return whether a file is the script, or code beside it that is no installed package."""
        if not path.is_absolute() or not path.is_relative_to(self.path.parent):
            return False
        return "site-packages" not in path.relative_to(self.path.parent).parts
