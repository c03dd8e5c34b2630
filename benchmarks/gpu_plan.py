"""The plan of a benchmark's case, before it runs and with the memory that its process finds: the same step both times."""

from collections.abc import Iterator
from typing import Any

import torch
from gpu_cases import SUITES, Case, make_case
from gpu_models import make_config

from horizon_lm.device.cuda import CudaDevice
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.plan import Plan, make_plan
from horizon_lm.planning.arithmetic.request import Limit, Machine, Request
from horizon_lm.planning.measure.model_outline import outline_model

GIB = 2**30
# As in horizon_lm.runs.admission, whose packages a machine need not have that has those of the engine.
LIBRARIES_BYTES, CONTEXT_BYTES, WORKSPACE_BYTES, STAGING_BYTES = GIB, GIB, 2**28, 2**28
SCRATCH_BYTES = CudaDevice.link_bytes
_PLANNED = ("3b", "7b", "14b", "8b-24gb")  # the suites that are predicted


def plan_case(case: Case, hardware: Hardware | None = None, free: int | None = None) -> Plan:
    """Return the plan of a case as ``horizon-lm train`` makes it, which chooses the rows of a micro-batch, too.

    Args:
        case: a case of our engine.
        hardware: rates of the machine; None if they are unknown, in which case the plan has no time.
        free: bytes of device memory that are free while a context exists; None for all of the device, less a context.
    """
    on_gpu = case.torch_device.type == "cuda"
    known = free if free is not None else hardware.device_memory - CONTEXT_BYTES if hardware is not None else None
    limits = [bytes_ for bytes_ in (known, case.device_bytes) if bytes_] if on_gpu else []
    machine = Machine(
        "this machine", not on_gpu, hardware, device_limits=[Limit("the device", each) for each in limits], process_bytes=LIBRARIES_BYTES,
        device_context_bytes=WORKSPACE_BYTES if on_gpu else 0, scratch_bytes=SCRATCH_BYTES if on_gpu else 0,
        staging_bytes=STAGING_BYTES if on_gpu else 0,
    )  # fmt: skip
    outline = outline_model(
        ModelSource(make_config(case.model, case.length), case.name), length=case.length,
        dtype=torch.bfloat16 if on_gpu else torch.float32, masked=False, on_accelerator=on_gpu,
    )  # fmt: skip
    settings: dict[str, Any] = case.options | case.optimizer | {"device_memory": case.device_bytes}
    compiled = settings.pop("compile", on_gpu)
    request = Request(per_device_train_batch_size=case.rows, compiled=compiled, **settings)
    return make_plan(outline, request, machine)


def planned_options(case: Case) -> dict[str, Any]:
    """Return the options of the step that is planned with the device memory that is free now, as a run passes them to the engine."""
    free = torch.cuda.mem_get_info(case.torch_device)[0] if case.torch_device.type == "cuda" else None
    settings = plan_case(case, free=free).step.settings
    return {"device_micro_batch_size": settings.slices[0], "head_chunk_tokens": settings.head_chunk_tokens}


def describe(plan: Plan) -> dict[str, Any]:
    """Return what a plan says of a step, to compare with the step that runs."""
    settings = plan.step.settings
    residency = settings.residency
    found: dict[str, Any] = {
        "micro-batches": list(settings.slices), "resident graphs": residency.graphs, "resident blocks": residency.weights,
        "activation checkpoints on the device": residency.boundaries, "tokens of logits at once": settings.head_chunk_tokens,
    }  # fmt: skip
    found |= {"device": plan.device.bytes, "host": {item.name: item.bytes for item in plan.host.items}}
    if plan.time is not None:
        time = plan.time
        found |= {"seconds": time.seconds, "updates": time.exposed_update_seconds, "limited by": time.limited_by}
    return found


def predictions(hardware: Hardware, device: str) -> Iterator[str]:
    """Yield a line for each main case of our engine in gpu.py: what the plan predicts for it."""
    for settings in (settings for suite in _PLANNED for settings in SUITES[suite]()):
        if settings["system"] != "horizon":
            continue
        case = make_case(settings, device, 1)
        found = describe(plan_case(case, hardware))
        where = "" if case.device_bytes is None else f", device limited to {case.device_bytes / 1e9:g} GB"
        changes = "".join(f", {name} {value}" for name, value in (case.options | case.optimizer).items())
        yield (
            f"{case.name}, {case.rows} x {case.length}{changes}{where}: planned {found['seconds']:.3f} s a step, {found['updates']:.3f} of them waiting "
            f"for updates; limited by {found['limited by']}; micro-batches {found['micro-batches']}, {found['resident graphs']} graphs and "
            f"{found['resident blocks']} blocks resident; device {found['device'] / GIB:.1f} GiB, host {sum(found['host'].values()) / GIB:.1f} GiB"
        )
