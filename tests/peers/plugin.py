"""A pytest plugin that runs another project's tests offline, on plain or on streamed models, and records each test.

It is imported as `peers.plugin`, from the folder `tests`, because the other project's tests are a package `tests`, too. Its settings
are environment variables, which `tests.peers.runner` sets:

    PEER_MODE      plain or streamed
    PEER_HUB       the folder of tests.peers.hub
    PEER_OUT       the file of results; tests that have a line there are not run again
    PEER_ONLY      results of the plain mode; only tests that passed there are run
    PEER_SHARE     percent of the tests to run, the same ones each time
    PEER_ALSO      a pattern; tests whose ids match are run whatever the share
    PEER_OPENS     1 if AutoModelForCausalLM of the tests opens streamed models
    PEER_STEPS     the steps of a training whose number of steps its test leaves open; 0 changes nothing
"""

import gc
import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_CACHE"] = os.environ["PEER_HUB"]
os.environ["HF_HUB_OFFLINE"] = "1"

from .kernelless_torchvision import import_torchvision

import_torchvision()  # before transformers looks for it

import datasets
import pytest
import torch
import transformers
from trl.trainer.base_config import _BaseConfig

from horizon_lm.errors import HorizonError

from . import stand_ins, streaming
from .suites import drawn

OUT = Path(os.environ["PEER_OUT"])
DATA = Path(os.environ["PEER_HUB"]) / "datasets_on_disk"
STEPS = int(os.environ.get("PEER_STEPS", "3"))
UNCOMPARED = (
    "runtime",
    "per_second",
    "flos",
    "step_time",
    "profiling",
    "mem",
)  # logged figures that are times or bytes

RUNS: list[dict[str, Any]] = []  # what each training of the present test left

torch.set_num_threads(1)
stand_ins.install()


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    done, passed = _outcomes(OUT), _outcomes(os.environ.get("PEER_ONLY"))
    share, also = int(os.environ.get("PEER_SHARE", "100")), os.environ.get("PEER_ALSO", "")
    collected = len(items)
    items[:] = [
        item
        for item in items
        if item.nodeid not in done
        and (not passed or passed.get(item.nodeid) == "passed")
        and drawn(item.nodeid, share, also)
    ]
    _write({"collected": collected, "share": share, "also": also})
    for module in {item.module for item in items}:
        stand_ins.allow_models_of(module)
        if os.environ["PEER_MODE"] == "streamed":
            streaming.patch(module, opens=os.environ.get("PEER_OPENS") == "1")


def pytest_collection_finish() -> None:
    gc.freeze()  # many tests collect garbage, and would walk all that was imported each time


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is left when the interpreter ends is a leak to triton's nanobind


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    RUNS.clear()
    streaming.COUNT = 0
    torch.manual_seed(0)


@pytest.fixture
def lazy_shared_datadir(request: pytest.FixtureRequest) -> Path:
    """Stand in for the fixture of pytest-datadir."""
    return Path(request.path).parent / "data"


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    report = (yield).get_result()
    if call.when == "setup":
        item.peer = {"id": item.nodeid, "outcome": "passed"}
    if report.outcome == "skipped":
        item.peer["outcome"] = "skipped"
    elif report.outcome == "failed" and item.peer["outcome"] == "passed":
        item.peer |= {"outcome": "failed" if call.when == "call" else "error", **_error(call.excinfo.value, report)}
    if call.when == "teardown":
        _write(item.peer | {"streamed": streaming.COUNT, "runs": RUNS})


def _error(error: BaseException, report: pytest.TestReport) -> dict[str, Any]:
    """Return the error of a test; if a test expected another one than Horizon-LM raised, Horizon-LM's."""
    ours = [each for each in (error, error.__context__) if isinstance(each, HorizonError)]
    shown = (ours or [error])[0]
    return {
        "error": type(shown).__name__,
        "message": str(shown)[:600],
        "rejected": bool(ours),
        "trace": str(report.longrepr)[-3000:],
    }


def _outcomes(path: Any) -> dict[str, str]:
    if not path or not Path(path).exists():
        return {}
    rows = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    return {row["id"]: row["outcome"] for row in rows if "id" in row}


def _write(row: dict[str, Any]) -> None:
    with OUT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


# ---- data sets of the hub, and trainings of which values can be compared ----

_load_dataset, _train = datasets.load_dataset, transformers.Trainer.train
_prepare, _prepare_trl = transformers.TrainingArguments.__post_init__, _BaseConfig.__post_init__


def load_dataset(
    path: Any, name: str | None = None, split: str | None = None, streaming: bool = False, **more: Any
) -> Any:
    """Load a data set of the hub's folder, and any other with `datasets.load_dataset`."""
    folder = DATA / str(path).replace("/", "--") / (name or "default")
    if not folder.exists():
        return _load_dataset(path, name, split=split, streaming=streaming, **more)
    data = datasets.load_from_disk(str(folder))
    if split is None:
        return (
            datasets.IterableDatasetDict({k: v.to_iterable_dataset() for k, v in data.items()}) if streaming else data
        )
    base, _, cut = split.partition("[")
    rows = data[base]
    if cut:  # "train[:5]" or "train[:20%]"
        end = cut.rstrip("]").lstrip(":")
        rows = rows.select(range(len(rows) * int(end[:-1]) // 100 if end.endswith("%") else int(end)))
    return rows.to_iterable_dataset() if streaming else rows


def train(self: Any, *arguments: Any, **more: Any) -> Any:
    """Train, and keep what was logged and the sum and norm of each parameter."""
    result = _train(self, *arguments, **more)
    logged = [
        {k: v for k, v in row.items() if isinstance(v, int | float) and not any(part in k for part in UNCOMPARED)}
        for row in self.state.log_history
    ]
    values = {name: param.detach().double() for name, param in self.model.named_parameters()}
    RUNS.append({"log": logged, "params": {k: [float(v.sum()), float(v.norm())] for k, v in values.items()}})
    return result


def prepare(self: Any) -> None:
    """Train for a few steps, unless the test says how many."""
    if STEPS and self.max_steps == -1:
        self.max_steps = STEPS
    _prepare(self)


def prepare_trl(self: Any) -> None:
    """Train in float32, where TRL would choose autocast to bfloat16."""
    if self.bf16 is None:
        self.bf16 = False
    _prepare_trl(self)


datasets.load_dataset = load_dataset
transformers.Trainer.train = train
transformers.TrainingArguments.__post_init__ = prepare
_BaseConfig.__post_init__ = prepare_trl
