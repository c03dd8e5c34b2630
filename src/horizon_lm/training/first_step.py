"""Run the first step of a run, and once more with a smaller plan if the device has too little memory for it."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.device.faults import is_out_of_device_memory
from horizon_lm.errors import first_line
from horizon_lm.plan.plan import Plan
from horizon_lm.plan.render import summary_lines, write_plan
from horizon_lm.preflight.admission import Admission
from horizon_lm.training.metrics import Reporter
from horizon_lm.training.run_dir import RunDir


def run_first_step(
    train_step: Callable[[], None], *, step: int, model: Any, optimizer: Any, admission: Admission, plan: Plan,
    run_dir: RunDir, reporter: Reporter,
) -> tuple[Plan, RunConfig | None]:  # fmt: skip
    """Run a step. If it runs out of device memory, choose the next smaller plan, and run it once more.

    The weights are those before the step, so the result is that of a run that was planned so from the start. The new plan is
    printed and written to ``plan.json``.

    Returns:
        The plan that the run has now, and its settings; None for the settings if they are the old ones.

    Raises:
        DoesNotFitError: there is no smaller plan, or the smaller one does not fit either.
    """
    problem = _out_of_memory(train_step)
    if problem is None:
        return plan, None
    problem = f"step {step} needed more device memory than planned ({problem})"
    if optimizer.partial_update:  # update_in_backward has changed weights
        raise admission.does_not_fit_after_all(plan, f"{problem}, after some weights were updated")
    optimizer.zero_grad()
    smaller = admission.admit_smaller(plan, model._horizon.engine.residency, problem)
    reporter.print(*summary_lines(smaller), f"step {step} runs once more with this smaller plan")
    _reconfigure(model, smaller)
    config = admission.settled(smaller)
    write_plan(smaller, config.device, run_dir.path)
    again = _out_of_memory(train_step)
    if again is not None:
        raise admission.does_not_fit_after_all(
            smaller, f"step {step} needed more device memory than there is, with a smaller plan, too ({again})"
        )
    return smaller, config


def _out_of_memory(train_step: Callable[[], None]) -> str | None:
    """Run a step. Return the first line of the error if the device has too little memory for it; None if it was run."""
    try:
        train_step()
    except Exception as error:
        if not is_out_of_device_memory(error):
            raise
        problem = first_line(error)
    else:
        return None
    gc.collect()  # the error is gone, and with it the frames that held the step's tensors
    return problem


def _reconfigure(model: Any, plan: Plan) -> None:
    """Give a model the choices of a plan."""
    settings, forward = plan.step.settings, model._horizon
    forward.reconfigure(
        replace(
            forward.engine.options,
            device_micro_batch_size=settings.micro_batch,
            head_chunk_tokens=settings.head_chunk_tokens,
            residency=settings.residency,
        )
    )
