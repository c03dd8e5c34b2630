"""Settings of the steps of a run: how many, of how many rows, and what the optimizer does."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from horizon_lm.config.engine import EngineSettings
from horizon_lm.config.types import Share, StepsOrShare, UnusedError

_WITHOUT_WARMUP = ("constant",)


class TrainingSettings(EngineSettings):
    """Steps and optimizer"""

    num_train_epochs: PositiveFloat = Field(3.0, description="Passes over the rows; a fraction is allowed.")
    max_steps: int = Field(-1, description="Steps to train for, instead of num_train_epochs; -1 for not set.")
    per_device_train_batch_size: PositiveInt = Field(
        8, description="Rows of a step, times gradient_accumulation_steps."
    )
    gradient_accumulation_steps: PositiveInt = Field(
        1, description="Factor on the rows of a step; they still run as one forward and one backward."
    )
    seed: int = Field(42, ge=0, description="Of dropout and of stochastic rounding.")
    data_seed: int | None = Field(None, ge=0, description="Of the order of rows; null for seed.")

    learning_rate: PositiveFloat = Field(2e-5, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
    ] = Field("linear", description="How the learning rate falls, as in transformers.")  # fmt: skip
    lr_scheduler_kwargs: dict[str, Any] | None = Field(
        None, description="More settings of that schedule, such as {num_decay_steps: 100} for warmup_stable_decay."
    )
    warmup_steps: StepsOrShare = Field(
        0, description="Steps in which the learning rate rises: a number, or a share of all steps below 1."
    )
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Decay of AdamW, on all weights but biases and those of norms."
    )
    adam_beta1: Share = Field(0.9, description="Decay rate of AdamW's first moment.")
    adam_beta2: Share = Field(0.999, description="Decay rate of AdamW's second moment.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="Added to AdamW's denominator.")
    max_grad_norm: NonNegativeFloat = Field(
        1.0, description="Gradients are scaled down to this global norm; 0 for no clipping."
    )
    non_finite: Literal["raise", "skip"] = Field(
        "raise",
        description="At a NaN or infinite gradient: stop with the weights as they were, or leave out that step.",
    )
    max_consecutive_skips: PositiveInt | None = Field(
        3,
        description="With non_finite: skip, a run ends when more steps in a row than this are left out; null for no end.",
    )
    update_in_backward: bool = Field(
        False,
        description="Update a unit as soon as its gradient has landed and keep no gradients, 2 bytes per parameter less.",
    )

    @property
    def rows_per_step(self) -> int:
        """Rows that make one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @field_validator("max_steps")
    @classmethod
    def _one_measure_of_length(cls, value: int, info: ValidationInfo) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be at least 1, or -1 for not set")
        if value != -1 and info.data.get("num_train_epochs", 3.0) != 3.0:
            raise ValueError("takes the place of num_train_epochs, which is set too; remove one of the two")
        return value

    @field_validator("update_in_backward")
    @classmethod
    def _nothing_waits_for_all_gradients(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("max_grad_norm"):
            raise ValueError("cannot clip by the norm of gradients that are not all known yet; set max_grad_norm: 0")
        if value and info.data.get("non_finite") == "skip":
            raise ValueError("cannot skip a step of which a part is done; remove non_finite: skip")
        if value and info.data.get("check_gradients"):
            raise ValueError(
                "keeps no gradients to check; set check_gradients: 0, and check in a run of one step without it"
            )
        return value

    @field_validator("max_consecutive_skips")
    @classmethod
    def _skips_something(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value != cls.model_fields["max_consecutive_skips"].default and info.data.get("non_finite") == "raise":
            raise UnusedError("is not used without non_finite: skip; set it, or remove this")
        return value

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _schedule_has_settings(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("lr_scheduler_type") in ("constant", "constant_with_warmup"):
            raise UnusedError(f"is not used by lr_scheduler_type: {info.data['lr_scheduler_type']}; remove it")
        return value

    @field_validator("warmup_steps")
    @classmethod
    def _schedule_has_warmup(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("lr_scheduler_type") in _WITHOUT_WARMUP:
            raise UnusedError("is not used by lr_scheduler_type: constant; choose constant_with_warmup")
        return value
