"""transformers' callbacks: those behind ``report_to``, and the user's own. They are told of a run as a Trainer would."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.errors import ConfigError, first_line


@dataclass(frozen=True, slots=True)
class Control:
    """What callbacks ask for after a step."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False


class Callbacks:
    """Tells callbacks what happens, and listens to what they ask for. Without callbacks nothing is imported.

    A wish to end an epoch before its last row is not heeded: a step's rows follow from its number.

    Args:
        config: of the run.
        own: instances or classes of `transformers.TrainerCallback`.

    Raises:
        ConfigError: a service of ``report_to`` whose package is not installed, or settings that transformers or a callback
            refuses.
    """

    def __init__(self, config: RunConfig, own: Sequence[Any], num_steps: int, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._wanted = [*_reporters(config.report_to), *own]
        self._handler: Any = None
        if not self._wanted:
            return
        from transformers import TrainerControl, TrainerState, TrainingArguments

        try:
            self._args = TrainingArguments(**_shared(config))
        except ImportError as error:
            raise ConfigError(f"callbacks need accelerate, which is not installed ({first_line(error)})") from error
        except ValueError as error:
            raise ConfigError(f"callbacks: transformers' TrainingArguments refuse the run: {error}") from error
        self._state, self._control = TrainerState(max_steps=num_steps, log_history=[]), TrainerControl()

    def begin(self, model: Any, tokenizer: Any, optimizer: Any, scheduler: Any) -> None:
        """Training begins."""
        if not self._wanted:
            return
        from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

        class OurFlow(DefaultFlowCallback):  # type: ignore[misc]
            """The loop itself decides when to log, evaluate and save."""

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                return control

            def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                return control

        self._handler = CallbackHandler([OurFlow(), *self._wanted], model, tokenizer, optimizer, scheduler)
        self._tell("on_init_end")
        try:
            self._tell("on_train_begin")
        except AssertionError as error:  # as transformers' own callbacks refuse a run
            raise ConfigError(f"callbacks: {error}; set eval_strategy: steps or epoch, and hold out rows") from error

    def before_step(self, step: int) -> None:
        """Step ``step``, from 1, begins."""
        if self._handler is not None and (step - 1) % self._steps_per_epoch == 0:
            self._tell("on_epoch_begin")
        self._tell("on_step_begin")

    def before_update(self) -> None:
        """Gradients are there."""
        self._tell("on_pre_optimizer_step")

    def after_update(self) -> None:
        """Weights are new, gradients and learning rate are those of the update."""
        self._tell("on_optimizer_step")

    @property
    def control(self) -> Control:
        """What callbacks wish for now: any event may change it."""
        if self._handler is None:
            return Control()
        control = self._control
        return Control(control.should_log, control.should_evaluate, control.should_save, control.should_training_stop)

    def after_step(self, step: int) -> None:
        """Step ``step`` is done."""
        if self._handler is None:
            return
        self._state.global_step, self._state.epoch = step, step / self._steps_per_epoch
        self._tell("on_step_end")
        if step % self._steps_per_epoch == 0:
            self._tell("on_epoch_end")

    def logged(self, line: Mapping[str, Any]) -> None:
        """A line of metrics was written."""
        if self._handler is None:
            return
        logs = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
        self._state.log_history.append({**logs, "step": line["step"]})
        self._tell("on_log", logs=logs)
        if "eval_loss" in line:
            self._tell("on_evaluate", metrics=logs)
            if line["step"]:  # a Trainer, too, begins with what training has made
                self._remember_best(logs)

    def _remember_best(self, logs: Mapping[str, float]) -> None:
        """As a Trainer does, after its callbacks have been told: some stop a run that gets no better."""
        state, value = self._state, logs["eval_loss"]
        if state.best_metric is None or value < state.best_metric:
            state.best_metric, state.best_global_step = value, state.global_step

    def saved(self) -> None:
        """The model was exported."""
        self._tell("on_save")

    def end(self) -> None:
        """Training is over."""
        if self._handler is not None and self._state.global_step % self._steps_per_epoch:
            self._tell("on_epoch_end")
        self._tell("on_train_end")

    def _tell(self, event: str, **details: Any) -> None:
        if self._handler is not None:
            self._control = getattr(self._handler, event)(self._args, self._state, self._control, **details)


def _reporters(wanted: str | Sequence[str]) -> list[Any]:
    if wanted in ("none", ["none"]):
        return []
    from transformers.integrations import get_reporting_integration_callbacks

    names = [wanted] if isinstance(wanted, str) else list(wanted)
    reporters = []
    for callback in get_reporting_integration_callbacks("all" if names == ["all"] else names):
        try:
            reporters.append(callback())
        except (RuntimeError, ImportError) as error:
            raise ConfigError(f"report_to: {first_line(error)}") from error
    return reporters


def _shared(config: RunConfig) -> dict[str, Any]:
    """A run's settings as far as transformers' TrainingArguments have them."""
    from transformers import TrainingArguments

    theirs = {field.name for field in fields(TrainingArguments) if field.init}
    ours = {name: value for name, value in config.model_dump().items() if name in theirs and value is not None}
    ours |= {"report_to": "none", "push_to_hub": False, "use_cpu": config.device == "cpu"}  # the loop does it
    if config.has_held_out:
        ours["metric_for_best_model"] = "loss"
    else:
        ours["eval_strategy"] = "no"
    return {**ours, "output_dir": str(Path(config.output_dir).expanduser())}
