"""Nothing begins that there is no room for."""

from collections.abc import Iterable

from horizon_lm.config import RunConfig
from horizon_lm.data.loader import Loader
from horizon_lm.data.table import TokenTable
from horizon_lm.plan.plan import Plan
from horizon_lm.preflight.machine import this_machine
from horizon_lm.preflight.rows import RowShape
from horizon_lm.preflight.run import does_not_fit, plan_run, remedies_of
from horizon_lm.preflight.source import open_source

_USUAL_LENGTH = 1024  # of rows, where nothing limits it


class Admission:
    """Lets a run begin if there is room for it. ``run.device`` is one that exists, not ``auto``."""

    def __init__(self, run: RunConfig) -> None:
        self._run, self._source = run, open_source(run)

    def refuse_hopeless(self) -> None:
        """Before rows are read: DoesNotFitError for a run that would not fit with the shortest rows either."""
        run, machine = self._run, this_machine(self._run)
        length = run.max_length or _USUAL_LENGTH
        plan = plan_run(run, self._source, machine, rows=RowShape(length, length), priced=False)
        shortest = RowShape(1, 1, masked=False, distinct_tokens=1)
        if not plan.fits and not plan_run(run, self._source, machine, rows=shortest, priced=False).fits:
            self._refuse(plan)

    def admit(
        self, loader: Loader, held_out: Iterable[TokenTable], num_steps: int, num_checkpoints: int, prompt_length: int
    ) -> Plan:
        """The plan for these rows; DoesNotFitError with what would make it fit."""
        shape = RowShape.of(loader, held_out, prompt_length)
        plan = plan_run(
            self._run, self._source, this_machine(self._run), rows=shape, num_steps=num_steps,
            num_checkpoints=num_checkpoints,
        )  # fmt: skip
        if not plan.fits:
            self._refuse(plan)
        return plan

    def _refuse(self, plan: Plan) -> None:
        raise does_not_fit(plan, remedies_of(plan, self._run, self._source))
