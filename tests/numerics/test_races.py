"""The simulated device: running operations as early or as late as allowed changes no result, unless a wait
is missing.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from horizon_lm.common.units import OUTER
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.schedule import between, build
from horizon_lm.schedule.ops import After, Buf, Buffer, Kind, LastUse, Schedule, ScheduleError, Stream, Wait
from tests.support.pass_sequences import SETTINGS, Result, same, train
from tests.support.schedule_proofs import Passes, each_wait, is_wrong, passes, without_wait
from tests.support.thinned_cases import thinned


@pytest.mark.parametrize(
    ("name", "precision", "seed"),
    thinned(itertools.product(SETTINGS, ("float32", "fp32_master", "bf16"), range(6)), every=19),
)
def test_adversarial_order_changes_no_result(
    undisturbed: Callable[..., Result], name: str, precision: str, seed: int
) -> None:
    options = SETTINGS[name] | {"precision": precision}
    draw = random.Random(f"{name} {precision} {seed}")
    device = SimulatedDevice(seed, eagerness=draw.choice([None, 0.3, 0.9]), pieces=draw.randint(1, 5))
    assert same(train(device, **options), undisturbed(**options))


# These take a minute each. By default every fifth wait is dropped, which covers every kind of operation.
_ALWAYS = ("boundaries on the host", "update in backward, tied")


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        *[(name, 5) for name in _ALWAYS],
        *[pytest.param(name, 1, marks=pytest.mark.slow) for name in SETTINGS],
    ],
)
def test_each_dropped_wait_changes_the_numbers(
    undisturbed: Callable[..., Result], name: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SETTINGS[name] | {"precision": "float32"}
    expected = undisturbed(**options)
    seen: set[Schedule] = set()
    layouts: set[build.Layout] = set()
    _observe_passes(monkeypatch, seen, layouts)
    train("cpu", **options)
    monkeypatch.undo()

    (layout,) = layouts
    made = passes(layout, head_grads=options.get("head") != "whole")
    drops = [(p, op, w) for p in sorted(seen, key=str) for op, w in each_wait(p) if _needed(made, p, op, w)]
    visible = [drop for drop in drops if not _invisible(*drop)]
    tried = visible[::stride]
    kinds, tried_kinds = ({schedule.ops[op].kind for schedule, op, _ in each} for each in (visible, tried))
    assert tried_kinds == kinds
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


def _needed(made: Passes, schedule: Schedule, op_index: int, wait: Wait) -> bool:
    """Return whether some sequence of passes is wrong without this wait. Other waits may imply one across passes."""
    if isinstance(wait, After):
        return True
    broken = without_wait(schedule, op_index, wait)
    changed = Passes(*(broken if p == schedule else p for p in made))  # type: ignore[arg-type]
    return changed != made and is_wrong(changed, broken)


def _invisible(schedule: Schedule, op_index: int, wait: Wait) -> str | None:
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


_BUILDERS = ((build, "forward"), (build, "backward"), (between, "update"))


def _observe_passes(monkeypatch: pytest.MonkeyPatch, seen: set[Schedule], layouts: set[build.Layout]) -> None:
    for module, function in _BUILDERS:
        original = getattr(module, function)

        def observed(*args: Any, original: Any = original, **kwargs: Any) -> Schedule:
            layouts.add(args[0])
            seen.add(original(*args, **kwargs))
            return original(*args, **kwargs)

        monkeypatch.setattr(module, function, observed)


def _noticed(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, broken: Schedule, expected: Result, options: dict[str, Any]
) -> bool:
    for module, function in _BUILDERS:
        original = getattr(module, function)

        def replaced(*args: Any, original: Any = original, **kwargs: Any) -> Schedule:
            made = original(*args, **kwargs)
            return broken if made == schedule else made

        monkeypatch.setattr(module, function, replaced)
    try:
        # As early as possible, as late as possible, then mixed.
        for seed, eagerness in [*((seed, None) for seed in range(8)), (0, 1.0), (0, 0.0)]:
            try:
                if not same(train(SimulatedDevice(seed, eagerness=eagerness), expected, **options), expected):
                    return True
            except (ScheduleError, ArithmeticError, RuntimeError):
                return True
        return False
    finally:
        monkeypatch.undo()
