"""Run cases of many model types, several in parallel."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tests.census.cases import cases_of
from tests.census.opening import OPENED
from tests.census.tiny_models import model_types
from tests.census.worker import Worker

Task = tuple[str, str]  # a mapping and a model type


def tasks_of(mappings: Sequence[str], types: Sequence[str] | None, shard: str) -> list[Task]:
    """Return the model types of some mappings. ``shard``: ``1/4`` for the first of every four."""
    index, count = (int(part) for part in shard.split("/"))
    return [(m, t) for m in mappings for t in model_types(m) if types is None or t in types][index - 1 :: count]


def run(tasks: Sequence[Task], cases: Sequence[str] | None, jobs: int, timeout: float) -> Iterator[tuple[Task, Any]]:
    """Yield the result of each task when it is finished. ``cases``: None for all; ``timeout``: seconds for one case."""
    local, workers = threading.local(), []

    def work(task: Task) -> tuple[Task, Any]:
        if not hasattr(local, "worker"):
            local.worker = Worker(timeout)
            workers.append(local.worker)
        result = local.worker.run(*task, "model")
        wanted = [case for case in cases_of(task[0]) if cases is None or case in cases]
        wanted += [case for case in cases or () if case in OPENED]  # only on request
        wanted = wanted if result["status"] == "built" else []
        result["cases"] = {case: local.worker.run(*task, case) for case in wanted}
        return task, result

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(work, task) for task in tasks]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
            for worker in workers:
                worker.close()


def summary(result: dict[str, Any]) -> str:
    """Return the outcome of a type in one line."""
    if result["status"] != "built":
        return f"{result['status']}: {result.get('detail')}"
    cases = result["cases"].items()
    said = [f"{name} {each['status']}" for name, each in cases if each["status"] in ("wrong", "crashed")]
    rejected = sum(each["status"] == "rejected" for _, each in cases)
    said = (said or ["nothing wrong"]) + [f"{rejected} rejected"] * bool(rejected)
    return f"{', '.join(said)} ({sum(each['seconds'] for _, each in cases):.0f} s)"
