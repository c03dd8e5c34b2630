"""The device memory of steps with images is known before they run, and does not grow with the depth of a tower."""

from dataclasses import replace
from typing import Any

import pytest
import transformers
from packaging.version import Version

from horizon_lm.model.components import Component
from tests.support.planned_bytes import DEFAULTS, Case
from tests.support.planned_images import (
    DEEP,
    MASKED,
    build,
    counted_bytes,
    device_use,
    host_bytes,
    packed,
    planned_step,
    rows_with_images,
)
from tests.support.thinned_cases import covering

TOWER, PROJECTOR, _ = Component
FROZEN = {"nothing": (), "tower and projector": (TOWER, PROJECTOR), "tower": (TOWER,), "projector": (PROJECTOR,)}
SETTINGS: dict[str, dict[str, Any]] = {
    "host": {"activation_checkpoints": "host"},
    "micro-batches": {"activation_checkpoints": "device", "device_micro_batch_size": 1},
    "resident": {"head": "whole", "resident_blocks": 5, "resident_graphs": 0},
}


def case_of(**options: Any) -> Case:
    return Case(2, DEFAULTS | {"device": "simulated"} | options, "float32", False, frozenset())


@pytest.mark.parametrize(("kind", "frozen", "setting"), covering(DEEP, FROZEN, SETTINGS))
def test_a_step_takes_the_planned_bytes(kind: str, frozen: str, setting: str) -> None:
    """The meter shares no code with the plan, and counts the caller's pixels, too."""
    model, case = build(kind, depth=4), case_of(**SETTINGS[setting])
    batch, images = rows_with_images(model)
    step = planned_step(model, images, case, FROZEN[frozen])
    engine, peak = counted_bytes(model, batch, case, FROZEN[frozen])
    use = device_use(step)
    assert {name: num for name, num in engine.device.counters.allocated.items() if num} == use.buffers
    kept = {name: num for name, num in engine.store.num_bytes.items() if num}
    if engine.boundaries.num_bytes:
        kept["boundaries"] = engine.boundaries.num_bytes
    assert kept == host_bytes(step)
    print(f"{kind}, {frozen} frozen, {setting}: counted {peak:,}, planned {use.total:,}, {peak / use.total:.3f}")
    # In transformers 5.17, micro-batches take 680 bytes more than planned, as the code around the blocks takes less there.
    assert 0.94 * use.total <= peak <= 1.001 * use.total


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_a_step_on_packed_rows_takes_the_planned_bytes(kind: str) -> None:
    model, case = build(kind, depth=4), replace(case_of(), rows=1)
    batch, images = rows_with_images(model)
    use = device_use(planned_step(model, replace(images, per_row=2, repeats=2), case, num_packed=2))
    engine, peak = counted_bytes(model, packed(model, batch), case)
    assert {name: num for name, num in engine.device.counters.allocated.items() if num} == use.buffers
    assert 0.94 * use.total <= peak <= use.total


@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llava", "gemma3"))]
)
def test_device_memory_does_not_depend_on_the_depth_of_a_tower(kind: str) -> None:
    peaks, planned = [], []
    for depth in (4, 32):
        model, case = build(kind, depth), case_of(activation_checkpoints="host")
        batch, images = rows_with_images(model)
        planned.append(device_use(planned_step(model, images, case)).total)
        peaks.append(counted_bytes(model, batch, case)[1])
    assert peaks[0] == peaks[1]
    assert planned[0] == planned[1]


@pytest.mark.parametrize("frozen", ["nothing", "tower and projector"])
@pytest.mark.parametrize("num_rows", [2, 8, pytest.param(32, marks=pytest.mark.slow)])
def test_a_mask_over_all_images_is_planned(num_rows: int, frozen: str) -> None:
    """Its bytes grow with the square of the images, and are measured with up to three. A line through two would lack most of 32."""
    model, case = build(MASKED, depth=4), replace(case_of(activation_checkpoints="host"), rows=num_rows)
    batch, images = rows_with_images(model, num_rows)
    step = planned_step(model, images, case, FROZEN[frozen])
    engine, peak = counted_bytes(model, batch, case, FROZEN[frozen])
    use = device_use(step)
    assert {name: num for name, num in engine.device.counters.allocated.items() if num} == use.buffers
    # Of the caller's batch and of copies; no plan counts these. Here tokens are not few beside hidden states of 64 channels.
    of_tokens = 2 * sum(batch[name].nbytes for name in ("input_ids", "attention_mask", "labels"))
    print(f"{num_rows} rows, {frozen} frozen: counted {peak:,}, planned {use.total:,}, {peak / use.total:.3f}")
    # In transformers 5.17 the tower keeps a little more; its plans are up to a hundredth too small.
    is_old = Version(transformers.__version__) < Version("5.24")
    assert 0.94 * use.total <= peak <= (1.01 if is_old else 1.001) * use.total + of_tokens


def test_boundaries_of_a_tower_are_planned_where_they_stay_on_the_device() -> None:
    """The plan says how much more a deeper tower takes then: as much as is counted."""
    use, peaks = [], []
    for depth in (4, 12):
        model, case = build("llava", depth), case_of(activation_checkpoints="device")
        batch, images = rows_with_images(model)
        use.append(device_use(planned_step(model, images, case)))
        peaks.append(counted_bytes(model, batch, case)[1])
    assert use[1].total - use[0].total == use[1].checkpoints - use[0].checkpoints == peaks[1] - peaks[0] > 0


def test_rows_of_text_cost_nothing_in_towers() -> None:
    model, case = build("llava", depth=4), case_of()
    with_images, text = (planned_step(model, images, case) for images in (rows_with_images(model)[1], None))
    towers = range(4)
    assert [text.hidden_of(index) for index in towers] == [0] * 4
    assert all(with_images.hidden_of(index) > 0 for index in towers)
    assert device_use(text).images == 0 < device_use(with_images).images
    computed = {str(op.unit) for each in with_images.passes() for op in each.ops}
    assert {f"block{index}" for index in towers} <= computed
    assert not {f"block{index}" for index in towers} & {str(op.unit) for op in text.passes()[0].ops}
