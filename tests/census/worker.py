"""A process that runs cases, so that a crash or hang in one case does not end the others."""

import json
import os
import select
import subprocess
import sys
import time
from typing import Any

from tests.census.cases import run_case
from tests.census.subject import Subject
from tests.census.tiny_models import CannotBuildError, describe_model

TASKS_PER_WORKER = 600  # the memory of a worker grows, so it is replaced by a fresh one


def serve() -> None:
    """Read tasks from stdin, one JSON list per line, and answer each of them with a line of JSON."""
    import transformers

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # models may print, but stdout is only for answers
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    subject = Subject("", "")
    for line in sys.stdin:
        mapping, model_type, case = json.loads(line)
        if (mapping, model_type) != (subject.mapping, subject.model_type):
            subject = Subject(mapping, model_type)
        started = time.monotonic()
        if case == "model":
            answer = _describe(subject)
        else:
            outcome = run_case(subject, case)
            answer = {"status": outcome.status, "detail": outcome.detail}
        answer["seconds"] = round(time.monotonic() - started, 2)
        print(json.dumps(answer), file=answers, flush=True)


def _describe(subject: Subject) -> dict[str, Any]:
    try:
        return {"status": "built", **describe_model(subject.model)}
    except CannotBuildError as error:
        return {"status": "cannot_build", "detail": str(error)}


class Worker:
    """A process that runs cases; it is restarted after a crash, a hang, or many cases."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._process, self._tasks = timeout, None, 0  # type: ignore[var-annotated]

    def run(self, mapping: str, model_type: str, case: str) -> dict[str, Any]:
        if self._process is None or self._tasks >= TASKS_PER_WORKER:
            self.close()
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.census", "worker"], env=environment, text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._tasks = 0
        self._tasks += 1
        process, timeout = self._process, self._timeout + (60 if self._tasks == 1 else 0)  # imports take some time
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([mapping, model_type, case]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], timeout)
        line = process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        if ready:
            process.wait(10)
        self.close()
        code = process.returncode
        detail = f"no answer in {self._timeout:.0f} s" if not ready else f"the process ended with code {code}"
        return {"status": "crashed", "detail": detail, "seconds": self._timeout}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
