"""Call transformers callbacks one by one, so that a failing one does not end the run."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from horizon_lm.errors import first_line


class _LoopFlow(DefaultFlowCallback):  # type: ignore[misc]
    """Request nothing: the loop decides when to log, evaluate and save."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return control


class Handler(CallbackHandler):  # type: ignore[misc]
    """A handler that survives its callbacks' errors. One that has failed is not called again.

    Args:
        trackers: callbacks whose failure is only reported.
        callbacks: the user's instances or classes.
        model, tokenizer, optimizer, scheduler: arguments of the callbacks.
        report: called with a line for people.

    Attributes:
        error: the first error of a user's callback.
    """

    def __init__(
        self, trackers: Sequence[Any], callbacks: Sequence[Any], model: Any, tokenizer: Any, optimizer: Any, scheduler: Any,
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__([_LoopFlow(), *trackers, *callbacks], model, tokenizer, optimizer, scheduler)
        self._trackers, self._report = list(trackers), report
        self.error: BaseException | None = None

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Forward an event to all callbacks, and return the control with their requests. Drop the callbacks that fail."""
        working = []
        for callback in self.callbacks:
            self.callbacks = [callback]  # the base class calls the callbacks of this list
            try:
                control = super().call_event(event, args, state, control, **kwargs)
                working.append(callback)
            except (Exception, SystemExit) as error:
                self._report_failure(error, callback)
        self.callbacks = working
        return control

    def _report_failure(self, error: BaseException, callback: Any) -> None:
        """Report a failed callback. The run goes on without a tracker; the error of a user's callback is kept, and stops it."""
        name = type(callback).__name__
        if any(callback is tracker for tracker in self._trackers):
            self._report(f"warning: report_to: {name} failed and gets no more metrics ({first_line(error)})")
            return
        self._report(f"warning: {name} failed ({type(error).__name__}: {first_line(error)}); stopping after this step")
        self.error = self.error or error
