"""The settings of a training run: those that all runs share, and those of each objective."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from horizon_lm.config.datasets import WITHOUT_ROWS
from horizon_lm.config.training import TrainingSettings
from horizon_lm.config.types import Interval, Names, UnusedError, as_list


class OutputSettings(TrainingSettings):
    """What a run leaves"""

    output_dir: str = Field("trainer_output", description="The folder of the run: metrics, this file, and model/.")
    overwrite_output_dir: bool = Field(
        False, description="Allow a finished run in output_dir to be replaced, once the new one is finished."
    )

    export_dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        None,
        description="Of the weights in exported models; null is float32 if precision is, else as they were; float32 keeps a master whole, to go on from.",
    )

    eval_strategy: Literal["no", "steps", "epoch"] = Field(
        "no", description="When held-out rows are evaluated besides before and after training: no, steps or epoch."
    )
    eval_steps: Interval | None = Field(
        None, description="Steps, or a share of all steps, between two evaluations; null for logging_steps."
    )
    per_device_eval_batch_size: PositiveInt = Field(8, description="Held-out rows in one forward.")

    save_strategy: Literal["no", "steps", "epoch"] = Field(
        "steps", description="When the model is exported to checkpoint-STEP on the way: no, steps or epoch."
    )
    save_steps: Interval = Field(500, description="Steps, or a share of all steps, between two such exports.")
    save_total_limit: PositiveInt | None = Field(
        None, description="So many of them are kept, the last ones; null for all."
    )

    logging_steps: Interval = Field(
        10, description="Steps, or a share of all steps, between two lines of metrics; also the first and last step."
    )
    log_unit_grad_norms: bool = Field(
        False, description="Metrics have the gradient norm of each unit of the model, too."
    )
    report_to: str | list[str] = Field(
        "none",
        description="Where metrics go besides metrics.jsonl: tensorboard, wandb, trackio, mlflow, ... or none.",
    )
    run_name: str | None = Field(None, description="The run's name there; null for output_dir.")

    sample_prompts: Names | None = Field(
        None, description="Prompts that the model answers on the way, for people to read."
    )
    sample_system_prompt: str | None = Field(None, description="System prompt of the sample prompts; null for none.")
    sample_steps: Interval = Field(100, description="Steps, or a share of all steps, between two such answers.")
    sample_max_new_tokens: PositiveInt = Field(64, description="Tokens of such an answer, at most.")

    trace_steps: NonNegativeInt = Field(
        0, description="Steps after the first two whose operations are written to trace.json, one by one."
    )
    push_to_hub: bool = Field(False, description="Upload the trained model to the Hugging Face hub at the end.")
    hub_model_id: str | None = Field(None, description="Its name there; null for the last part of output_dir.")
    hub_private_repo: bool | None = Field(None, description="Whether it is private there; null for your default.")

    @property
    def exported_dtype(self) -> str | None:
        """Of exported weights, None for as they were. transformers, too, saves in float32 what it trains in float32."""
        return self.export_dtype or ("float32" if self.precision == "float32" else None)

    @field_validator("eval_strategy", "per_device_eval_batch_size")
    @classmethod
    def _evaluates_something(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[info.field_name or ""].default
        held_out = [info.data.get(name, ...) for name in ("eval_datasets", "test_split_size")]
        if value != default and held_out == [None, None]:
            raise UnusedError("is not used without eval_datasets or test_split_size; add one, or remove it")
        return value

    @field_validator("eval_steps", "save_steps", "save_total_limit")
    @classmethod
    def _happens_at_steps(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        strategy = f"{name.partition('_')[0]}_strategy"
        needed = ("steps", "epoch") if name == "save_total_limit" else ("steps",)
        if value != cls.model_fields[name].default and info.data.get(strategy, "steps") not in needed:
            raise UnusedError(
                f"is not used with {strategy}: {info.data[strategy]}; set {strategy}: steps, or remove it"
            )
        return value

    @field_validator("report_to")
    @classmethod
    def _known_reporters(cls, value: str | list[str]) -> str | list[str]:
        names = [value] if isinstance(value, str) else value
        unknown = [name for name in names if name not in _REPORTERS]
        if unknown or not names or (len(names) > 1 and {"none", "all"} & set(names)):
            raise ValueError(f"must be none, all, or some of {', '.join(_REPORTERS[2:])}")
        return value

    @field_validator("sample_system_prompt", "sample_steps", "sample_max_new_tokens")
    @classmethod
    def _samples_something(cls, value: Any, info: ValidationInfo) -> Any:
        if value != cls.model_fields[info.field_name or ""].default and info.data.get("sample_prompts", ...) is None:
            raise UnusedError("is not used without sample_prompts; add some, or remove it")
        return value

    @field_validator("run_name", "hub_model_id", "hub_private_repo")
    @classmethod
    def _goes_somewhere(cls, value: Any, info: ValidationInfo) -> Any:
        name, unset = ("report_to", "none") if info.field_name == "run_name" else ("push_to_hub", False)
        if value is not None and info.data.get(name) == unset:
            raise UnusedError(f"is not used without {name}; set it, or remove this")
        return value


_REPORTERS = (
    "none", "all", "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "mlflow", "neptune",
    "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip


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
