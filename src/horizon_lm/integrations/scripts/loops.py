"""Loops without a trainer: their models are streamed when accelerate prepares them, or when their first forward pass begins."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from horizon_lm.common.quantities import counted
from horizon_lm.engine.streamed import is_streamed
from horizon_lm.errors import ConfigError, HorizonError, first_line
from horizon_lm.integrations.named_models import device_of
from horizon_lm.integrations.scripts.arguments import reject_unsupported
from horizon_lm.integrations.scripts.streaming import ScriptModels, inside_of, own_precision
from horizon_lm.integrations.trainer_plan import TrainerPlan
from horizon_lm.planning.arithmetic.render import summary_lines

# What a plan reads of the arguments of a Trainer. A loop has none: it is planned with AdamW, and without checkpoints.
_ARGUMENTS = {
    "gradient_accumulation_steps": 1, "max_steps": -1, "optim": "adamw_torch", "output_dir": "", "save_strategy": "no", "save_steps": 0,
    "save_total_limit": None, "save_only_model": True, "load_best_model_at_end": False,
}  # fmt: skip


@dataclass(slots=True)
class _Loop:
    """The training of a model by a loop.

    Attributes:
        began: time of the first pass.
        num_tokens: its tokens.
        is_told: the rate was printed.
    """

    began: float
    num_tokens: int
    is_told: bool = False


class Loops:
    """The loops of a script."""

    def __init__(self, models: ScriptModels) -> None:
        self._models = models
        self._loops: WeakKeyDictionary[Any, _Loop] = WeakKeyDictionary()

    def called(self, original: Callable[..., Any], name: str = "__call__") -> Callable[..., Any]:
        """Return what replaces the call of a model: the model is streamed first, and a plan is made of its first batch.

        Args:
            original: the method.
            name: its name.
        """

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._models.waits(model) is not None:
                self._models.stream_if_possible(model)
                if is_streamed(model):
                    self._models.in_loops.add(inside_of(model))
                    return getattr(type(model), name)(model, *args, **kwargs)
            if (
                inside_of(model) in self._models.in_loops
                and name == "__call__"
                and torch.is_grad_enabled()
                and model.training
            ):
                self._trains(model, kwargs.get("input_ids", args[0] if args else None))
            return original(model, *args, **kwargs)

        return call

    def _trains(self, model: Any, input_ids: Any) -> None:
        """Plan the first training pass of a model, and print the rate when the second one begins."""
        loop = self._loops.get(model)
        if loop is None:
            self._plan(model, input_ids)
            self._loops[model] = _Loop(time.perf_counter(), 0 if input_ids is None else input_ids.numel())
        elif not loop.is_told:
            loop.is_told = True
            seconds = time.perf_counter() - loop.began
            rate = f": {loop.num_tokens / seconds:,.0f} tokens/s" if loop.num_tokens else ""
            self._models.say(f"the first pass took {seconds:.2f} s for {counted(loop.num_tokens, 'token')}{rate}")

    def _plan(self, model: Any, input_ids: Any) -> None:
        """Print the plan of a batch. A plan that cannot be made is no obstacle.

        Raises:
            DoesNotFitError: the batch does not fit.
        """
        if input_ids is None:
            self._models.say("no plan was made, because the first batch has no input_ids")
            self._models.shown(has_plan=False)
            return
        rows, length = input_ids.shape
        planned = TrainerPlan(
            model,
            SimpleNamespace(per_device_train_batch_size=rows, **_ARGUMENTS),
            length,
            machine=self._models.options.machine,
        )
        try:
            plan = planned.make()
        except HorizonError as error:
            self._models.say(f"no plan was made: {first_line(error)}")
            self._models.shown(has_plan=False)
            return
        if not plan.fits:
            planned.reject(plan)
        planned.apply(plan)
        for line in summary_lines(plan):
            print(f"plan: {line}")
        self._models.shown(has_plan=True)

    def observe_accelerate(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Stream the models that `Accelerator.prepare` is given.

        Args:
            replace: replaces an attribute of a class, by its name.
        """
        from accelerate import Accelerator
        from transformers import PreTrainedModel

        original = Accelerator.prepare

        def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            for each in args:
                if isinstance(inside_of(each), PreTrainedModel) and not is_streamed(each):
                    reject_unsupported(accelerator)
                    if accelerator.num_processes > 1:
                        raise ConfigError(
                            f"there are {accelerator.num_processes} processes; a loop of a script's own trains a streamed model in "
                            "one process, and a Trainer in several (docs/distributed.md)"
                        )
                    self._models.stream(each, device_of(accelerator), own_precision(each))
                    self._models.in_loops.add(inside_of(each))
            return original(accelerator, *args, **kwargs)

        replace(Accelerator, "prepare", prepare)
