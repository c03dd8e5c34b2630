"""The simulated device: running operations as early or as late as allowed changes no result, unless a wait
is missing.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import After, Buf, Buffer, Kind, LastUse, Pass, ScheduleError, Stream, Wait
from horizon_lm.units import OUTER
from tests.support import tiny_models
from tests.support.schedule_proofs import Passes, check, each_wait, sequences, without_wait
from tests.support.thinned_cases import thinned
from tests.unit.test_schedule import passes

Result = tuple[list[float], list[torch.Tensor]]

SETTINGS: dict[str, dict[str, Any]] = {
    "boundaries on the device": {},
    "boundaries on the host": {"activation_checkpoints": "host"},
    "micro-batches": {"activation_checkpoints": "host", "device_micro_batch_size": 1},
    "whole head": {"head": "whole", "activation_checkpoints": "host"},
    "resident blocks": {"activation_checkpoints": "host", "resident_blocks": 2, "resident_graphs": 1},
    "update in backward": {"activation_checkpoints": "host", "update_in_backward": True},
    "update in backward, tied": {"tied": True, "update_in_backward": True},
}


def losses_of(model: Any, num_steps: int) -> Iterator[float]:
    """Return losses from every kind of pass after every other kind: abandoned forward passes, evaluation, two forward
    passes in a row.
    """
    optimizer = horizon_lm.AdamW(model, lr=1e-2, max_grad_norm=0.5)

    def forward(seed: int) -> torch.Tensor:
        return model(**tiny_models.batch(seed=seed)).loss

    for step in range(num_steps):
        with torch.no_grad():
            yield forward(98).item()
        loss = forward(step)
        yield loss.item()
        forward(50)
        (3 * loss).backward()
        with torch.no_grad():
            yield forward(99).item()
        loss = forward(7) + forward(8)
        yield loss.item()
        loss.backward()
        forward(51)
        loss = forward(9)
        yield loss.item()
        (2 * loss).backward()
        forward(10).backward()
        optimizer.step()
        optimizer.zero_grad()
        # The first forward pass after an update completes it; all later passes must wait for that.
        loss = forward(11)
        with torch.no_grad():
            yield forward(97).item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (forward(12) + forward(13)).backward()
        optimizer.step()
        optimizer.zero_grad()
        forward(14).backward()
        optimizer.step()
        optimizer.zero_grad()


def losses_of_one_backward(model: Any, num_steps: int) -> Iterator[float]:
    """Return the losses of steps with one backward pass each, which updates the weights."""
    optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=True)

    def forward(seed: int) -> torch.Tensor:
        return model(**tiny_models.batch(seed=seed)).loss

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(num_steps):
        loss = forward(seed)
        yield loss.item()
        yield forward(50).item()  # abandoned
        with torch.no_grad():
            yield forward(99).item()
        step(3 * loss)
        with torch.no_grad():
            yield forward(99).item()
        pending = forward(51)  # occupies the head's buffer, so that the next forward pass cannot use it
        yield pending.item()
        loss = forward(8)
        yield loss.item()
        step(loss)
        del pending
        with torch.no_grad():
            yield forward(97).item()
        loss = forward(9)
        yield loss.item()
        step(2 * loss)
        pending = forward(52)
        loss = forward(10)
        yield loss.item()
        step(loss)
        del pending
        loss = forward(11)
        with torch.no_grad():
            yield forward(96).item()
        step(loss)


def train(
    device: Any, expected: Result | None = None, num_steps: int = 2, tied: bool = False, update_in_backward: bool = False,
    **settings: Any,
) -> Result:  # fmt: skip
    """Return losses and final weights. Stop at the first unexpected loss."""
    model = horizon_lm.stream(tiny_models.build("llama", tie_word_embeddings=tied), device, **settings)
    losses: list[float] = []
    for loss in (losses_of_one_backward if update_in_backward else losses_of)(model, num_steps):
        losses.append(loss)
        if expected is not None and loss != expected[0][len(losses) - 1]:
            return losses, []
    horizon_lm.synchronize(model)
    store = model._horizon.engine.store
    return losses, [store.master(name).clone() for name in store.unit_of]


def same(a: Result, b: Result) -> bool:
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize(
    ("name", "precision", "seed"),
    thinned(itertools.product(SETTINGS, ("float32", "fp32_master", "bf16"), range(6)), every=13),
)
def test_adversarial_order_changes_no_result(
    undisturbed: Callable[..., Result], name: str, precision: str, seed: int
) -> None:
    options = SETTINGS[name] | {"precision": precision}
    draw = random.Random(f"{name} {precision} {seed}")
    device = SimulatedDevice(seed, eagerness=draw.choice([None, 0.3, 0.9]), pieces=draw.randint(1, 5))
    assert same(train(device, **options), undisturbed(**options))


# These take a minute each. By default every third wait is dropped, which covers every kind of operation.
_ALWAYS = ("boundaries on the host", "update in backward, tied")


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        *[(name, 3) for name in _ALWAYS],
        *[pytest.param(name, 1, marks=pytest.mark.slow) for name in SETTINGS],
    ],
)
def test_each_dropped_wait_changes_the_numbers(
    undisturbed: Callable[..., Result], name: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SETTINGS[name] | {"precision": "float32"}
    expected = undisturbed(**options)
    seen: set[Pass] = set()
    layouts: set[build.Layout] = set()
    _observe_passes(monkeypatch, seen, layouts)
    train("cpu", **options)
    monkeypatch.undo()

    (layout,) = layouts
    made = passes(layout, head_grads=options.get("head") != "whole")
    drops = [(p, op, w) for p in sorted(seen, key=str) for op, w in each_wait(p) if _needed(made, p, op, w)]
    visible = [drop for drop in drops if not _invisible(*drop)]
    tried = visible[::stride]
    missed = [
        f"{schedule.name} {schedule.ops[op]}: {wait}"
        for schedule, op, wait in tried
        if not _noticed(monkeypatch, schedule, without_wait(schedule, op, wait), expected, options)
    ]
    print(
        f"{name}: dropped waits noticed by the numbers: {len(tried) - len(missed)} of {len(tried)} "
        f"({len(drops) - len(visible)} more are no data hazard on this device)"
    )
    assert missed == [], "\n".join(missed)


def _needed(made: Passes, schedule: Pass, op_index: int, wait: Wait) -> bool:
    """Return whether some sequence of passes is wrong without this wait. Other waits may imply one across passes."""
    if isinstance(wait, After):
        return True
    broken = without_wait(schedule, op_index, wait)
    changed = Passes(*(broken if p == schedule else p for p in made))  # type: ignore[arg-type]
    return changed != made and any(check(sequence) for sequence in sequences(changed).values())


def _invisible(schedule: Pass, op_index: int, wait: Wait) -> str | None:
    """Return the reason why dropping a wait cannot change numbers on the simulated device; None if it can."""
    op = schedule.ops[op_index]
    if isinstance(wait, LastUse) and wait.stream == Stream.DISK:
        return "these runs save nothing; test_checkpoints.py drops the waits for saves"
    if isinstance(wait, LastUse) and wait.stream == Stream.COMPUTE:
        return "it computes eagerly, so computations of earlier passes have finished"
    if op.unit == OUTER and op.kind == Kind.FORWARD:
        return "this computation only returns views"
    written = [buffer.kind for o in schedule.ops if schedule.name == "forward" for buffer in o.writes]
    no_forward_waits = Buf.HEAD_GRADS in written or Buf.OUTER in written  # its buffer is free, or the weights are new
    if no_forward_waits and wait in [LastUse(Buffer(Buf.RING, i), Stream.COPY_OUT) for i in (0, 1)]:
        return "no other forward pass waits for its backward pass, so a boundary in transit belongs to an abandoned one"
    if op.kind == Kind.UPDATE:
        return "the optimizer has read every gradient on the host, and all weights in transit were waited for"
    return None


def _observe_passes(monkeypatch: pytest.MonkeyPatch, seen: set[Pass], layouts: set[build.Layout]) -> None:
    for function in ("forward", "backward", "update"):
        original = getattr(build, function)

        def observed(*args: Any, original: Any = original, **kwargs: Any) -> Pass:
            layouts.add(args[0])
            seen.add(original(*args, **kwargs))
            return original(*args, **kwargs)

        monkeypatch.setattr(build, function, observed)


def _noticed(
    monkeypatch: pytest.MonkeyPatch, schedule: Pass, broken: Pass, expected: Result, options: dict[str, Any]
) -> bool:
    for function in ("forward", "backward", "update"):
        original = getattr(build, function)

        def replaced(*args: Any, original: Any = original, **kwargs: Any) -> Pass:
            made = original(*args, **kwargs)
            return broken if made == schedule else made

        monkeypatch.setattr(build, function, replaced)
    try:
        # As early as possible, as late as possible, then mixed.
        for seed, eagerness in [(0, 1.0), (0, 0.0), *((seed, None) for seed in range(8))]:
            try:
                if not same(train(SimulatedDevice(seed, eagerness=eagerness), expected, **options), expected):
                    return True
            except (ScheduleError, ArithmeticError, RuntimeError):
                return True
        return False
    finally:
        monkeypatch.undo()
