"""After a fault at any operation of any pass, all buffers are free, and the next step equals that of an undisturbed
run.
"""

import itertools
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.host.host_grads import HostGrads
from horizon_lm.engine.passes import forward_pass
from horizon_lm.errors import PartialUpdateError, StreamingError
from horizon_lm.schedule.ops import Kind
from tests.support import tiny_models
from tests.support.thinned_cases import thinned
from tests.support.training_steps import step, weights


class InjectedError(Exception):
    pass


class Fuse:
    """A fuse that raises an error once, at the n-th operation given to a device."""

    def __init__(self, error: type[BaseException] = InjectedError) -> None:
        self.at: int | None = None
        self.count = 0
        self.blown_at: str | None = None
        self.error = error

    def arm(self, at: int) -> None:
        self.at, self.count, self.blown_at = at, 0, None

    def pass_by(self, what: str) -> None:
        if self.at is not None and self.count == self.at:
            self.at, self.blown_at = None, what
            raise self.error(what)
        self.count += 1


def fused(base: type[CpuDevice], fuse: Fuse, **options: Any) -> CpuDevice:
    """Return a device whose computations and copies are counted by the fuse."""

    class Fused(base):  # type: ignore[misc, valid-type]
        def begin(self, task: Any) -> None:
            fuse.pass_by(f"before {task.op}")
            super().begin(task)

        def end(self, task: Any) -> None:
            fuse.pass_by(f"inside {task.op}")
            super().end(task)

        def issue(self, task: Any) -> None:
            if base is CpuDevice:
                fuse.pass_by(f"{task.op}")
            super().issue(task)

        def _run_piece(self, queue: Any) -> None:
            fuse.pass_by(f"{queue[0].task.op}")
            super()._run_piece(queue)

    return Fused(**options)


def make(device: Any) -> tuple[Any, Any]:
    model = horizon_lm.stream(
        tiny_models.build("llama"),
        device,
        precision="float32",
        activation_checkpoints="host",
        device_micro_batch_size=2,
    )
    return model, horizon_lm.AdamW(model, lr=1e-2, max_grad_norm=0.5)


@pytest.mark.parametrize("head", ["chunked", "whole"])
def test_a_failed_forward_pass_takes_nothing_from_one_before(head: str) -> None:
    """The gradients of the head that a forward pass has computed stay its own, until its backward pass."""

    def gradients(fails: bool) -> list[torch.Tensor]:
        model = horizon_lm.stream(tiny_models.build("llama"), "cpu", precision="float32", head=head)
        first = model(**tiny_models.batch(seed=1)).loss
        if fails:
            hook = model.model.layers[1].register_forward_hook(_fail)
            with pytest.raises(InjectedError):
                model(**tiny_models.batch(seed=2))
            hook.remove()
        later = model(**tiny_models.batch(seed=3)).loss
        first.backward()
        assert later.grad_fn is not None
        return [param.grad.clone() for param in model.parameters()]

    assert all(map(torch.equal, gradients(fails=True), gradients(fails=False)))


def _fail(*_: Any) -> None:
    raise InjectedError


def test_a_pass_that_fails_before_its_first_copy_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make("cpu")
    step(model, optimizer, 1)
    engine = model._horizon.engine
    monkeypatch.setattr(forward_pass, "split_batches", _fail)
    with pytest.raises(InjectedError) as caught:
        model(**tiny_models.batch())
    monkeypatch.undo()
    assert caught.value.__traceback__ is not None  # which keeps the pass alive
    assert engine.running.forward is None
    assert engine.between.graphs_lease.holder is None
    assert not engine.between.awaits_backward()
    step(model, optimizer, 2)


def assert_idle(model: Any) -> None:
    engine = model._horizon.engine
    assert not engine.cursor.active
    assert engine.running.forward is None
    assert engine.between.head_grads_lease.holder is None
    free = [buffer.numel() for of_list in engine.boundaries._free.values() for buffer, _ in of_list]
    taken = engine.boundaries.num_bytes - sum(free)
    assert taken == 0, f"{taken} bytes of boundaries are still taken"


