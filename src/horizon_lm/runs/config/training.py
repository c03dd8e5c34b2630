"""Settings of training length, batches and optimizer."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from horizon_lm.common.optimizers import OPTIMIZERS, users_of
from horizon_lm.runs.config.rules import Needs, OnResume, UnusedError
from horizon_lm.runs.config.types import Count, Fraction, Norm, OptimizerName, Settings, StepsOrFraction

MAX_ROWS_PER_STEP = 65_536  # what a plan of seconds can try in all sizes of micro-batches


class TrainingSettings(Settings):
    """Length, batch size, learning rate and optimizer."""

    heading: ClassVar[str] = "Training"

    num_train_epochs: PositiveFloat = Field(
        3.0, ge=1e-6, le=1e6, description="Number of passes over the training rows; may be a fraction."
    )
    max_steps: int = Field(
        -1, le=2**31, description="Number of optimizer steps. Takes precedence over num_train_epochs; -1 for not set."
    )
    per_device_train_batch_size: Annotated[PositiveInt, OnResume.ROUNDING] = Field(
        8,
        le=MAX_ROWS_PER_STEP,
        description="Rows of each process per optimizer step, before gradient_accumulation_steps multiplies them.",
    )
    gradient_accumulation_steps: Annotated[PositiveInt, OnResume.ROUNDING] = Field(
        1,
        le=MAX_ROWS_PER_STEP,
        description="Multiplier of the rows per step; they still run as one forward and one backward pass.",
    )
    seed: int = Field(42, ge=0, lt=2**32, description="Seed of dropout and of stochastic rounding.")
    data_seed: int | None = Field(
        None, ge=0, lt=2**32, description="Seed for shuffling, splitting and sampling rows. Default: seed."
    )

    optim: Annotated[OptimizerName, OnResume.STATE] = Field(
        "adamw", description=f"Optimizer: {' or '.join(OPTIMIZERS)}, or transformers' name for it, such as adamw_torch."
    )
    learning_rate: PositiveFloat = Field(2e-5, le=1e3, description="Peak learning rate.")
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
    ] = Field("linear", description="Learning rate schedule, as in transformers.")  # fmt: skip
    lr_scheduler_kwargs: dict[str, Any] | None = Field(
        None,
        description="Further arguments of the schedule, such as {num_decay_steps: 100} for warmup_stable_decay.",
    )
    warmup_steps: StepsOrFraction = Field(
        0, description="Steps of learning rate warmup, or a fraction of all steps if below 1."
    )
    weight_decay: NonNegativeFloat = Field(
        0.0, le=1e3, description="Decoupled weight decay, applied to all weights except biases and norms."
    )
    adam_beta1: Fraction = Field(
        0.9, description="First beta of the optimizer: in AdamW, the decay rate of the first moment."
    )
    adam_beta2: Fraction = Field(
        0.999, description="Second beta of the optimizer: in AdamW, the decay rate of the second moment."
    )
    adam_epsilon: Annotated[PositiveFloat, Needs(optim=users_of("adam_epsilon"))] = Field(
        1e-8,
        le=1,
        description="Term added to the denominator of AdamW, and of Muon's part for other parameters, for numerical stability.",
    )
    max_grad_norm: Norm = Field(1.0, description="Global norm that gradients are clipped to; 0 for no clipping.")
    non_finite: Annotated[Literal["raise", "skip"], OnResume.FREE] = Field(
        "raise",
        description="On a NaN or infinite gradient, end the run with the weights unchanged (raise) or skip the step (skip).",
    )
    max_consecutive_skips: Annotated[Count | None, OnResume.FREE, Needs(non_finite="skip")] = Field(
        3,
        description="With non_finite: skip, end the run after more than this many skipped steps in a row; null for no limit.",
    )
    update_in_backward: Annotated[bool, Needs(optim=users_of("update_in_backward"))] = Field(
        False,
        description="Update each unit as soon as its gradient has reached the host, and store no gradients. "
        "Saves 2 bytes per parameter; needs max_grad_norm: 0.",
    )

    @property
    def rows_per_step(self) -> int:
        """The number of rows in one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @field_validator("gradient_accumulation_steps")
    @classmethod
    def _reject_huge_steps(cls, value: int, info: ValidationInfo) -> int:
        if value * info.data.get("per_device_train_batch_size", 1) > MAX_ROWS_PER_STEP:
            raise ValueError(f"more than {MAX_ROWS_PER_STEP:,} rows per step; set a smaller number")
        return value

    @field_validator("max_steps")
    @classmethod
    def _reject_no_steps(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be at least 1, or -1 for not set")
        return value

    @field_validator("update_in_backward")
    @classmethod
    def _reject_use_of_all_gradients(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("max_grad_norm"):
            raise ValueError("cannot clip by the norm of gradients that are not all computed yet; set max_grad_norm: 0")
        if value and info.data.get("non_finite") == "skip":
            raise ValueError("cannot skip a step that is already partly applied; remove non_finite: skip")
        if value and info.data.get("check_gradients"):
            raise ValueError(
                "keeps no gradients to check; set check_gradients: 0, and check in a run of one step without it"
            )
        return value

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _needs_schedule_with_arguments(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("lr_scheduler_type") in ("constant", "constant_with_warmup"):
            raise UnusedError(f"is not used by lr_scheduler_type: {info.data['lr_scheduler_type']}; remove it")
        return value

    @field_validator("warmup_steps")
    @classmethod
    def _needs_schedule_with_warmup(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("lr_scheduler_type") == "constant":
            raise UnusedError("is not used by lr_scheduler_type: constant; choose constant_with_warmup")
        return value
