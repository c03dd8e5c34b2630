"""Find what makes a run fit: other settings or, if none of them suffices, adapters on its frozen model."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from horizon_lm.errors import HorizonError
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.arithmetic.plan import Plan, make_plan
from horizon_lm.planning.arithmetic.remedies import Remedy, find_remedies
from horizon_lm.runs.admission.inputs import Source
from horizon_lm.runs.config import RunConfig

_COST = "only adapters are trained, not the weights of the model"


def remedies_of(plan: Plan, run: RunConfig, source: Source) -> list[Remedy]:
    """Return the changes of settings with which the run of a plan would fit: up to three, or adapters if there are none."""
    if plan.fits:
        return []
    found = find_remedies(plan, partial(source.outline, run, length=plan.step.outline.length))
    if found or run.use_peft or source.is_streamed or not plan.memory_deficit:
        return found
    return _with_adapters(plan, run, source)


def _with_adapters(plan: Plan, run: RunConfig, source: Source) -> list[Remedy]:
    """Return adapters as the remedy for a run that cannot train the whole model.

    Adapters are tried on the model as it is, then on 4-bit weights. If neither fits, the last try is combined with further changes of
    settings with which it fits. The list is empty if none do, or if the model takes no adapters.
    """
    request = replace(plan.request, grad_bytes=4 if run.grad_dtype is None else plan.request.grad_bytes)
    remedy = None
    for settings, cost in _adapter_settings(run, source, plan):
        outline_for = partial(source.outline, run.model_copy(update=settings), length=plan.step.outline.length)
        try:
            adapted = make_plan(outline_for(), request, plan.machine, priced=False)
        except HorizonError:  # PEFT is not installed, or has no adapters for this model
            return []
        remedy = Remedy(settings, cost, adapted)
        if not adapted.memory_deficit:
            return [remedy]
    assert remedy is not None
    return [
        Remedy({**remedy.settings, **more.settings}, f"{remedy.cost}; {more.cost}", more.plan)
        for more in find_remedies(remedy.plan, outline_for)
    ]


def _adapter_settings(run: RunConfig, source: Source, plan: Plan) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the settings of each way to train adapters, and its cost as text: on the model as it is first, then on 4-bit weights."""
    settings: dict[str, Any] = {"use_peft": True}
    if run.trainable is not None:
        settings["trainable"] = None
    if run.dequantize:
        settings["dequantize"] = False
    is_quantized = source.model.quantization is not None
    weights = host_bytes(plan.step).get("weights", 0)
    # To outline adapters takes a second or two, so they are left out if the weights alone are too large for the host.
    if is_quantized or plan.host.available is None or weights <= plan.host.available:
        yield settings, _COST
    if not is_quantized:
        yield settings | {"load_in_4bit": True}, f"{_COST}, which are rounded to 4 bits"
