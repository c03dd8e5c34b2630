"""The process that renders chat templates for `template_limits`: one request a line on stdin, one answer a line on stdout.

A template is a program of whoever made the model. Jinja's sandbox keeps it from files and from Python's internals, but not
from looping for ever or from filling the memory, which only the kernel can limit: hence a process of its own.
"""

import json
import math
import os
import resource
import signal
import sys
from datetime import datetime
from typing import Any

MAX_OUTPUT_CHARS = 2**25
MAX_BYTES = 2**30  # of memory, on top of what the interpreter takes
LIMIT = "limit"  # the kind of error for output and memory; others are names of exceptions


def serve() -> None:
    """Answer requests until stdin is closed.

    A request is a template, its variables, whether to mark generated text, and the seconds that rendering may take. The variable
    ``strftime_now`` is the date that the template's function of this name returns, instead of the clock's.
    """
    from transformers.utils import chat_template_utils

    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # workers ignore it, which this process would inherit
    _limit_memory()
    for line in sys.stdin:
        try:
            request = json.loads(line)
            _limit_seconds(request["seconds"])
            template = chat_template_utils._compile_jinja_template(request["template"])
            if date := request["variables"].get("strftime_now"):
                request["variables"]["strftime_now"] = datetime.fromisoformat(date).strftime
            answer = _render(template, request["variables"], request["marked"])
        except MemoryError:
            answer = {"error": LIMIT, "message": f"needs more than {MAX_BYTES >> 20:,} MiB of memory"}
        except Exception as error:  # a template is a program and may raise anything
            answer = {"error": type(error).__name__, "message": str(error)[:2000]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _render(template: Any, variables: dict[str, Any], marked: bool) -> dict[str, Any]:
    """Return the answer to a request: the text, and the start and end of each generated part in it if ``marked``."""
    blocks: list[str] = []
    spans: list[tuple[int, int]] = []  # filled by the tracker, which measures ``blocks`` at each mark
    length = 0
    with template.environment.activate_tracker(blocks, spans):
        for block in template.generate(**variables):
            blocks.append(block)
            length += len(block)
            if length > MAX_OUTPUT_CHARS:
                return {"error": LIMIT, "message": f"renders more than {MAX_OUTPUT_CHARS:,} characters"}
    return {"text": "".join(blocks), "spans": spans if marked else []}


def _limit_memory() -> None:
    """Let this process take `MAX_BYTES` more address space than now. Without ``/proc`` there is no limit."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            present_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    _set_limit(resource.RLIMIT_AS, present_bytes + MAX_BYTES)


def _limit_seconds(seconds: int) -> None:
    """Let the kernel end this process after some more seconds of CPU."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + seconds)


def _set_limit(kind: int, wanted: int) -> None:
    """Set the soft limit of a resource, but not above the hard one, which stays."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


if __name__ == "__main__":
    serve()
