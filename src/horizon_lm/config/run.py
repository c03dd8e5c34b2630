"""A training run: what all have, and what each objective adds."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from horizon_lm.config.data import WITHOUT_ROWS
from horizon_lm.config.output import OutputSettings
from horizon_lm.config.types import UnusedError, as_list


class RunConfig(OutputSettings):
    """A training run. One sentence a field; what a run would not use is refused."""


class TextConfig(RunConfig):
    """Settings of runs whose loss is that of each token."""

    packing: bool = Field(
        False, description="Put several rows into one of max_length; they do not see each other. Needs TRL."
    )
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = Field(
        "bfd", description="How: bfd cuts long rows, bfd_split keeps their rest, wrapped cuts anywhere and joins rows."
    )
    eval_packing: bool | None = Field(None, description="Pack held-out rows; null for as packing says.")
    label_smoothing_factor: float = Field(
        0.0, ge=0, lt=1, description="The share of each target that is spread over the whole vocabulary."
    )

    @field_validator("packing")
    @classmethod
    def _packs_up_to_a_length(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("max_length", 1) is None:
            raise ValueError("needs a max_length to pack up to, which is null")
        return value

    @field_validator("packing_strategy")
    @classmethod
    def _packs_something(cls, value: str, info: ValidationInfo) -> str:
        if value != "bfd" and not info.data.get("packing", True):
            raise UnusedError("is not used without packing: true")
        return value

    @field_validator("eval_packing")
    @classmethod
    def _packs_held_out_rows(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        held_out = [info.data.get(name, ...) for name in ("eval_datasets", "test_split_size")]
        if value is not None and held_out == [None, None]:
            raise UnusedError("is not used without eval_datasets or test_split_size; add one, or remove it")
        if value and info.data.get("max_length", 1) is None:
            raise ValueError("needs a max_length to pack up to, which is null")
        return value


class SftConfig(TextConfig):
    """Supervised fine-tuning."""

    train_on: Literal["assistant", "completion", "all"] | None = Field(
        None,
        description="Tokens to train on: the assistant's, those after the prompt, or all; null for what suits the rows.",
    )
    loss_type: Literal["nll", "dft"] = Field(
        "nll", description="nll, or dft: each token's loss weighed by its probability (arXiv 2508.05629)."
    )

    @field_validator("loss_type")
    @classmethod
    def _one_change_of_the_loss(cls, value: str, info: ValidationInfo) -> str:
        if value == "dft" and info.data.get("label_smoothing_factor"):
            raise ValueError("cannot be combined with label_smoothing_factor; remove one of the two")
        return value


class PretrainConfig(TextConfig):
    """Continued pre-training on text."""

    objective: Literal["sft", "pretrain", "dpo"] = Field(
        "pretrain", description=TextConfig.model_fields["objective"].description
    )


DpoLoss = Literal["sigmoid", "hinge", "ipo", "robust"]


class DpoConfig(RunConfig):
    """Direct preference optimisation (arXiv 2305.18290)."""

    objective: Literal["sft", "pretrain", "dpo"] = Field(
        "dpo", description=RunConfig.model_fields["objective"].description
    )
    learning_rate: PositiveFloat = Field(1e-6, description=RunConfig.model_fields["learning_rate"].description)
    beta: PositiveFloat = Field(0.1, description="How strongly the model is held to the one it starts from.")
    loss_type: Annotated[list[DpoLoss], BeforeValidator(as_list), Field(min_length=1)] = Field(
        ["sigmoid"], description="sigmoid, hinge, ipo or robust; or a list of them, whose sum is the loss."
    )
    loss_weights: list[NonNegativeFloat] | None = Field(
        None, description="Weights of the losses in that list; null for 1 each."
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="With loss_type robust: the probability that a preference is the wrong way round.",
    )
    disable_dropout: bool = Field(True, description="Train without dropout, as the reference is computed.")
    precompute_ref_batch_size: PositiveInt | None = Field(
        None, description="Rows in one forward of the reference; null for per_device_train_batch_size."
    )

    @property
    def reference_batch_size(self) -> int:
        """Rows in one forward of the reference."""
        return self.precompute_ref_batch_size or self.per_device_train_batch_size

    @field_validator("loss_weights")
    @classmethod
    def _one_weight_a_loss(cls, value: list[float] | None, info: ValidationInfo) -> list[float] | None:
        losses = info.data.get("loss_type")
        if value is not None and losses is not None and len(value) != len(losses):
            raise ValueError(f"must have as many numbers as loss_type has losses, {len(losses)}")
        return value

    @field_validator("label_smoothing")
    @classmethod
    def _smooths_robust(cls, value: float, info: ValidationInfo) -> float:
        if value and "robust" not in info.data.get("loss_type", ["robust"]):
            raise UnusedError("is only used with loss_type: robust; remove it")
        return value


SCHEMAS: dict[str, type[RunConfig]] = {"sft": SftConfig, "pretrain": PretrainConfig, "dpo": DpoConfig}


def plan_config(**settings: Any) -> RunConfig:
    """A run of which a plan is wanted before there are rows. pydantic's ValidationError for what it cannot be."""
    return SCHEMAS[settings.get("objective", "sft")].model_validate(settings, context=WITHOUT_ROWS)