@pytest.fixture(scope="module")
def undisturbed() -> tuple[float, float, list[torch.Tensor]]:
    model, optimizer = make("cpu")
    return step(model, optimizer, 1), step(model, optimizer, 2), weights(model)


def _operations_of_a_step(base: type[CpuDevice]) -> int:
    fuse = Fuse()
    model, optimizer = make(fused(base, fuse))
    step(model, optimizer, 1)
    fuse.arm(10**9)
    step(model, optimizer, 2)
    return fuse.count


@pytest.mark.parametrize(
    ("base", "error"),
    thinned(itertools.product((CpuDevice, SimulatedDevice), (KeyboardInterrupt, InjectedError))),
    ids=lambda each: each.__dict__.get("name", each.__name__),
)
def test_a_fault_at_every_operation(
    base: type[CpuDevice], error: type[BaseException], undisturbed: tuple[float, float, list[torch.Tensor]]
) -> None:
    blown = set()
    for at in range(_operations_of_a_step(base)):
        fuse = Fuse(error)
        model, optimizer = make(fused(base, fuse))
        assert step(model, optimizer, 1) == undisturbed[0]
        fuse.arm(at)
        updated: list[bool] = []
        with pytest.raises(error):
            step(model, optimizer, 2, updated)
        assert fuse.blown_at is not None
        blown.add(fuse.blown_at)
        if updated:
            optimizer.zero_grad()  # the fault was in the update, which continues where it stopped
        else:
            assert_idle(model)
            if model._horizon.engine.grads.invalid:
                with pytest.raises(StreamingError, match="zero_grad"):
                    optimizer.step()
            else:
                optimizer.step()  # the fault was in the forward pass: there are no gradients, so the step does nothing
            optimizer.zero_grad()
            assert step(model, optimizer, 2) == undisturbed[1]
        for got, expected in zip(weights(model), undisturbed[2], strict=True):
            assert torch.equal(got, expected), fuse.blown_at
    print(f"{base.name}: faults at {len(blown)} different places, all recovered")
    assert {kind for kind in Kind if any(str(kind) in place for place in blown)} >= {
        Kind.STREAM_IN, Kind.FORWARD, Kind.OFFLOAD, Kind.FETCH, Kind.BACKWARD, Kind.STREAM_OUT, Kind.UPDATE,
    }  # fmt: skip


@pytest.mark.parametrize("base", thinned([CpuDevice, SimulatedDevice]))
def test_a_fault_at_every_operation_of_an_update_in_backward(base: type[CpuDevice]) -> None:
    """A fault before the first update loses nothing; a later fault leaves a partial update, which every use reports."""

    def made(device: Any) -> tuple[Any, Any]:
        model = horizon_lm.stream(
            tiny_models.build("llama"), device, precision="float32", activation_checkpoints="host"
        )
        return model, horizon_lm.AdamW(model, lr=1e-2, update_in_backward=True)

    model, optimizer = made("cpu")
    expected = step(model, optimizer, 1), step(model, optimizer, 2), weights(model)
    fuse = Fuse()
    model, optimizer = made(fused(base, fuse))
    step(model, optimizer, 1)
    fuse.arm(10**9)
    step(model, optimizer, 2)
    outcomes = {"partial": 0, "recovered": 0}
    for at in range(fuse.count):
        again = Fuse()
        model, optimizer = made(fused(base, again))
        assert step(model, optimizer, 1) == expected[0]
        again.arm(at)
        with pytest.raises(InjectedError):
            step(model, optimizer, 2)
        if optimizer.partial_update:
            outcomes["partial"] += 1
            with pytest.raises(PartialUpdateError):
                step(model, optimizer, 2)
            continue
        outcomes["recovered"] += 1
        assert_idle(model)
        optimizer.zero_grad()
        assert step(model, optimizer, 2) == expected[1]
        assert all(torch.equal(a, b) for a, b in zip(weights(model), expected[2], strict=True)), again.blown_at
    print(f"{base.name}, update in backward: {outcomes}")
    assert min(outcomes.values()) > 5


