"""Muon equals torch's, with AdamW for all but hidden matrices, and has what AdamW has: modes, resume, ranks, bytes of the plan."""

import copy
import threading
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.units import HEAD, OUTER, block
from horizon_lm.device.base import Task
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.errors import ConfigError, PartialUpdateError
from horizon_lm.optim.muon import orthogonalize
from horizon_lm.schedule import between, build
from horizon_lm.schedule.ops import After, Kind, Schedule, ScheduleError, Stream, Wait
from tests.support import tiny_models
from tests.support.schedule_proofs import each_wait, without_wait
from tests.support.threaded_device import ThreadedDevice
from tests.support.training_steps import feed, masters, train

HYPER = {"lr": 1e-3, "momentum": 0.9, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def streamed(precision: str = "float32", model_type: str = "llama", **options: Any) -> tuple[Any, Any]:
    model = horizon_lm.stream(tiny_models.build(model_type), precision=precision)
    return model, horizon_lm.Muon(model, **(HYPER | options))


def matrices_of(model: Any) -> set[str]:
    return set(model._horizon.engine.parts.hidden_matrices())


def torch_optimizers(model: Any, matrices: set[str]) -> list[torch.optim.Optimizer]:
    """Return torch's Muon for the matrices of hidden layers, and torch's AdamW for the others."""
    hidden = [param for name, param in model.named_parameters() if name in matrices]
    others = [param for name, param in model.named_parameters() if name not in matrices]
    settings = {name: HYPER[name] for name in ("lr", "weight_decay")}
    return [
        torch.optim.Muon(hidden, momentum=HYPER["momentum"], adjust_lr_fn="match_rms_adamw", **settings),
        torch.optim.AdamW(others, betas=HYPER["betas"], eps=HYPER["eps"], **settings),
    ]


def test_twenty_steps_equal_torch() -> None:
    model, optimizer = streamed()
    reference = tiny_models.build("llama")
    start, matrices = copy.deepcopy(reference.state_dict()), matrices_of(model)
    assert len(matrices) == 7 * 3
    for each, optimizers in ((reference, torch_optimizers(reference, matrices)), (model, [optimizer])):
        # A step of ours leaves no gradients.
        feed(each, optimizers, 20, lambda each=each: each(**tiny_models.batch()).loss.backward())
    for name, master in masters(model).items():
        theirs = reference.get_parameter(name).detach()
        torch.testing.assert_close(master, theirs, rtol=0, atol=1e-6)
        assert (theirs - start[name]).abs().max() > 5 * HYPER["lr"]


@pytest.mark.parametrize("norm", [0.01, 1.0])
def test_clipped_steps_equal_torch(norm: float) -> None:
    """Clipping makes gradients smaller, and not the orthogonalized matrices that weights move along."""
    model, optimizer = streamed(max_grad_norm=norm)
    reference = tiny_models.build("llama")
    start, matrices = copy.deepcopy(reference.state_dict()), matrices_of(model)
    theirs = torch_optimizers(reference, matrices)
    for seed in range(3):
        for each, optimizers in ((reference, theirs), (model, [optimizer])):
            each(**tiny_models.batch(seed=seed)).loss.backward()
            if each is reference:
                assert torch.nn.utils.clip_grad_norm_(each.parameters(), norm) > 2 * norm
            for one in optimizers:
                one.step()
                one.zero_grad()
    for name, master in masters(model).items():
        moved, expected = (each.detach() - start[name] for each in (master, reference.get_parameter(name)))
        assert (moved - expected).norm() < 0.05 * expected.norm(), name


@pytest.mark.parametrize("shape", [(3, 40, 24), (3, 24, 40)])
def test_experts_are_orthogonalized_one_by_one(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.randn(shape, generator=generator)
    single, split = [each.clone() for each in experts], experts.clone()
    orthogonalize(experts)
    for each in single:
        orthogonalize(each)
        values = torch.linalg.svdvals(each)
        assert values.min() > 0.5
        assert values.max() < 1.5
    torch.testing.assert_close(torch.stack(single), experts, rtol=0, atol=0.02)
    monkeypatch.setattr("horizon_lm.optim.muon.ORTHOGONALIZED_AT_ONCE", 2 * experts[0].numel())
    orthogonalize(split)
    torch.testing.assert_close(split, experts, rtol=0, atol=0.02)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "gpt2"])
