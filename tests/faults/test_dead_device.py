"""A device that dies at any operation of a step, and stays dead, leaves the host's state whole: before the step, or after it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.units import OUTER, block
from horizon_lm.device.base import Task
from horizon_lm.device.cpu import CpuDevice, HostLink
from horizon_lm.device.faults import is_device_fault, is_out_of_device_memory
from horizon_lm.device.host_threads import HostPool, complete_updates
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.host.updates import PendingUpdates
from horizon_lm.errors import DeviceMemoryError, PartialUpdateError, StreamingError
from horizon_lm.schedule.ops import Kind, Op, Stream
from tests.support import tiny_models
from tests.support.dying_devices import Death, DyingThreaded, dying
from tests.support.thinned_cases import thinned
from tests.support.threaded_device import ThreadedDevice

DEVICES: dict[str, Callable[[Death], Any]] = {
    "inline": lambda death: dying(CpuDevice, death),
    "simulated": lambda death: dying(SimulatedDevice, death, seed=3, pieces=1),
    "late": lambda death: dying(SimulatedDevice, death, pieces=1, eagerness=0.0),
    "threaded": lambda death: DyingThreaded(death, delay=1e-5, pieces=1),
}
MODES: dict[str, dict[str, Any]] = {
    "normal": {"max_grad_norm": 0.5},
    "in_backward": {"update_in_backward": True, "moments": "8bit"},
    "muon": {"max_grad_norm": 0.5},
}
OPTIMIZERS: dict[str, Any] = {"muon": horizon_lm.Muon}  # AdamW in the other modes
# Some updates of a step have run, or need the device, when it dies. With Muon, they may run under the next forward pass.
PARTIAL_IN = {"normal": set[str](), "in_backward": {"backward", "update"}, "muon": {"update", "forward"}}
STEPS = (1, 2, 3)  # the device may die in the last two


@dataclass
class Run:
    """A tiny model in training, and the stage of the step that it is in."""

    model: Any
    optimizer: Any
    stage: str = ""
    finished: int = 0

    @classmethod
    def make(cls, device: Any, mode: str) -> "Run":
        model = tiny_models.build("llama", num_hidden_layers=2)
        streamed = horizon_lm.stream(model, device, precision="fp32_master", activation_checkpoints="host")
        return cls(streamed, OPTIMIZERS.get(mode, horizon_lm.AdamW)(streamed, lr=1e-2, **MODES[mode]))

    def step(self) -> None:
        self.stage = "forward"
        loss = self.model(**tiny_models.batch(seed=self.finished)).loss
        self.stage = "backward"
        loss.backward()
        self.stage = "update"
        self.optimizer.step()
        self.finished += 1
        self.optimizer.zero_grad()

    def state(self) -> dict[str, bytes]:
        """Return every byte of the weights and the optimizer's state, read from host memory without a wait."""
        kept: dict[str, bytes] = {"steps": repr([float(s["step"]) for s in self.optimizer.state.values()]).encode()}
        for slab, arrays in self.optimizer._updates.arrays.items():
            moments = [array for each in arrays.moments.values() for array in (each.values, each.scales)]
            for number, array in enumerate((arrays.weights, arrays.low, *moments)):
                kept[f"{slab.name}.{number}"] = array.tobytes()
        return kept


Expected = tuple[str, list[dict[str, bytes]]]


@pytest.fixture(scope="module", params=list(MODES))
def expected(request: pytest.FixtureRequest) -> Expected:
    """Return a mode, and the state after 0, 1, 2 and 3 steps in it."""
    run = Run.make("cpu", request.param)
    states = [run.state()]
    for _ in STEPS:
        run.step()
        horizon_lm.synchronize(run.model)
        states.append(run.state())
    return request.param, states


def killed(kind: str, mode: str, at: int) -> tuple[Run, Death]:
    """Return a run whose device died at an operation after the first step; it may have survived all steps."""
    death = Death()
    run = Run.make(DEVICES[kind](death), mode)
    run.step()
    death.arm(at)
    try:
        for _ in STEPS[1:]:
            run.step()
    except Exception as error:
        if not is_device_fault(error):
            raise
    return run, death


