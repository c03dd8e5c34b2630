"""Call transformers callbacks, both the user's and those of ``report_to``, as a Trainer would."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from horizon_lm.common.optimizers import name_in_transformers
from horizon_lm.distributed.rendezvous import is_first_of_machine
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.training.callback_state import (
    callback_state,
    restore_callbacks,
    restore_trainer_state,
    tracker_environment,
)
from horizon_lm.runs.training.intervals import Control, Intervals
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.trackers import open_trackers, place_lines


class Callbacks(Part):
    """The callbacks of a run. Events are forwarded to them; without callbacks, nothing is imported.

    Requests to end an epoch early are ignored: the rows of a step follow from its number. A tracker that fails is reported
    and not called again. An error of a user's callback stops the training after the step, and is kept for the loop.

    Args:
        config: settings of the run.
        callbacks: the user's instances or classes of `transformers.TrainerCallback`.
        is_first: this is the first of several ranks, which alone opens the trackers of ``report_to``.

    Raises:
        ConfigError: the package of a ``report_to`` service is missing, or transformers or a callback rejects the run.
    """

    def __init__(self, config: RunConfig, callbacks: Sequence[Any], is_first: bool = True) -> None:
        self._steps_per_epoch, self._wandb_project, self._is_first = 1, config.wandb_project, is_first
        self._trackers, self._callbacks = open_trackers(config.report_to) if is_first else [], list(callbacks)
        self._handler: Any = None  # before `begin`, and in a run without callbacks
        self._saved_state: Mapping[str, Any] = {}
        if not (self._trackers or self._callbacks):
            return
        from transformers import TrainingArguments

        try:
            self._args = TrainingArguments(**_training_arguments(config))
        except ImportError as error:
            raise ConfigError(f"callbacks need accelerate, which is not installed ({first_line(error)})") from error
        except ValueError as error:
            raise ConfigError(f"callbacks: transformers' TrainingArguments reject these settings: {error}") from error

    def begin(
        self, model: Any, tokenizer: Any, optimizer: Any, scheduler: Any, intervals: Intervals,
        report: Callable[[str], None], step: int = 0,
    ) -> None:  # fmt: skip
        """Signal the start of training, in a resumed run after the callbacks got their states back.

        Args:
            model, tokenizer, optimizer, scheduler, intervals: of the run.
            report: called with a line about a tracker that fails.
            step: the number of steps that are done.
        """
        if not (self._trackers or self._callbacks):
            return
        from transformers import TrainerControl, TrainerState

        from horizon_lm.runs.training.callback_handler import Handler

        saved, self._steps_per_epoch = self._saved_state, intervals.steps_per_epoch
        self._state, self._control = TrainerState(max_steps=intervals.num_steps, global_step=step), TrainerControl()
        self._handler = Handler(self._trackers, self._callbacks, model, tokenizer, optimizer, scheduler, report)
        if saved:
            restore_trainer_state(saved, self._state)
        self._state.is_world_process_zero = self._is_first
        self._state.is_local_process_zero = is_first_of_machine()
        self._call("on_init_end")
        if saved:
            for name in restore_callbacks(saved, self._handler.callbacks, step):
                report(f"resume: the callback {name} has no state(), so it begins anew")
        with tracker_environment(saved, self._wandb_project):
            self._call("on_train_begin")
        for line in place_lines(self._handler.callbacks):
            report(line)
        of_older = {"should_training_stop": saved.get("stops", False)}  # the only request in older checkpoints
        # Requests from before the interruption are added to the requests made by the events above.
        for name, is_requested in saved.get("control", of_older).items():
            setattr(self._control, name, getattr(self._control, name) or is_requested)
        self._raise_error_of_start()

    def _raise_error_of_start(self) -> None:
        """Raise the first error of a callback, as ConfigError if it rejects the run: nothing was trained yet that could be lost."""
        if isinstance(self.error, AssertionError):  # how transformers' own callbacks reject a run
            raise ConfigError(
                f"callbacks: {self.error}; set eval_strategy: steps or epoch, and add eval_datasets or test_split_size"
            ) from self.error
        if self.error is not None:
            raise self.error

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the callbacks and trackers as plain data."""
        return {} if self._handler is None else callback_state(self._state, self._control, self._handler.callbacks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state that `state_dict` has returned; `begin` restores it."""
        self._saved_state = state

    def before_step(self, step: int) -> None:
        """Signal the start of a step, counted from 1."""
        if self._handler is not None and (step - 1) % self._steps_per_epoch == 0:
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def before_update(self) -> None:
        """Signal that the gradients are complete."""
        self._call("on_pre_optimizer_step")

    def after_update(self, step: int, loss: float, batch: Batch) -> None:
        self._call("on_optimizer_step")

    @property
    def control(self) -> Control:
        """The currently requested actions; any event may change them."""
        if self._handler is None:
            return Control()
        control = self._control
        stop = control.should_training_stop or self.error is not None
        return Control(log=control.should_log, evaluate=control.should_evaluate, save=control.should_save, stop=stop)

    @property
    def error(self) -> BaseException | None:
        """The first error of a user's callback, which stops the training; None if there is none."""
        return None if self._handler is None else self._handler.error

    def after_step(self, step: int, due: Intervals) -> None:
        if self._handler is None or self._state.global_step == step:  # signalled before the run was interrupted
            return
        self._state.global_step, self._state.epoch = step, step / self._steps_per_epoch
        self._call("on_step_end")
        if step % self._steps_per_epoch == 0:
            self._call("on_epoch_end")

    def logged(self, line: Mapping[str, Any]) -> None:
        """Pass on a line of metrics."""
        if self._handler is None:
            return
        logs = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
        self._state.log_history.append({**logs, "step": line["step"]})
        self._call("on_log", logs=logs)
        if "eval_loss" in line:
            self._call("on_evaluate", metrics=logs)
            if line["step"]:  # a Trainer does not count the evaluation before training, either
                self._remember_best(logs)

    def _remember_best(self, logs: Mapping[str, float]) -> None:
        """Keep the best value of the metric, after the callbacks, as in a Trainer: early stopping compares with it."""
        state, name = self._state, str(self._args.metric_for_best_model)  # set in a run that evaluates
        value = logs[f"eval_{name.removeprefix('eval_')}"]
        is_better = operator.gt if self._args.greater_is_better else operator.lt
        if state.best_metric is None or is_better(value, state.best_metric):
            state.best_metric, state.best_global_step = value, state.global_step

    def saved(self) -> None:
        """Signal that a checkpoint was exported."""
        self._call("on_save")

    def end(self) -> None:
        """Signal the end of training."""
        if self._handler is not None and self._state.global_step % self._steps_per_epoch:
            self._call("on_epoch_end")
        self._call("on_train_end")

    def _call(self, event: str, **details: Any) -> None:
        if self._handler is not None:
            self._control = getattr(self._handler, event)(self._args, self._state, self._control, **details)


def _training_arguments(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run that transformers' TrainingArguments also have."""
    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments) if field.init}
    shared = {name: value for name, value in config.model_dump().items() if name in known and value is not None}
    # The loop resumes, saves, reports and pushes itself.
    for name in ("resume_from_checkpoint", "load_best_model_at_end", "save_only_model"):
        shared.pop(name, None)
    shared["optim"] = name_in_transformers(config.optim, config.moments)
    shared |= {"report_to": "none", "push_to_hub": False, "use_cpu": config.device == "cpu"}
    if config.has_held_out:
        shared.setdefault("metric_for_best_model", "loss")
    else:
        shared["eval_strategy"] = "no"
    return {**shared, "output_dir": str(Path(config.output_dir).expanduser())}