def test_matrices_of_other_models(model_type: str) -> None:
    model, optimizer = streamed(model_type=model_type)
    hidden = matrices_of(model)
    shapes = {name: param.ndim for name, param in model.named_parameters()}
    assert {shapes[name] for name in hidden} == ({2} if model_type == "gpt2" else {2, 3})
    blocks = {name for name in shapes if any(f".{u}." in name for u in range(9))}
    # The biases of experts have a row for each expert, but are no matrix.
    assert hidden == {name for name in blocks if shapes[name] > 1 and not name.endswith("_bias")}
    before = masters(model)
    losses = train(model, optimizer, range(3))
    assert all(loss == loss for loss in losses)
    assert all(not torch.equal(master, before[name]) for name, master in masters(model).items() if "wpe" not in name)


def _waits() -> list[tuple[int, Wait]]:
    model = horizon_lm.stream(tiny_models.build("llama"))
    update = _update_of(model._horizon.engine.layout)
    computed = {Kind.STREAM_MATRICES, Kind.ORTHOGONALIZE, Kind.RETURN_MATRICES, Kind.UPDATE}
    return [
        (index, wait) for index, wait in each_wait(update)
        if isinstance(wait, After) and update.ops[index].kind in computed and update.ops[index].unit.is_block
    ]  # fmt: skip


def _update_of(layout: build.Layout) -> Schedule:
    blocks = [block(u) for u in range(layout.num_blocks)]
    return between.update(layout, [OUTER, *blocks, HEAD], blocks)


