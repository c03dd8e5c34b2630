"""Train a streamed model with transformers' Trainer and its subclasses, among them TRL's trainers."""

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any, cast

import torch

from horizon_lm.common.optimizers import by_other_name
from horizon_lm.engine.host.parameters import StreamedParameter
from horizon_lm.engine.streamed import engine_of, forward_of, is_streamed
from horizon_lm.errors import ConfigError, HorizonError, NonFiniteError, StreamingError, first_line
from horizon_lm.integrations import evaluated_models, fused_head, named_models
from horizon_lm.integrations.constructors import arguments_by_name, globals_replaced
from horizon_lm.integrations.distillation import DistilledFromLogits
from horizon_lm.integrations.evaluated_models import EvaluatedModels
from horizon_lm.integrations.held_batches import HeldBatches
from horizon_lm.integrations.trainer_checkpoints import TrainerCheckpoints
from horizon_lm.integrations.trainer_plan import TrainerPlan
from horizon_lm.integrations.trainer_ranks import TrainerRanks
from horizon_lm.integrations.trainer_rows import longest_row
from horizon_lm.optim.choosing import decay_groups, make_optimizer
from horizon_lm.optim.slab_optimizer import SlabOptimizer
from horizon_lm.planning.arithmetic.render import summary_lines
from horizon_lm.planning.arithmetic.request import Machine

# Settings of a Trainer that a streamed model does not support, with the values that leave them off, and the remedy.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "deepspeed": ((None, ""), "a streamed model needs no ZeRO; leave it out"),
    "fsdp": (
        (None, "", [], False),
        "several processes share a streamed model without it (docs/distributed.md); leave it out",
    ),
    "torch_compile": ((None, False), "stream with compile=True, which compiles the blocks"),
    "use_liger_kernel": ((None, False), "the streamed head never makes all logits; leave it out"),
    "fp16": ((None, False), "use bf16, which needs no scaling of the loss"),
    "fp16_full_eval": ((None, False), "choose the precision in horizon_lm.stream()"),
    "bf16_full_eval": ((None, False), "choose the precision in horizon_lm.stream()"),
    "debug": (
        (None, "", []),
        "its hooks read weights, which are not on the device; leave it out: a loss or gradient that is not finite is rejected",
    ),
    "auto_find_batch_size": ((None, False), "the plan knows the memory of a step; leave it out"),
    "use_vllm": ((None, False), "the weights are in host memory; leave it out, and the streamed model generates"),
}