def deaths(kind: str, mode: str, first: int = 0, stride: int = 1) -> Iterator[tuple[Run, Death]]:
    """Yield a run killed at each operation, or at every ``stride``-th one, until one survives."""
    for at in range(first, 10**6, stride):
        run, death = killed(kind, mode, at)
        if not death.killed_by:
            return
        yield run, death


def outcome(run: Run, death: Death, mode: str, states: list[dict[str, bytes]]) -> str:
    """Settle a killed run without its device. Return ``before``, ``after`` or ``partial``; fail for any other state."""
    where = f"{death.killed_by} in {run.stage} of step {run.finished + 1}"
    try:
        run.model._horizon.engine.settle_without_device()
    except PartialUpdateError:
        assert run.stage in PARTIAL_IN[mode], where
        return "partial"
    counted = run.optimizer.num_steps - run.finished
    assert counted in (0, 1), where
    assert run.state() == states[run.optimizer.num_steps], where
    return "after" if counted else "before"


def require_whole(kind: str, mode: str, states: list[dict[str, bytes]], **which: int) -> None:
    outcomes = Counter(outcome(run, death, mode, states) for run, death in deaths(kind, mode, **which))
    print(kind, mode, dict(outcomes))
    assert outcomes["before"] > 5
    assert bool(outcomes["partial"]) == bool(PARTIAL_IN[mode])


@pytest.mark.parametrize("kind", thinned(DEVICES, every=4, keep=["threaded"]))
def test_a_death_at_some_operations(kind: str, expected: Expected) -> None:
    require_whole(kind, *expected, first=list(DEVICES).index(kind), stride=13)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(DEVICES))
def test_a_death_at_every_operation(kind: str, expected: Expected) -> None:
    require_whole(kind, *expected)


def late_run(mode: str = "normal") -> tuple[Run, Death]:
    """Return a run whose device dies in the forward after a step, when none of the step's updates has run."""
    death = Death()
    run = Run.make(DEVICES["late"](death), mode)
    run.step()
    death.arm(0)
    with pytest.raises(torch.AcceleratorError):
        run.model(**tiny_models.batch())
    return run, death