def test_a_dropped_wait_changes_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(device: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = horizon_lm.stream(tiny_models.build("llama"), device, precision="float32")
        return train(model, horizon_lm.Muon(model, **HYPER), range(2)), masters(model)

    losses, expected = result("cpu")
    dropped = _waits()
    assert len(dropped) > 8
    for index, wait in dropped:
        monkeypatch.setattr(
            between, "update", lambda layout, *_, index=index, wait=wait: without_wait(_update_of(layout), index, wait)
        )
        noticed = False
        for eagerness in (1.0, 0.0, None):
            try:
                found, weights = result(SimulatedDevice(0, eagerness=eagerness))
                noticed |= found != losses or not all(
                    torch.equal(weights[name], each) for name, each in expected.items()
                )
            except (ScheduleError, ArithmeticError, RuntimeError):
                noticed = True
        monkeypatch.undo()
        assert noticed, f"{index}: {wait}"


def test_what_is_cut_off_is_a_partial_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = streamed()
    model(**tiny_models.batch()).loss.backward()
    calls = []

    def interrupted(gram: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(gram)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return addmm(gram, *args, **kwargs)

    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    with pytest.raises(PartialUpdateError, match="KeyboardInterrupt"):
        model(**tiny_models.batch())


def test_updates_that_were_issued_are_waited_for_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device runs nothing before it must, so an update that nothing waits for does not run."""
    device = SimulatedDevice(0, eagerness=0.0)
    model = horizon_lm.stream(tiny_models.build("llama"), device)
    optimizer = horizon_lm.Muon(model, **HYPER)
    model(**tiny_models.batch()).loss.backward()
    issued: list[Task] = []
    issue, addmm = device.issue, torch.addmm

    def noted(task: Task) -> None:
        issue(task)
        issued.extend([task] if task.op.kind == Kind.UPDATE else [])

    def interrupted(*args: Any, **kwargs: Any) -> torch.Tensor:
        if issued:
            raise KeyboardInterrupt
        return addmm(*args, **kwargs)

    monkeypatch.setattr(device, "issue", noted)
    monkeypatch.setattr(torch, "addmm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    assert not all(task.finished for task in issued)
    model._horizon.engine.updates.wait([])
    assert all(task.finished for task in issued)


@pytest.mark.parametrize("kind", ["simulated", "threaded"])
def test_without_the_device_an_update_is_not_completed(kind: str) -> None:
    """Matrices that have not returned must not be taken for directions."""
    device = ThreadedDevice(delay=0.0) if kind == "threaded" else SimulatedDevice(0, eagerness=0.0)
    model = horizon_lm.stream(tiny_models.build("llama", num_hidden_layers=2), device)
    optimizer = horizon_lm.Muon(model, **HYPER)
    model(**tiny_models.batch()).loss.backward()
    device.synchronize()
    # The simulated device returns nothing before it must.
    gate = device.hold(Stream.COPY_OUT) if isinstance(device, ThreadedDevice) else threading.Event()
    try:
        optimizer.step()
        with pytest.raises(PartialUpdateError, match="the device failed while it computed a part of an update"):
            model._horizon.engine.settle_without_device()
    finally:
        gate.set()


class _Held:
    """A move that waits for an event, and then runs."""

    def __init__(self, move: Any, reached: threading.Event, gate: threading.Event) -> None:
        self._move, self._reached, self._gate = move, reached, gate
        self.host_bytes = move.host_bytes

    def run(self, link: Any) -> None:
        self._reached.set()
        assert self._gate.wait(60)
        self._move.run(link)


def test_a_matrix_that_failed_to_return_is_not_applied_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed pass may be abandoned, and its copies dropped, before the thread of the update asks for its matrices."""
    device = ThreadedDevice(delay=0.0)
    monkeypatch.setattr(device, "_host_threads", 1)  # so that the second update waits for the first
    model = horizon_lm.stream(tiny_models.build("llama", num_hidden_layers=2), device, precision="float32")
    optimizer = horizon_lm.Muon(model, **HYPER)
    model(**tiny_models.batch()).loss.backward()
    horizon_lm.synchronize(model)
    last = model._horizon.engine.store.units[block(1)].plain.weights
    before = last.clone()
    reached, gate, copies = threading.Event(), threading.Event(), list[torch.Tensor]()
    link, issue = device.links[Stream.COPY_OUT], device.issue
    copy = link.copy

    def fail_at_the_second(destination: torch.Tensor, source: torch.Tensor) -> None:
        copies.append(destination)
        if len(copies) == 2:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        copy(destination, source)

    def hold_the_first(task: Task) -> None:
        if (task.op.kind, task.op.unit) == (Kind.UPDATE, block(0)):
            assert task.moves is not None
            task.moves = [_Held(move, reached, gate) for move in task.moves]
        issue(task)

    monkeypatch.setattr(link, "copy", fail_at_the_second)
    monkeypatch.setattr(device, "issue", hold_the_first)
    optimizer.step()
    assert reached.wait(60)
    device.cancel([])  # as a forward pass does that fails
    gate.set()
    with pytest.raises(torch.AcceleratorError):
        model._horizon.engine.updates.finish()
    with pytest.raises(PartialUpdateError, match="the device failed while it computed a part of an update"):
        model._horizon.engine.settle_without_device()
    assert torch.equal(last, before)


def test_gradients_are_used_up() -> None:
    model, optimizer = streamed()
    model(**tiny_models.batch()).loss.backward()
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())


def test_without_matrices_it_is_rejected() -> None:
    model = horizon_lm.stream(tiny_models.build("llama"))
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    with pytest.raises(ConfigError, match=r"trains the matrices of blocks, and this model trains none.*AdamW"):
        horizon_lm.Muon(model)
