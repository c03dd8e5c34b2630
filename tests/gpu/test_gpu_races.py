"""The race tests of the simulated device on real streams: late copies change results only if a wait is missing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from horizon_lm.device.async_device import StreamDevice
from horizon_lm.device.base import Task
from horizon_lm.errors import StreamingError
from horizon_lm.schedule.ops import Stream
from tests.gpu.accelerator import Accelerator
from tests.support.pass_sequences import SETTINGS, Result, same, train

pytestmark = pytest.mark.gpu

LATE = 1e-3  # seconds of delay before each copy
# Kernels without atomics, whose results are bit-equal in every run.
EXACT: dict[str, Any] = {"attn_implementation": "eager", "compile": False}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def known() -> dict[str, Result]:
    return {}


def _expected(accelerator: Accelerator, known: dict[str, Result], name: str, **options: Any) -> Result:
    if name not in known:
        known[name] = train(accelerator.open(), **options)
    return known[name]


@pytest.mark.parametrize("slow", [[Stream.COPY_IN], [Stream.COPY_OUT], None], ids=["in", "out", "both"])
@pytest.mark.parametrize("name", SETTINGS)
def test_late_copies_change_nothing(
    accelerator: Accelerator, known: dict[str, Result], name: str, slow: list[Stream] | None
) -> None:
    options = SETTINGS[name] | EXACT | {"precision": "fp32_master"}
    expected = _expected(accelerator, known, name, **options)
    assert same(train(accelerator.slowed(1, LATE, slow), **options), expected)


@pytest.mark.parametrize(
    ("waiting", "for_"),
    [
        (Stream.COMPUTE, Stream.COPY_IN), (Stream.COMPUTE, Stream.COPY_OUT), (Stream.COPY_IN, Stream.COPY_OUT),
        (Stream.COPY_OUT, Stream.COMPUTE), (Stream.COPY_IN, Stream.COMPUTE),
    ],
)  # fmt: skip
def test_a_missing_wait_changes_results(
    accelerator: Accelerator, waiting: Stream, for_: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: one stream does not wait for another."""
    if for_ == Stream.COMPUTE and not accelerator.is_cuda:
        pytest.skip("threads compute immediately, so this wait never blocks")
    options = {"activation_checkpoints": "host", "precision": "float32"} | EXACT
    expected = train(accelerator.open(), **options)
    order = StreamDevice._await_dependencies

    def careless(self: StreamDevice, stream: Any, task: Task) -> None:
        if task.op.stream == waiting:
            task.waits = [other for other in task.waits if other.op.stream != for_]
        if for_ == Stream.COMPUTE and stream is None:
            torch.cuda._sleep(1_000_000)  # delay computation
        order(self, stream, task)

    monkeypatch.setattr(StreamDevice, "_await_dependencies", careless)
    slow = [for_] if for_ != Stream.COMPUTE else []
    # On an H100, Python took longer than 4 ms from an offload to its fetch, so the copy was done without the wait, too.
    seconds = (50 if accelerator.is_cuda else 4) * LATE
    for seed in range(4):
        try:
            if not same(train(accelerator.slowed(seed, seconds, slow), expected, **options), expected):
                return
        except (ArithmeticError, StreamingError):
            return
    raise AssertionError(f"{waiting} did not wait for {for_}, and the results are unchanged")
