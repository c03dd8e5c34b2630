"""The simulated device: the adversary changes nothing, unless a wait is missing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horizon_lm
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.schedule import build
from horizon_lm.schedule.check import each_wait, without_wait
from horizon_lm.schedule.ops import Pass, ScheduleError
from tests import families

Result = tuple[list[float], list[torch.Tensor]]

SETTINGS: dict[str, dict[str, Any]] = {
    "boundaries on the device": {},
    "boundaries on the host": {"boundaries": "host"},
    "micro-batches": {"boundaries": "host", "device_micro_batch_size": 1},
    "whole head": {"head": "whole", "boundaries": "host"},
}

def losses_of(model: Any, num_steps: int) -> Iterator[float]:
    """Accumulation, evaluation in between, an abandoned forward, two forwards before their backward, updates."""
    optimizer = horizon_lm.AdamW(model, lr=1e-2, max_grad_norm=0.5)
    for step in range(num_steps):
        loss = model(**families.batch(seed=step)).loss
        yield loss.item()
        model(**families.batch(seed=50))  # abandoned
        loss.backward()
        with torch.no_grad():
            yield model(**families.batch(seed=99)).loss.item()
        (model(**families.batch(seed=7)).loss + model(**families.batch(seed=8)).loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(device: Any, expected: Result | None = None, num_steps: int = 2, **settings: Any) -> Result:
    """Losses and final weights. Stops at the first loss that is not the expected one."""
    model = horizon_lm.stream(families.build("llama", num_hidden_layers=4), device, **settings)
    losses: list[float] = []
    for loss in losses_of(model, num_steps):
        losses.append(loss)
        if expected is not None and loss != expected[0][len(losses) - 1]:
            return losses, []
    horizon_lm.synchronize(model)
    store = model._horizon.engine.store
    return losses, [store.master(name).clone() for name in store.unit_of]


def same(a: Result, b: Result) -> bool:
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.fixture(scope="module")
def undisturbed() -> Callable[..., Result]:
    known: dict[Any, Result] = {}

    def get(**settings: Any) -> Result:
        key = tuple(sorted(settings.items()))
        if key not in known:
            known[key] = train("cpu", **settings)
        return known[key]

    return get


@pytest.mark.parametrize("precision", ["float32", "fp32_master", "bf16"])
@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), eagerness=st.sampled_from([0.3, 0.8, 0.95]), pieces=st.integers(1, 5))
def test_the_adversary_changes_nothing(
    undisturbed: Callable[..., Result], name: str, precision: str, seed: int, eagerness: float, pieces: int
) -> None:
    options = SETTINGS[name] | {"precision": precision}
    device = SimulatedDevice(seed, eagerness=eagerness, pieces=pieces)
    assert same(train(device, **options), undisturbed(**options))


@pytest.mark.parametrize(
    "name", [n if n == "micro-batches" else pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS]
)
def test_each_dropped_wait_changes_the_numbers(
    undisturbed: Callable[..., Result], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SETTINGS[name] | {"precision": "float32"}
    expected = undisturbed(**options)
    seen: set[Pass] = set()
    _observe_passes(monkeypatch, seen)
    train("cpu", **options)
    monkeypatch.undo()

    drops = [(p, op, wait) for p in sorted(seen, key=str) for op, wait in each_wait(p)]
    missed = []
    for schedule, op, wait in drops:
        if not _noticed(monkeypatch, schedule, without_wait(schedule, op, wait), expected, options):
            missed.append(f"{schedule.name} {schedule.ops[op]}: {wait}")
    print(f"{name}: dropped waits noticed by the numbers: {len(drops) - len(missed)} of {len(drops)}")
    assert missed == []


def _observe_passes(monkeypatch: pytest.MonkeyPatch, seen: set[Pass]) -> None:
    for function in ("forward", "backward", "update"):
        original = getattr(build, function)

        def observed(*args: Any, original: Any = original, **kwargs: Any) -> Pass:
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
        # As early as possible, as late as possible, then at random.
        for seed, eagerness in [(0, 1.0), (0, 0.0), *((seed, 0.9) for seed in range(10))]:
            try:
                if not same(train(SimulatedDevice(seed, eagerness=eagerness), expected, **options), expected):
                    return True
            except (ScheduleError, ArithmeticError):
                return True
        return False
    finally:
        monkeypatch.undo()
