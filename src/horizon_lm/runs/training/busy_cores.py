"""Measure how many cores of a run other programs use, and warn if they are many."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple

from horizon_lm.common.other_programs import CoreUse, cores_of_others, missing_cores
from horizon_lm.common.quantities import format_duration
from horizon_lm.runs.training.intervals import Intervals
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.run import Run

_LEAST_SECONDS = 30  # of a measurement, in which a short burst of another program does not count


class BusyCores(Part):
    """Measures the use of the cores in the steps, of all ranks. Only the first long enough measurement may warn.

    Attributes:
        cores_of_others: cores of this run that other programs have used on average, on the machine that lacks most; None until
            enough steps were measured.
    """

    def __init__(self, run: Run) -> None:
        self.cores_of_others: float | None = None
        self._run = run
        self._use_at_start: CoreUse | None = None  # before the first step
        self._num_steps, self._step_seconds = 0, 0.0

    @contextmanager
    def during_step(self, step: int) -> Iterator[None]:
        if self._use_at_start is None:
            self._use_at_start = CoreUse.now()
        begun = time.perf_counter()
        yield
        self._num_steps += 1
        self._step_seconds += time.perf_counter() - begun

    def after_step(self, step: int, due: Intervals) -> None:
        # All ranks have to exchange at the same time. They have no common clock, so the number of steps decides: after 1, 2, 4, 8, ...
        # steps, few exchanges find the first long enough measurement soon.
        is_power_of_two = self._num_steps & (self._num_steps - 1) == 0
        if self._use_at_start is None or not is_power_of_two:
            return
        own_use = CoreUse.now().since(self._use_at_start)
        uses = [CoreUse(*each) for each in self._run.session.ranks.exchange("the use of cores", astuple(own_use))]
        of_first_rank = uses[0]
        if of_first_rank.seconds < _LEAST_SECONDS:  # by one clock, so that all ranks decide the same
            return
        is_first_measurement, worst = self.cores_of_others is None, _uses_on_worst_machine(uses)
        self.cores_of_others = round(max(0.0, missing_cores(worst)), 2)
        if is_first_measurement and (problem := _describe_lack(worst, is_only_machine=len(worst) == len(uses))):
            self._run.session.reporter.print(f"warning: {problem}{self._step_times()}")

    def _step_times(self) -> str:
        """Return the measured and the planned time of a step as the end of the warning."""
        planned = self._run.settings.plan.time
        text = f": a step takes {format_duration(self._step_seconds / self._num_steps)}"
        return text if planned is None else f"{text}, and {format_duration(planned.seconds)} by the plan"


def _uses_on_worst_machine(uses: Sequence[CoreUse]) -> Sequence[CoreUse]:
    """Return the uses of cores by the ranks of the machine that lacks most cores."""
    machines = defaultdict(list)
    for use in uses:
        machines[use.host].append(use)
    return max(machines.values(), key=missing_cores)


def _describe_lack(worst: Sequence[CoreUse], is_only_machine: bool) -> str:
    """Describe the cores that the ranks of a machine lack; empty if these are less than half a core, or a tenth of all that they may use."""
    if missing_cores(worst) < max(0.5, 0.1 * sum(each.usable for each in worst)):
        return ""
    place = "" if is_only_machine else f" of {worst[0].host}"
    return f"other programs use {cores_of_others(worst):.1f} of {worst[0].cores} cores{place}, which may slow this run"
