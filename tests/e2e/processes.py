"""Runs in processes of their own, which can be sent signals. They are forked from a process that has imported everything."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.forks import context

SECONDS = 100  # until a process that does not go on is a failure


def _run(arguments: list[str], setup: str, environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    os.setsid()
    os.environ.update(environment)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    import torch

    from horizon_lm.cli import main

    torch.set_num_threads(1)
    exec(setup, {})
    sys.argv[1:] = ["train", *arguments]
    main()


class RunProcess:
    """Context manager: a process that runs ``horizon-lm train``, as the leader of a process group.

    Args:
        run_file: the settings.
        arguments: further arguments.
        setup: Python to run first, which slows something down or breaks it.
        environment: variables to set first.
    """

    _count = 0

    def __init__(
        self, run_file: Path, *arguments: Any, setup: str = "", environment: dict[str, str] | None = None
    ) -> None:
        RunProcess._count += 1
        self._paths = [run_file.with_name(f"{name}-{self._count}") for name in ("stdout", "stderr")]
        self._process = context.Process(
            target=_run, args=([*map(str, (run_file, *arguments))], setup, environment or {}, *self._paths)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def stdout(self) -> str:
        return self._paths[0].read_text() if self._paths[0].exists() else ""

    @property
    def stderr(self) -> str:
        return self._paths[1].read_text() if self._paths[1].exists() else ""

    def wait_for(self, text: str) -> None:
        """Block until this text was printed. Fail if the process ends without it."""
        deadline = time.monotonic() + SECONDS
        while True:
            alive = self._process.is_alive()
            if text in self.stdout + self.stderr:
                return
            assert alive, f"ended without {text!r}:\n{self.stdout}\n{self.stderr}"
            assert time.monotonic() < deadline, f"no {text!r}:\n{self.stdout}\n{self.stderr}"
            self._process.join(0.02)

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or to its whole group."""
        (os.killpg if group else os.kill)(self.pid, number)

    def end(self, seconds: float = SECONDS) -> int:
        """Wait for the end and return the exit code."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"still running:\n{self.stdout}\n{self.stderr}"
        return code

    def __enter__(self) -> "RunProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs."""
        if self._process.is_alive():
            self.send(signal.SIGKILL, group=True)
            self._process.join()
        self._process.close()
