"""The first step of a process, which is run once more with a smaller plan if the device has too little memory for it."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from horizon_lm.device.faults import is_out_of_device_memory
from horizon_lm.engine.streamed import engine_of, forward_of
from horizon_lm.errors import first_line
from horizon_lm.planning.plan import Plan
from horizon_lm.planning.render import summary_lines
from horizon_lm.preflight.admission import Admission
from horizon_lm.training.metrics import Reporter


@dataclass
class FirstStep:
    """Runs the first step, whose memory the plan could only estimate.

    Args:
        model: the streamed model.
        optimizer: its optimizer.
        admission: finds smaller plans.
        reporter: prints the smaller plan.
        is_alone: there are no other ranks, which would have to repeat the step, too.
    """

    model: Any
    optimizer: Any
    admission: Admission
    reporter: Reporter
    is_alone: bool = True
    is_over: bool = False

    def run(self, train_step: Callable[[], None], step: int, plan: Plan) -> Plan:
        """Run a step. If it is the first and the device has too little memory, run it once more with a smaller plan.

        The second attempt starts from the weights before the step, so its result is that of a run with the smaller plan.

        Args:
            train_step: runs the step.
            step: its number, for messages.
            plan: the plan of the run.

        Returns:
            The plan with which the step was run.

        Raises:
            DoesNotFitError: the step does not fit with a smaller plan either, has already updated weights, or other ranks share it.
        """
        if self.is_over:
            train_step()
            return plan
        shortage = self._try(train_step)
        self.is_over = True
        if shortage is None:
            return plan
        problem = f"step {step} needed more device memory than planned ({shortage})"
        if not self.is_alone:
            raise self.admission.out_of_memory(plan, problem)
        if self.optimizer.partial_update:  # with update_in_backward
            raise self.admission.out_of_memory(plan, f"{problem} after some weights were updated")
        smaller = self.admission.smaller_plan(plan, engine_of(self.model).residency)
        if smaller is None:
            raise self.admission.out_of_memory(plan, problem)
        smaller = replace(smaller, reasons=[problem, *smaller.reasons])
        self.reporter.print(*summary_lines(smaller), f"step {step} is run once more with this smaller plan")
        # Nothing of the failed step is left on the device.
        self.optimizer.zero_grad()
        forward = forward_of(self.model)
        forward.reconfigure(forward.engine.options.with_choices(smaller.step.settings))
        shortage = self._try(train_step)
        if shortage is not None:
            raise self.admission.out_of_memory(
                smaller, f"step {step} needed more device memory than there is, with a smaller plan, too ({shortage})"
            )
        return smaller

    def _try(self, train_step: Callable[[], None]) -> str | None:
        """Run a step. If the device has too little memory for it, return the first line of the error."""
        done = self.optimizer.num_steps, self.optimizer.num_skipped
        try:
            train_step()
        except Exception as error:
            counted = done != (self.optimizer.num_steps, self.optimizer.num_skipped)  # so it must not be repeated
            if counted or not is_out_of_device_memory(error):
                raise
            shortage = first_line(error)
        else:
            return None
        gc.collect()  # the error is gone, and with it the frames that held the step's tensors
        return shortage
