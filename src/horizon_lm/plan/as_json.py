"""A plan for programs, and for the report of the run that follows it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from horizon_lm.plan.budget import Budget
from horizon_lm.plan.curve import Curve
from horizon_lm.plan.outline import ModelOutline
from horizon_lm.plan.plan import Plan
from horizon_lm.plan.remedies import Remedy
from horizon_lm.plan.seconds import StepTime
from horizon_lm.schedule.trace import write_chrome

VERSION = 1


def plan_as_json(plan: Plan, device: str, remedies: Sequence[Remedy] = ()) -> dict[str, Any]:
    """Everything that a plan says, as JSON has it. ``device``: the run's setting."""
    return {
        "version": VERSION,
        "fits": plan.fits,
        "model": _model(plan.step.outline),
        "run": _run(plan, device),
        **{budget.place: _budget(budget) for budget in plan.budgets},
        "hardware": None if plan.machine.hardware is None else asdict(plan.machine.hardware),
        "step": None if plan.time is None else {**_step(plan.time), "run_seconds": plan.run_seconds},
        "memory": _memory(plan.curve),
        "problems": list(plan.problems),
        "remedies": [_remedy(remedy) for remedy in remedies],
    }


def _model(outline: ModelOutline) -> dict[str, Any]:
    return {
        "name": outline.name,
        "parameters": outline.sizes.num_parameters,
        "active_parameters": outline.active,
        "num_blocks": outline.num_blocks,
        "hidden": outline.sizes.hidden,
        "vocabulary": outline.sizes.vocabulary,
    }


def _run(plan: Plan, device: str) -> dict[str, Any]:
    outline, request, settings = plan.step.outline, plan.request, plan.step.settings
    return {
        "rows": request.rows,
        "length": outline.length,
        "tokens": plan.step.tokens,
        "num_steps": request.num_steps,
        "precision": request.precision,
        "device": device,
        "settings": {
            "device_micro_batch_size": settings.micro_batch,
            "slices": settings.slices,
            "head_chunk_tokens": settings.head_chunk_tokens if settings.chunked_head else None,
            "boundaries": settings.residency.boundaries,
            "held_blocks": settings.residency.weights,
            "held_graphs": settings.residency.graphs,
            "attn_implementation": outline.attention,
        },
        "reasons": list(plan.reasons),
    }


def _step(time: StepTime) -> dict[str, Any]:
    return {
        "seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "model_tflops": time.model_tflops,
        "limited_by": time.limited_by,
        "exposed_seconds": dict(time.exposed_seconds),
        "exposed_update_seconds": time.exposed_update_seconds,
        "busy": dict(time.busy),
        "hidden_from_tokens": dict(time.hidden_from_tokens),
    }


def _memory(curve: Curve | None) -> dict[str, Any] | None:
    if curve is None:
        return None
    return {"seconds": list(curve.seconds), "device": list(curve.device), "host": list(curve.host)}


def _remedy(remedy: Remedy) -> dict[str, Any]:
    return {
        "settings": dict(remedy.settings),
        "cost": remedy.cost,
        "bytes": {budget.place: budget.num_bytes for budget in remedy.plan.budgets},
    }


def _budget(budget: Budget) -> dict[str, Any]:
    return {
        "items": [{"name": item.name, "bytes": item.num_bytes, "note": item.note} for item in budget.items],
        "bytes": budget.num_bytes,
        "available": budget.available,
        "limits": [{"name": limit.name, "bytes": limit.num_bytes} for limit in budget.limits],
    }


def write_plan(plan: Plan, device: str, folder: Path) -> None:
    """``plan.json`` and, where it has seconds, ``predicted_trace.json`` of one step, in a run's folder."""
    (folder / "plan.json").write_text(json.dumps(plan_as_json(plan, device), indent=2) + "\n", encoding="utf-8")
    if plan.time is None:
        return
    curve = plan.curve
    assert curve is not None
    # Where the device is the host, a trace counts the engine's buffers alone; nobody tells it of the others.
    buffers = plan.buffers.num_bytes
    samples = [
        (at, {"device bytes": buffers if plan.machine.on_host else device_bytes, "host bytes": host_bytes})
        for at, device_bytes, host_bytes in zip(curve.seconds, curve.device, curve.host, strict=True)
    ]
    write_chrome(folder / "predicted_trace.json", plan.time.spans, samples, [(1, 0.0, plan.time.seconds)])