class StreamedTrainer(HeldBatches, EvaluatedModels, TrainerCheckpoints, TrainerRanks):
    """The mixin of `trainer`.

    Attributes:
        streamed_optimizer: the Trainer's optimizer, if it is one of ours; None otherwise.
        planned_machine: another machine that the plan is made for; None for this one.
    """

    streamed_optimizer: SlabOptimizer | None = None
    planned_machine: Machine | None = None
    _optimizer_limit: float | None = None  # the optimizer's own max_grad_norm, beside the one of the arguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = arguments_by_name(type(self), args, kwargs)
        model, arguments = given.get("model"), given.get("args")
        _reject_unsupported(arguments)
        with ExitStack() as replaced:
            if isinstance(model, str):
                loaders = replaced.enter_context(ExitStack())

                def open_trained(name: str, model_class: Any, **options: Any) -> Any:
                    loaders.close()  # further models are evaluated
                    opened = self.open_named(name, named_models.device_of(arguments), model_class, **options)
                    self.prepare_for(opened, given, replaced)
                    return opened

                loaders.enter_context(globals_replaced(type(self), named_models.replaced_loaders(open_trained)))
            elif model is not None:
                self.prepare_for(model, given, replaced)
            super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.model_init is None:  # otherwise, it makes the model that is trained
            _require_streamed(trainer.model)
        _reject_watched_gradients(trainer.callback_handler.callbacks)

    def open_named(self, name: str, device: str, model_class: Any, **options: Any) -> Any:
        """Return the streamed model that the trainer is given by name.

        Args:
            name: its folder or hub id.
            device: the device that trains it.
            model_class: as in `horizon_lm.from_pretrained`.
            options: the arguments that the trainer would give to transformers.
        """
        return named_models.open_named(name, device, model_class, **options)

    def prepare_for(self, model: Any, given: Mapping[str, Any], replaced: ExitStack) -> None:
        """Prepare the constructor's arguments, and the functions of the trainer's modules, for a streamed model.

        Args:
            model: the model that is trained.
            given: the arguments of the constructor.
            replaced: undoes the replacements when the trainer is made.
        """
        _require_streamed(model)
        evaluated_models.prepare_reference({**given, "model": model})
        _leave_head_in_float32(given.get("args"), model)
        replacements: dict[str, Any] = {
            fused_head.ADD_HEAD: fused_head.unless_streamed(model),
            named_models.CREATE_MODEL: evaluated_models.streamed_like(model),
            evaluated_models.COPY_MODEL: evaluated_models.copied_from(model),
            evaluated_models.HASH_MODEL: evaluated_models.hash_of_parts,
        }
        replaced.enter_context(globals_replaced(type(self), replacements))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and let one of several GPUs train a model that may be placed anywhere, as if it were split."""
        super().create_accelerator_and_postprocess()
        trainer: Any = self
        # It is set here: TRL's trainers may replace the arguments before Trainer's own __init__, and check the number right after it.
        if trainer.args.n_gpu > 1 and getattr(trainer.model, "placed_anywhere", False):
            trainer.args._n_gpu = 1

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the model that is trained, and prepare it for several ranks, before the Trainer would wrap it."""
        trainer: Any = self
        _require_streamed(trainer.model)
        if trainer.args.n_gpu > 1:
            raise StreamingError(
                "a process trains on one device; start one process for each with torchrun, or show the trainer one of them, for "
                "example with CUDA_VISIBLE_DEVICES=0"
            )
        self.prepare_ranks()
        return super()._wrap_model(model, *args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the trainer's optimizer, and return it: one of this library, with the Trainer's settings and parameter groups, unless the
        user or the trainer's class has made another, or has named a kind that this library lacks.

        The plan comes first: a run that does not fit ends before the optimizer allocates memory.
        """
        from accelerate.optimizer import AcceleratedOptimizer

        trainer: Any = self
        if isinstance(trainer.optimizer, AcceleratedOptimizer):  # it was created before
            return trainer.optimizer
        self.apply_plan()
        known = by_other_name(getattr(trainer.args.optim, "value", trainer.args.optim))
        if trainer.optimizer is None and self.class_makes_optimizer():
            trainer.optimizer = super().create_optimizer(model)  # type: ignore[misc]
        if trainer.optimizer is None and known is not None and self._may_use_our_optimizer():
            name, moments = known
            trainer.optimizer = self._make_our_optimizer(trainer.model if model is None else model, name, moments)
        if not isinstance(trainer.optimizer, SlabOptimizer):
            return trainer.optimizer or super().create_optimizer(model)  # type: ignore[misc]
        self.streamed_optimizer, self._optimizer_limit = trainer.optimizer, trainer.optimizer.max_grad_norm
        self._clip_in_step()
        # Prepared here, because accelerate would move the optimizer's state to the device.
        trainer.optimizer = AcceleratedOptimizer(trainer.optimizer, device_placement=False)
        trainer.optimizer._is_accelerate_prepared = True
        return trainer.optimizer

    def class_makes_optimizer(self) -> bool:
        """Return whether a subclass of Trainer, among the classes of this trainer, overrides how Trainer makes an optimizer."""
        from transformers import Trainer

        after_mixin = type(self).__mro__[type(self).__mro__.index(StreamedTrainer) + 1 :]
        subclasses = [each for each in after_mixin if each is not Trainer and issubclass(each, Trainer)]
        names = ("create_optimizer", "get_optimizer_cls_and_kwargs")
        return any(name in vars(each) for each in subclasses for name in names)

    def _may_use_our_optimizer(self) -> bool:
        """Return whether our optimizers can be used: the user has named no optimizer class, and some trained weights are streamed."""
        trainer: Any = self
        trained = [param for param in trainer.model.parameters() if param.requires_grad]
        return trainer.optimizer_cls_and_kwargs is None and any(isinstance(p, StreamedParameter) for p in trained)

    def apply_plan(self) -> bool:
        """Plan the steps, apply what the plan chooses, print the plan, and return whether there is one. Raise DoesNotFitError if the steps do not
        fit.

        A plan that cannot be made is no obstacle: the reason is printed, and training begins without one.
        """
        trainer: Any = self
        args, tokenizer = trainer.args, trainer.processing_class
        length, evaluates = longest_row(trainer.train_dataset, args, tokenizer), trainer.eval_dataset is not None
        if length is None:
            self._print(
                "no plan was made, because the length of the longest row is not known; set max_length, or call "
                "horizon_lm.plan(model, args, length=...)"
            )
            return False
        self.reserve_device_memory()
        eval_length = (longest_row(trainer.eval_dataset, args, tokenizer) or length) if evaluates else 0
        try:
            num_steps = trainer.state.max_steps or None
            planned = TrainerPlan(trainer.model, args, length, eval_length, num_steps, self.planned_machine)
            plan = planned.make()
        except HorizonError as error:
            self._print(f"no plan was made: {first_line(error)}")
            return False
        if not plan.fits:
            planned.reject(plan)
        planned.apply(plan)
        for line in (*summary_lines(plan), *planned.generation_lines(plan)):
            self._print(f"plan: {line}")
        return True

    def _print(self, line: str) -> None:
        """Print a line on the first rank."""
        trainer: Any = self
        if trainer.is_world_process_zero():
            print(line)

    def _make_our_optimizer(self, model: Any, name: str, moments: str) -> SlabOptimizer:
        """Return an optimizer of this library, with the weight decay and learning rate of the trainer."""
        trainer: Any = self
        args = trainer.args
        params = decay_groups(model, set(trainer.get_decay_parameter_names(model)), args.weight_decay)
        return make_optimizer(name, model, args, params=params, moments=moments, seed=args.seed)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. Raise ConfigError with the remedy for a set whose reference was not computed before training."""
        try:
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]
        except ValueError as error:
            if evaluated_models.PRECOMPUTE not in str(error):
                raise
            raise ConfigError(
                "the reference of this set was not computed before training; give the set to the trainer as eval_dataset, or a "
                "streamed reference: ref_model=horizon_lm.from_pretrained(name, precision='bf16')"
            ) from error

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run a step of training. Raise NonFiniteError if its loss is NaN or infinite, unless the optimizer skips such steps.

        The gradients of such a loss may be finite: those of a step without targets are zero.
        """
        trainer: Any = self
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        # Exchanged, because all ranks must skip a step, or none.
        value = sum(engine_of(trainer.model).mesh.exchange("the loss of a step", float(loss)))
        if math.isfinite(value):
            return loss
        optimizer = self.streamed_optimizer
        if optimizer is not None and optimizer.skips_non_finite:
            optimizer.reject_step(f"the loss is {value}")
            return loss
        reason = "" if num_items_in_batch is None or num_items_in_batch else ", because none of its rows has a target"
        unchanged = "" if optimizer is not None and optimizer.update_in_backward else "; the weights are unchanged"
        raise NonFiniteError(
            f"the loss of step {trainer.state.global_step + 1} is {value}{reason}{unchanged}. Remedy: check the labels of its rows "
            "(truncated answers, masks), or lower the learning rate"
        )

    def _clip_grad_norm(self, model: Any) -> Any:
        """Return the norm of the gradients. The step clips them, unless a callback may look at them before: then they are clipped here."""
        optimizer = self.streamed_optimizer
        if optimizer is None:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        if self._callbacks_see_gradients():
            optimizer.max_grad_norm = self._optimizer_limit
            return super()._clip_grad_norm(model)  # type: ignore[misc]  # one more pass over the gradients
        self._clip_in_step()
        return optimizer.landed_grad_norm()  # the step clips, while it updates

    def _callbacks_see_gradients(self) -> bool:
        """Return whether a callback may read or change gradients between clipping and the step."""
        from transformers import TrainerCallback

        trainer: Any = self
        event = "on_pre_optimizer_step"
        handlers = (getattr(type(each), event) for each in trainer.callback_handler.callbacks)
        return any(function is not getattr(TrainerCallback, event) for function in handlers)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm of the gradients if the Trainer does not clip them; None if updates in the backward pass have used them up."""
        optimizer = self.streamed_optimizer
        if optimizer is None or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        self._clip_in_step()
        return None if optimizer.update_in_backward else optimizer.landed_grad_norm()

    def _clip_in_step(self) -> None:
        """Let our optimizer clip the gradients while it updates, by the smaller one of the Trainer's present limit and the optimizer's own.

        Raises:
            ConfigError: there is a limit, and updates in the backward pass come before the norm is known.
        """
        trainer, optimizer = cast(Any, self), self.streamed_optimizer
        assert optimizer is not None
        limits = [limit for limit in (trainer.args.max_grad_norm, self._optimizer_limit) if limit]
        if limits and optimizer.update_in_backward:
            raise ConfigError(
                "max_grad_norm: update_in_backward updates weights before the norm of all gradients is known; set "
                "max_grad_norm=0"
            )
        optimizer.max_grad_norm = min(limits, default=None)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Return loss, logits and labels. Logits of all tokens are computed only if somebody asks for them."""
        trainer: Any = self
        horizon = forward_of(trainer.model)
        horizon.whole_logits = not prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        finally:
            horizon.whole_logits = False


@cache
def trainer(cls: type) -> Any:
    """Return a subclass of a Trainer that trains a streamed model, with all micro-batches of a step in one pass.

    Args:
        cls: ``transformers.Trainer`` or a subclass, for example ``trl.SFTTrainer``.

    Raises:
        ConfigError: ``cls`` is no such class.

    Examples:
        >>> from transformers import Trainer, TrainingArguments
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in batch["input_ids"]]
        >>> args = TrainingArguments(use_cpu=True, max_steps=2, save_strategy="no")
        >>> trainer = horizon_lm.trainer(Trainer)(model, args, train_dataset=rows)
        >>> trainer.train().global_step  # the plan comes first
        plan: batch: 8 examples/step...
        2
    """
    from transformers import Trainer

    if not (isinstance(cls, type) and issubclass(cls, Trainer)):
        raise ConfigError(f"trainer takes a subclass of transformers.Trainer, such as trl.SFTTrainer, not {cls!r}")
    if issubclass(cls, StreamedTrainer):
        return cls
    copied = {name: getattr(cls, name) for name in ("__module__", "__doc__", "__qualname__")}
    mixins = (StreamedTrainer, DistilledFromLogits) if _distills(cls) else (StreamedTrainer,)
    return type(cls.__name__, (*mixins, cls), copied)


def _distills(cls: type) -> bool:
    """Return whether a trainer is TRL's for distillation, whose loss takes hidden states and the weights of two heads."""
    owner = next((each for each in cls.__mro__ if "_compute_loss" in vars(each)), None)
    return owner is not None and "_get_last_hidden_state" in vars(owner)


