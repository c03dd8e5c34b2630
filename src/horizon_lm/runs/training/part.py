"""A part of a run: its work besides training, at the moments of the loop."""

from contextlib import AbstractContextManager, nullcontext

from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.training.intervals import Control, Intervals


class Part:
    """A part of a run, which does nothing. Subclasses override the moments that they need; steps are counted from 1.

    A state is kept by ``training.state.keep(name, part)`` in the constructor, with `state_dict` and `load_state_dict`.
    """

    @property
    def control(self) -> Control:
        """The actions that this part requests now. A request of one part on one rank counts for all.

        Reading it changes nothing, because it is read many times a step. A request stands from `after_step` until `before_step`
        withdraws it: nobody reports that it was met. If it depends on a clock, ask the first rank's (`Ranks.of_first`), or ranks
        would make the request after different steps.
        """
        return Control()

    def before_step(self, step: int) -> None:
        """Act before a step."""

    def during_step(self, step: int) -> AbstractContextManager[None]:
        """Return a context manager to run a step in."""
        return nullcontext()

    def before_update(self) -> None:
        """Act once the gradients of a step are complete."""

    def after_update(self, step: int, loss: float, batch: Batch) -> None:
        """Act after an update. Gradients and learning rate still have the values used in it."""

    def after_step(self, step: int, due: Intervals) -> None:
        """Act after a step. In a run that was interrupted here and is resumed, all parts do so again."""

    def finish(self, step: int) -> None:
        """Act after the last step, before the model is exported, and before an interrupted run ends. May be called twice."""

    def end(self) -> None:
        """Act once the model is exported and evaluated."""