@pytest.mark.parametrize("expected", ["normal", "in_backward"], indirect=True)  # complete without the device
def test_without_the_pending_updates_the_state_is_neither(expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: updates that are dropped instead of completed leave a step that counts, and weights without it."""
    mode, states = expected
    run, _ = late_run(mode)
    monkeypatch.setattr(PendingUpdates, "complete_without_device", lambda self: None)
    run.model._horizon.engine.settle_without_device()
    assert run.optimizer.num_steps == 1
    assert run.state() != states[1]


@pytest.mark.parametrize("expected", ["normal", "in_backward"], indirect=True)  # complete without the device
def test_a_settled_model_can_be_read_but_not_run(expected: Expected) -> None:
    mode, states = expected
    run, death = late_run(mode)
    engine = run.model._horizon.engine
    engine.settle_without_device()
    engine.settle_without_device()
    asked = death.count
    weights, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    assert death.count == asked, "reading asked the device for something"
    assert run.state() == states[1]
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert optimizer["step"] == 1
    with pytest.raises(StreamingError, match="device has failed"):
        run.model(**tiny_models.batch())
    with pytest.raises(StreamingError):
        run.optimizer.step()


def test_a_step_counts_once_its_updates_are_to_be_issued() -> None:
    """A device that dies while the updates are being issued has not lost the step."""
    whole = Run.make("cpu", "normal")
    whole.step()
    horizon_lm.synchronize(whole.model)
    death = Death()
    run = Run.make(DEVICES["inline"](death), "normal")
    device, issued = run.model._horizon.engine.device, list[Task]()
    issue = device.issue

    def issue_and_die(task: Task) -> None:
        issued.append(task)
        if [each.op.kind for each in issued].count(Kind.UPDATE) == 2:
            death.arm(0)
        issue(task)

    device.issue = issue_and_die
    with pytest.raises(torch.AcceleratorError):
        run.step()
    assert run.optimizer.num_steps == 1
    run.model._horizon.engine.settle_without_device()
    assert run.state() == whole.state()


def test_an_update_that_fails_half_way_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = late_run()
    engine = run.model._horizon.engine

    def fail(number: int) -> None:
        raise OSError("bad memory")

    for task in engine.updates._running[1:]:
        monkeypatch.setattr(task.moves, "_function", fail)
    for _ in range(2):
        with pytest.raises(PartialUpdateError, match="bad memory"):
            engine.settle_without_device()


class _Mark:
    """A move that is recorded when it runs, and may then wait."""

    host_bytes = 0

    def __init__(self, ran: list[str], name: str, gate: threading.Event | None = None) -> None:
        self._ran, self._name, self._gate, self.started = ran, name, gate, threading.Event()

    def run(self, link: Any) -> None:
        self.started.set()
        if self._gate is not None:
            self._gate.wait()
        self._ran.append(self._name)

    def split(self, parts: int) -> list[Any]:
        return [self]


def _task(*moves: Any) -> Task:
    return Task(Op(Kind.UPDATE, block(0), Stream.HOST), [], list(moves))


def test_a_thread_that_waits_for_the_device_stops_no_update() -> None:
    """The pool's first task waits for an event that a dead device never reaches; its moves run all the same."""
    never, waits, ran = threading.Event(), threading.Event(), list[str]()

    def wait_for_device() -> None:
        waits.set()
        never.wait()

    pool = HostPool(2, 2, HostLink())
    stuck, behind = _task(_Mark(ran, "stuck")), _task(_Mark(ran, "behind"))
    pool.submit(stuck, wait_for_device)
    pool.submit(behind)
    waits.wait()
    complete_updates([stuck, behind], pool)
    assert ran == ["stuck", "behind"]
    with pytest.raises(StreamingError, match="will not run"):
        pool.wait([behind])
    never.set()


def test_completing_waits_for_a_move_that_runs() -> None:
    gate, ran = threading.Event(), list[str]()
    move = _Mark(ran, "running", gate)
    pool = HostPool(1, 1, HostLink())
    pool.submit(_task(move))
    move.started.wait()
    threading.Timer(0, gate.set).start()
    complete_updates([_task(_Mark(ran, "after"))], pool)
    assert ran == ["running", "after"]


@pytest.mark.parametrize(
    ("error", "fault", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True, True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True, False),
        (torch.AcceleratorError("CUDA error: out of memory"), True, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), True, False),
        (RuntimeError("CUDA driver error: unknown error"), True, False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True, False),
        (DeviceMemoryError("cpu: 2.0 MiB for head_weights do not fit"), True, True),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), False, False),
        (PartialUpdateError("an update was not completed (AcceleratorError: CUDA error: unknown)"), False, False),
        (MemoryError(), False, False),
        (ValueError("CUDA error"), False, False),
        (KeyboardInterrupt(), False, False),
    ],
)
def test_device_faults_are_told_apart(error: BaseException, fault: bool, memory: bool) -> None:
    assert is_device_fault(error) is fault
    assert is_out_of_device_memory(error) is memory


def test_cudas_own_code_tells_a_failed_allocation() -> None:
    error = torch.AcceleratorError("CUDA error: something new")
    error.error_code = 2  # type: ignore[attr-defined]
    assert is_out_of_device_memory(error)


def test_a_failed_landing_is_an_error_to_its_update_and_to_the_step() -> None:
    """An update in a backward waits for its gradient in a thread. The error that it finds there must not end with it."""
    device = ThreadedDevice(delay=0.0)
    run = Run.make(device, "in_backward")
    run.step()
    engine = run.model._horizon.engine
    outer = engine.store.units[OUTER].grad_layout.numel
    link = device.links[Stream.COPY_OUT]
    land = link.land

    def fail_at_the_end(destination: torch.Tensor, source: torch.Tensor, add: bool) -> Any:
        if destination.numel() == outer:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return land(destination, source, add)

    link.land = fail_at_the_end
    run.model(**tiny_models.batch()).loss.backward()
    with pytest.raises(torch.AcceleratorError):
        device._pool(Stream.HOST).wait()  # the update's thread has met the error
    with pytest.raises(torch.AcceleratorError):
        run.optimizer.step()
    assert run.optimizer.num_steps == 1
    with pytest.raises(PartialUpdateError):
        engine.settle_without_device()
