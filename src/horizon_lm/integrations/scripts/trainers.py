"""Let every trainer that a script makes train streamed models."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from horizon_lm.engine.streamed import is_streamed
from horizon_lm.integrations.named_models import device_of
from horizon_lm.integrations.scripts.arguments import kept_arguments, reject_unsupported
from horizon_lm.integrations.scripts.streaming import ScriptModels, inside_of, own_precision, trained_precision
from horizon_lm.integrations.trainer import trainer
from horizon_lm.integrations.trainer_ranks import mesh_of


class ScriptTrainer:
    """A mixin for classes that `horizon_lm.trainer` returns: streams the models that the script gives to the trainer.

    Attributes:
        script_models: the models of the script.
        horizon_tokens: tokens of the micro-batches since the rate was printed.
    """

    script_models: ScriptModels
    horizon_tokens = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        trainer.add_callback(_Rate(self))

    def open_named(self, name: str, device: str, model_class: Any, **options: Any) -> Any:
        """Return the streamed model that the trainer is given by name, with the arguments that a script may give."""
        kept = kept_arguments(options, self.script_models.say)
        return self.script_models.open_named(name, device, model_class, **kept)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator. Raise ConfigError if `accelerate launch` has set up for it what a streamed model does not support."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        reject_unsupported(trainer.accelerator)

    def call_model_init(self, trial: Any = None) -> Any:
        """Return the model that the script's ``model_init`` makes, streamed."""
        trainer: Any = self
        model = super().call_model_init(trial)  # type: ignore[misc]
        self._stream(model, {"args": trainer.args})
        return model

    def prepare_for(self, model: Any, given: Mapping[str, Any], replaced: ExitStack) -> None:
        self._stream(model, given)
        super().prepare_for(model, given, replaced)  # type: ignore[misc]

    def _stream(self, model: Any, given: Mapping[str, Any]) -> None:
        """Stream the model that is trained, to the device of the trainer's arguments.

        Args:
            model: the model, which may be streamed already.
            given: arguments of the trainer's constructor.
        """
        self.script_models.in_loops.discard(inside_of(model))
        if is_streamed(model):
            self.script_models.num_streamed = max(1, self.script_models.num_streamed)  # by the script itself
            return
        if not isinstance(inside_of(model), PreTrainedModel):
            return
        args, (optimizer, _) = given.get("args"), given.get("optimizers") or (None, None)
        named = given.get("optimizer_cls_and_kwargs")
        is_own = optimizer is not None or named is not None or self.class_makes_optimizer()  # type: ignore[attr-defined]
        precision = own_precision(model) if is_own else trained_precision(model, args)
        self.script_models.stream(model, device_of(args), precision)

    def apply_plan(self) -> bool:
        has_plan: bool = super().apply_plan()  # type: ignore[misc]
        self.script_models.shown(has_plan)
        return has_plan

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of training, and count its tokens."""
        if (ids := inputs.get("input_ids")) is not None:
            mask = inputs.get("attention_mask")
            self.horizon_tokens += int(mask.sum()) if mask is not None and mask.shape == ids.shape else ids.numel()
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


class _Rate(TrainerCallback):  # type: ignore[misc]
    """A callback that prints the rate of the first step, and of all others at the end."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._began, self._first = trainer, 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._first = time.perf_counter(), state.global_step
        self._trainer.horizon_tokens = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._first + 1:
            self._print("the first step", 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (num_steps := state.global_step - self._first - 1) > 0:
            self._print("a step after it", num_steps)

    def _print(self, what: str, num_steps: int) -> None:
        """Print the rate since the last time."""
        seconds, num_tokens = time.perf_counter() - self._began, self._trainer.horizon_tokens
        self._began, self._trainer.horizon_tokens = time.perf_counter(), 0
        of_process = " in this process" if mesh_of(self._trainer.model).size > 1 else ""
        rate = f", {num_tokens / seconds:,.0f} tokens/s{of_process}" if num_tokens else ""
        self._trainer.script_models.say(f"{what} took {seconds / num_steps:.2f} s{rate}")


def made_by_scripts(models: ScriptModels) -> Callable[..., Any]:
    """Return a replacement of ``Trainer.__new__`` that makes an instance of a subclass which trains streamed models.

    The constructor that follows is that of the subclass. So the trainers of TRL and those of the script are found without a list.
    """

    @cache
    def streamed_class(cls: Any) -> Any:
        if issubclass(cls, ScriptTrainer):
            return cls
        copied = {name: getattr(cls, name) for name in ("__module__", "__doc__", "__qualname__")}
        return type(
            cls.__name__,
            (ScriptTrainer, trainer(cls)),
            copied | {"script_models": models, "planned_machine": models.options.machine},
        )

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(streamed_class(cls))

    return new
