"""The first step of a process, which is run once more with a smaller plan if the device has too little memory for it."""

import gc
from collections.abc import Callable
from dataclasses import replace

from horizon_lm.device.faults import is_out_of_device_memory
from horizon_lm.engine.streamed import engine_of, forward_of
from horizon_lm.errors import first_line
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.render import summary_lines
from horizon_lm.runs.training.resume import rounding_warnings, settings_of
from horizon_lm.runs.training.run import Run, Training


class FirstStep:
    """Runs the first step, whose memory the plan could only estimate."""

    def __init__(self, run: Run, training: Training) -> None:
        self._run, self._training, self._is_first_done = run, training, False

    def run(self, train_step: Callable[[], None], step: int) -> None:
        """Run a step. If it is the first and the device has too little memory, run it once more with a smaller plan.

        The second attempt starts from the weights before the step, so its result is that of a run with the smaller plan.

        Raises:
            DoesNotFitError: the step does not fit with a smaller plan either, has already updated weights, or other ranks
                would have to repeat it, too.
        """
        if self._is_first_done:
            train_step()
            return
        shortage = self._try_step(train_step)
        self._is_first_done = True
        if shortage is None:  # it fitted
            return
        smaller = self._smaller_plan(f"step {step} needed more device memory than planned ({shortage})")
        self._run.session.reporter.print(
            *summary_lines(smaller), f"step {step} is run once more with this smaller plan"
        )
        self._training.optimizer.zero_grad()  # gradients of the failed attempt
        forward = forward_of(self._training.model)
        forward.reconfigure(forward.engine.options.with_choices(smaller.step.settings))
        shortage = self._try_step(train_step)
        if shortage is not None:
            raise self._run.admission.out_of_memory(
                smaller, f"step {step} needed more device memory than there is, with a smaller plan, too ({shortage})"
            )
        self._adopt(smaller, step)

    def _smaller_plan(self, problem: str) -> Plan:
        """Return a plan for the second attempt, with ``problem`` as its first reason. Raise DoesNotFitError if there can be none."""
        plan, admission = self._run.settings.plan, self._run.admission
        if self._run.session.ranks.size > 1:  # the others would have to repeat the step, too
            raise admission.out_of_memory(plan, problem)
        if self._training.optimizer.partial_update:  # by update_in_backward
            raise admission.out_of_memory(plan, f"{problem} after some weights were updated")
        smaller = admission.smaller_plan(plan, engine_of(self._training.model).residency)
        if smaller is None:
            raise admission.out_of_memory(plan, problem)
        return replace(smaller, reasons=[problem, *smaller.reasons])

    def _adopt(self, plan: Plan, step: int) -> None:
        """Use the smaller plan, with which a step was run, for the rest of the run, and write it into the folder of the run."""
        settings, session = self._run.settings, self._run.session
        config_before = settings.config
        settings.use(plan)
        self._training.metrics.plan = plan
        if step > 1:  # the run is a resumed one, whose earlier steps had other settings
            session.reporter.print(*rounding_warnings(settings_of(config_before), settings_of(settings.config)))
        with session.reporter.attempt("plan.json"):
            session.run_dir.write_settings(settings.config, plan)

    def _try_step(self, train_step: Callable[[], None]) -> str | None:
        """Run a step. Return None or, if the device has too little memory for it, the first line of the error."""
        optimizer = self._training.optimizer
        counts_before = optimizer.num_steps, optimizer.num_skipped
        try:
            train_step()
        except Exception as error:
            has_counted = counts_before != (optimizer.num_steps, optimizer.num_skipped)
            if has_counted or not is_out_of_device_memory(error):  # a step that counts must not be repeated
                raise
            shortage = first_line(error)
        else:
            return None
        # Only here, outside of the handler: there, the error still holds frames with the step's tensors.
        gc.collect()
        return shortage
