"""Run cases in worker processes, so that a crash or a hang of one does not end the others."""

import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from typing import Any

from tests.census.cases import cases_of, run_case
from tests.census.subject import Subject
from tests.census.tiny_models import CannotBuildError, describe_model, model_types

TASKS_PER_WORKER = 600  # a worker grows; then a fresh one goes on


def worker() -> None:
    """Read tasks from stdin, one JSON list a line, and answer each with a line of JSON."""
    import transformers

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever models print goes elsewhere
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
    """A process that runs cases; started anew when it crashed, hung or has run long."""

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
        process, timeout = self._process, self._timeout + (60 if self._tasks == 1 else 0)  # imports take their time
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


def run(
    mappings: list[str], types: list[str] | None, cases: list[str] | None, shard: str, jobs: int, timeout: float
) -> dict[str, Any]:
    """Run the census, with progress on stderr. Returns results by mapping and model type."""
    index, count = (int(part) for part in shard.split("/"))
    wanted = [(m, t) for m in mappings for t in model_types(m) if types is None or t in types][index - 1 :: count]
    tasks: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for task in wanted:
        tasks.put(task)
    results: dict[str, Any] = {mapping: {} for mapping in mappings}

    def work() -> None:
        each = Worker(timeout)
        while True:
            try:
                mapping, model_type = tasks.get_nowait()
            except queue.Empty:
                each.close()
                return
            result = each.run(mapping, model_type, "model")
            result["cases"] = {}
            if result["status"] == "built":
                result["cases"] = {case: each.run(mapping, model_type, case) for case in _cases(mapping, cases)}
            results[mapping][model_type] = result
            done = sum(len(r) for r in results.values())
            print(f"[{done}/{len(wanted)}] {mapping} {model_type}: {_summary(result)}", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _cases(mapping: str, wanted: list[str] | None) -> list[str]:
    return [name for name in cases_of(mapping) if wanted is None or name in wanted]


def _summary(result: dict[str, Any]) -> str:
    if result["status"] != "built":
        return f"{result['status']}: {result.get('detail')}"
    others = [f"{name} {r['status']}" for name, r in result["cases"].items() if r["status"] in ("wrong", "crashed")]
    rejected = sum(r["status"] == "rejected" for r in result["cases"].values())
    seconds = sum(r["seconds"] for r in result["cases"].values())
    said = others or ["nothing wrong"]
    return f"{', '.join(said + [f'{rejected} rejected'] * bool(rejected))} ({seconds:.0f} s)"
