"""Warn if other programs use the cores of a run."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple

from horizon_lm.doctor.other_programs import CoreUse, cores_of_others, missing_cores
from horizon_lm.training.intervals import Intervals
from horizon_lm.training.part import Part
from horizon_lm.training.run import Run

_LEAST_SECONDS = 30  # of a measurement, in which a short burst of another program does not count


class BusyCores(Part):
    """Measures the use of the cores in the first steps, of all ranks, and warns once."""

    def __init__(self, run: Run) -> None:
        self._run, self._is_over = run, False
        self._began: CoreUse | None = None
        self._num_steps, self._step_seconds = 0, 0.0

    @contextmanager
    def during_step(self, step: int) -> Iterator[None]:
        if self._began is None:
            self._began = CoreUse.now()
        begun = time.perf_counter()
        yield
        self._num_steps += 1
        self._step_seconds += time.perf_counter() - begun

    def after_step(self, step: int, due: Intervals) -> None:
        # Ranks exchange their times after 1, 2, 4, 8, ... steps, because they have no common clock.
        is_power_of_two = self._num_steps & (self._num_steps - 1) == 0
        if self._is_over or self._began is None or not is_power_of_two:
            return
        use = CoreUse.now().since(self._began)
        ranks = [CoreUse(*each) for each in self._run.session.ranks.exchange("the use of cores", astuple(use))]
        self._is_over = ranks[0].seconds >= _LEAST_SECONDS
        if self._is_over and (problem := _problem(ranks)):
            self._run.session.reporter.print(f"warning: {problem}{self._slowness()}")

    def _slowness(self) -> str:
        """Return the measured time of a step, and the planned one."""
        planned = self._run.settings.plan.time
        text = f": a step takes {_seconds(self._step_seconds / self._num_steps)}"
        return text if planned is None else f"{text}, and {_seconds(planned.seconds)} by the plan"


def _problem(ranks: Sequence[CoreUse]) -> str:
    """Describe the machine that lacks most cores; an empty text if none lacks so many that it matters."""
    machines = defaultdict(list)
    for each in ranks:
        machines[each.host].append(each)
    host, worst = max(machines.items(), key=lambda item: missing_cores(item[1]))
    if missing_cores(worst) < max(0.5, 0.1 * sum(each.usable for each in worst)):
        return ""
    place = f" of {host}" if len(machines) > 1 else ""
    return f"other programs use {cores_of_others(worst):.1f} of {worst[0].cores} cores{place}, which may slow this run"


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:,.0f} s"