def _require_streamed(model: Any) -> None:
    """Raise StreamingError for a model that is not streamed."""
    if not is_streamed(model):
        raise StreamingError(
            "horizon_lm.trainer(...) trains a streamed model: load it with horizon_lm.from_pretrained(name), or call "
            "horizon_lm.stream(model)"
        )


def _leave_head_in_float32(args: Any, model: Any) -> None:
    """Turn off TRL's cast of the head if the head computes in float32 already. Raise ConfigError if it does not."""
    if not getattr(args, "cast_lm_head_to_fp32", False):
        return
    dtype = engine_of(model).options.compute_dtype
    if dtype != torch.float32:
        raise ConfigError(
            f"{type(args).__name__}: cast_lm_head_to_fp32=True is not supported by a streamed model that computes in {dtype}: its "
            "head has the dtype of its blocks; stream with compute_dtype=torch.float32, or leave it out"
        )
    args.cast_lm_head_to_fp32 = False


def _reject_unsupported(args: Any) -> None:
    """Raise ConfigError if an argument of a Trainer turns on a setting of `_UNSUPPORTED`."""
    for name, (allowed, remedy) in _UNSUPPORTED.items():
        value = getattr(args, name, None)
        if not any(value is each or value == each for each in allowed):
            raise ConfigError(f"{type(args).__name__}: {name}={value!r} is not supported by a streamed model: {remedy}")


def _reject_watched_gradients(callbacks: Iterable[Any]) -> None:
    """Raise ConfigError if transformers' callback of Weights & Biases would add hooks to parameters, which get no gradient on the device."""
    watched = os.environ.get("WANDB_WATCH")
    if watched in ("all", "gradients") and any(type(each).__name__ == "WandbCallback" for each in callbacks):
        raise ConfigError(
            f"WANDB_WATCH={watched} is not supported by a streamed model: gradients land in host memory without passing hooks; set "
            "WANDB_WATCH=parameters, or false"
        )
