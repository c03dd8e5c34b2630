"""Simulate updates of the experts' tiles one by one, beside updates of whole blocks, as they are. Nothing is measured.

python benchmarks/simulated_tile_updates.py [--output FILE.md]
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from horizon_lm.common.quantities import parse_bytes
from horizon_lm.common.units import Unit
from horizon_lm.planning.arithmetic.catalog import find_profile
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.planning.arithmetic.step_cost import StepCost, rates
from horizon_lm.runs.admission.inputs import open_source
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import other_machine
from horizon_lm.runs.config import plan_config
from horizon_lm.schedule.ops import UPDATES, Buf, Buffer, Kind, Op, Schedule, Stream
from horizon_lm.schedule.simulate import Cost, step_seconds, without
from horizon_lm.schedule.tiles import TileSlots
from horizon_lm.schedule.waits import derive_waits

LENGTH = 4096
IN_BACKWARD = {"update_in_backward": True, "max_grad_norm": 0}
CASES: list[tuple[str, dict[str, Any], int, int, str, str]] = [
    (model, settings, tile, rows, profile, memory)
    for model, tile, rows, profile, memory in (
        ("Qwen3-235B-A22B", 4, 16, "rtx-4090-server", "3TB"),
        ("Qwen3-235B-A22B", 4, 2, "rtx-4090-server", "3TB"),
        ("Qwen3-30B-A3B", 16, 8, "rtx-4090", "512GB"),
        ("Qwen3-30B-A3B", 16, 1, "rtx-4090", "512GB"),
    )
    for settings in ({}, IN_BACKWARD)
]
_HOST = (Buf.HOST_WEIGHTS, Buf.HOST_GRADS, Buf.HOST_LANDING)


def in_tiles(schedule: Schedule, slots: TileSlots) -> Schedule:
    """Return a pass in which each tile has memory of its own in the host, and is updated by itself."""
    return replace(schedule, ops=derive_waits([each for op in schedule.ops for each in _cut(op, slots)]))


def _cut(op: Op, slots: TileSlots) -> Iterator[Op]:
    op = replace(op, waits=())
    if op.unit.is_tile:
        own = _of_tile(op, op.unit)
        yield own
        landed = next((each for each in own.writes if each.kind == Buf.HOST_LANDING), None)
        if landed is not None:  # in the backward pass
            yield _update(op.unit, landed)
        return
    yield op
    if op.kind == Kind.UPDATE and op.unit.is_block and op.reads[0].kind == Buf.HOST_GRADS:
        for tile in slots.of(op.unit.block_index):
            yield _update(tile, Buffer(Buf.HOST_GRADS, tile))


def _update(tile: Unit, grads: Buffer) -> Op:
    weights = Buffer(Buf.HOST_WEIGHTS, tile)
    return Op(Kind.UPDATE, tile, Stream.HOST, (grads, weights), (weights,))


def _of_tile(op: Op, tile: Unit) -> Op:
    def own(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
        return tuple(Buffer(each.kind, tile) if each.kind in _HOST else each for each in buffers)

    return replace(op, reads=own(op.reads), writes=own(op.writes))


def cost_in_tiles(step: Step, cost: Cost) -> Cost:
    """Return the cost of operations if tiles are updated by themselves."""

    def price(op: Op) -> float:
        cut = op.unit.is_tile or op.unit.is_block
        if op.kind not in UPDATES or not (cut and step.tiled.is_cut(op.unit.block_index)):
            return cost(op)
        moved = step.tiled.part(op.unit).grad_layout.num_params
        return cost(replace(op, unit=op.unit.owner)) * moved / step.outline.layout.trained_numel(op.unit.owner)

    return price


def row(model: str, settings: dict[str, Any], tile: int, rows: int, profile: str, memory: str) -> str:
    run = plan_config(
        model_name_or_path=model, max_length=LENGTH, per_device_train_batch_size=rows, device="cuda", expert_tile=tile, moments="bfloat16", **settings,
    )  # fmt: skip
    hardware = find_profile(profile)
    step = plan_run(run, open_source(run), other_machine(hardware, parse_bytes(memory)), priced=False).step
    passes, cost, speed = step.passes(), StepCost(step, hardware), rates(hardware, None, None, step.settings)
    slots = TileSlots(step.layout.tiles)
    whole = step_seconds(passes, cost, speed)
    cut = step_seconds([in_tiles(each, slots) for each in passes], cost_in_tiles(step, cost), speed)
    free = step_seconds(passes, without(cost, *UPDATES), speed)
    return (
        f"| {model} | {profile}, {memory} | {tile} | {rows} | {'in backward' if settings else 'after it'} | {whole:.2f} | {cut:.2f} | "
        f"{1 - cut / whole:.1%} | {free:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    lines = [
        "# Simulated, nothing measured: updates of tiles one by one",
        "",
        f"{date.today()}. Rows of {LENGTH:,} tokens, all weights, moments in bfloat16. An update of a block waits until its core and all of its tiles have landed, and a tile is "
        "copied when its whole block is updated. With updates of tiles, each tile waits for itself alone, and in the backward pass lands in memory of its own, so that "
        "nothing waits for a landing slot.",
        "",
        "Command: `python benchmarks/simulated_tile_updates.py`",
        "",
        "| model | machine | experts of a tile | rows | updates | step, s: updates of blocks | updates of tiles | shorter by | free updates |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row(*case) for case in CASES),
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if output is not None:
        output.write_text(text)


if __name__ == "__main__":
    main()
