"""Render all chat templates of this process in another one, with limits on time, memory and output.

`limit_templates` replaces the function with which transformers compiles a template, so that everything that renders one is
limited: ours, TRL's and lm-eval's calls of ``apply_chat_template``.
"""

import atexit
import builtins
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from horizon_lm.common.quantities import counted
from horizon_lm.errors import ConfigError
from horizon_lm.runs.data.template_server import LIMIT

MAX_SECONDS = 5  # of CPU for one text
_MAX_TEMPLATE_CHARS = 2**20  # published templates have up to 50,000


def limit_templates() -> None:
    """Let transformers render chat templates with limits from now on. Calling this again changes nothing."""
    from transformers.utils import chat_template_utils

    if chat_template_utils._compile_jinja_template is not _compile_limited:
        chat_template_utils._compile_jinja_template = _compile_limited


class _Server:
    """The rendering process of this process, started for the first template and again after it was ended by a limit."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner, self._lock = 0, threading.Lock()
        self._inherited: list[Any] = []  # kept, because dropping a process that is another one's child warns

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Return the answer to a request, starting the process if there is none; raise ConfigError if it ended, as a limit makes it."""
        with self._lock:
            process = self._running_process()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            except BaseException:  # an interrupt: the next request must not read the answer to this one
                self._stop()
                raise
            if not answer.endswith("\n"):  # it ended within this request
                raise ConfigError(_describe_end(self._stop()))
            return json.loads(answer)

    def close(self) -> None:
        """End the process, if this process has started one."""
        if self._process is not None and self._owner == os.getpid():
            self._stop()

    def _running_process(self) -> subprocess.Popen[str]:
        """Return the process that renders for this process, and start one if there is none or it has ended."""
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self._stop()  # it was ended from elsewhere, between two texts
        self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[str]:
        """Start a process that renders, and return it. An inherited one, from before a fork, is kept but not used: this process and its
        parent would read each other's answers.
        """
        if self._process is not None:
            self._inherited.append(self._process)
        self._process, self._owner = None, os.getpid()
        file = Path(__file__).with_name("template_server.py")
        try:
            return subprocess.Popen(
                [sys.executable, "-P", str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, encoding="utf-8", env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # a signal to the run's group does not end it while rows are unfinished
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"a process that renders the chat template cannot be started ({error.strerror})"
            ) from error

    def _stop(self) -> int:
        """End the process and return its exit status."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        for stream in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]  # pipes
        return process.wait()


def _describe_end(code: int) -> str:
    """Return the message, with the remedy, about the end of a rendering process, given its exit status."""
    if -code == signal.SIGXCPU:
        return f"the chat template takes more than {counted(MAX_SECONDS, 'second')} for one text; {_REMEDY}"
    return f"the process that renders the chat template ended with status {code}; {_REMEDY}"


_REMEDY = "use another template (chat_template_path)"
_SERVER = _Server()
atexit.register(_SERVER.close)


class _LimitedTemplate:
    """A compiled template as far as transformers uses one, rendered by `_SERVER`.

    Attributes:
        environment: an object with what transformers uses of the template's environment.
    """

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise ConfigError(f"the chat template has {len(source):,} characters, more than {_MAX_TEMPLATE_CHARS:,}")
        self._source, self.environment = source, _Environment(source)

    def render(self, **variables: Any) -> str:
        """Return the text of a conversation."""
        return str(self._ask(variables, marked=False)["text"])

    def generate(self, **variables: Any) -> Iterator[str]:
        """Yield the text in one piece, after adding the places of generated parts in it to the list of the active tracker."""
        answer = self._ask(variables, marked=True)
        self.environment.spans.extend(map(tuple, answer["spans"]))
        yield str(answer["text"])

    def _ask(self, variables: Mapping[str, Any], marked: bool) -> Any:
        """Return the answer of the rendering process, with the places of generated parts if ``marked``; raise its error here."""
        answer = _SERVER.ask(
            {"template": self._source, "variables": variables, "marked": marked, "seconds": MAX_SECONDS}
        )
        if answer.get("error") == LIMIT:
            raise ConfigError(f"the chat template {answer['message']} for one text; {_REMEDY}")
        if "error" in answer:
            kind = getattr(jinja2, answer["error"], None) or getattr(builtins, answer["error"], None)
            raise _make_error(kind, answer["message"])
        return answer


class _Environment:
    """The environment of a template as far as transformers uses one.

    Attributes:
        spans: the list that `activate_tracker` was given for the places of generated parts.
    """

    def __init__(self, source: str) -> None:
        self._source, self.spans = source, list[Any]()

    @contextmanager
    def activate_tracker(self, blocks: list[str], spans: list[Any]) -> Iterator[None]:
        """Context manager: collect the start and end of each generated part in ``spans``; ``blocks`` is for transformers' own."""
        self.spans = spans
        try:
            yield
        finally:
            self.spans = []

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the environment that transformers makes, for looking at a template without rendering it."""
        from transformers.utils import chat_template_utils

        return getattr(chat_template_utils._cached_compile_jinja_template(self._source).environment, name)


def _make_error(kind: Any, message: str) -> Exception:
    """Return an error of the rendering process: of its type or, if that takes more than a message, a TemplateError."""
    is_error = isinstance(kind, type) and issubclass(kind, Exception)
    try:
        return kind(message) if is_error else jinja2.TemplateError(message)
    except TypeError:  # a type with further arguments
        return jinja2.TemplateError(message)


_compile_limited = lru_cache(_LimitedTemplate)