def test_a_copy_that_fails_half_way(monkeypatch: pytest.MonkeyPatch, undisturbed: Any) -> None:
    device = SimulatedDevice(3)
    model, optimizer = make(device)
    step(model, optimizer, 1)
    original, calls = device.link.copy, iter(range(100))

    def failing(destination: torch.Tensor, source: torch.Tensor) -> None:
        if next(calls) == 25:
            raise InjectedError
        original(destination, source)

    monkeypatch.setattr(device.link, "copy", failing)
    with pytest.raises(InjectedError):
        step(model, optimizer, 2)
    monkeypatch.undo()
    assert_idle(model)
    optimizer.zero_grad()
    assert step(model, optimizer, 2) == undisturbed[1]
    assert all(torch.equal(a, b) for a, b in zip(weights(model), undisturbed[2], strict=True))


def test_zero_grad_empties_gradients_whose_landing_fails(undisturbed: Any) -> None:
    fuse = Fuse()
    model, optimizer = make(fused(SimulatedDevice, fuse, eagerness=0.0))
    step(model, optimizer, 1)
    model(**tiny_models.batch(seed=2)).loss.backward()
    fuse.arm(0)
    with pytest.raises(InjectedError, match=Kind.STREAM_OUT):
        optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    assert step(model, optimizer, 2) == undisturbed[1]
    assert all(torch.equal(a, b) for a, b in zip(weights(model), undisturbed[2], strict=True))


def test_a_fault_inside_an_update_leaves_a_partial_update(monkeypatch: pytest.MonkeyPatch) -> None:
    from horizon_lm.optim import update_tasks

    model, optimizer = make("cpu")
    step(model, optimizer, 1)
    calls = iter(range(100))

    def failing_kernel(*modes: str) -> Any:
        def failing(*args: Any) -> None:
            update_kernel(*modes)(*args)
            if next(calls) == 3:
                raise InjectedError

        return failing

    update_kernel = update_tasks.update_kernel
    monkeypatch.setattr(update_tasks, "update_kernel", failing_kernel)
    step(model, optimizer, 2)
    with pytest.raises((InjectedError, PartialUpdateError)):  # raised in a thread, and again at the next use
        model(**tiny_models.batch())
    monkeypatch.undo()
    for use in (lambda: model(**tiny_models.batch()), optimizer.step, model.state_dict):
        with pytest.raises(PartialUpdateError):
            use()


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_fault_at_the_end_of_a_backward_pass(monkeypatch: pytest.MonkeyPatch, in_backward: bool) -> None:
    """The end is called by autograd, outside of all nodes. Ranks exchange there what has landed, and a rank may be gone."""

    def fail(*arguments: Any) -> None:
        raise InjectedError

    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=in_backward)
    step(model, optimizer, 1)
    owner, name = (horizon_lm.AdamW, "table") if in_backward else (HostGrads, "publish")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(InjectedError):
            step(model, optimizer, 2)
    assert_idle(model)
    assert optimizer.partial_update == in_backward
    with pytest.raises(PartialUpdateError if in_backward else StreamingError):
        optimizer.step()
    if not in_backward:
        optimizer.zero_grad()
        step(model, optimizer, 2)


def test_a_fault_in_foreign_code_between_blocks(undisturbed: Any) -> None:
    model, optimizer = make("cpu")
    step(model, optimizer, 1)

    def hook(*_: Any) -> None:
        raise InjectedError

    handle = model.model.layers[1].register_forward_hook(hook)
    with pytest.raises(InjectedError):
        model(**tiny_models.batch(seed=2))
    handle.remove()
    assert_idle(model)
    optimizer.zero_grad()
    assert step(model, optimizer, 2) == undisturbed[1]


def test_a_second_backward_pass_is_rejected() -> None:
    model, _ = make("cpu")
    loss = model(**tiny_models.batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(StreamingError, match="second time"):
        loss.backward()


def test_a_backward_pass_after_an_update_is_rejected() -> None:
    model, optimizer = make("cpu")
    late = model(**tiny_models.batch(seed=3)).loss
    step(model, optimizer, 1)
    with pytest.raises(StreamingError, match="changed between"):
        late.backward()


def test_double_backward_is_rejected() -> None:
    model, _ = make("cpu")
    with pytest.raises(StreamingError, match="create_graph"):
        model(**tiny_models.batch()).loss.backward(create_graph=True)
