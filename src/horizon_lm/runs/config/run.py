"""The settings of a training run: those shared by all runs, and those specific to each objective."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, ValidationInfo, field_validator

from horizon_lm.runs.config.adapters import AdapterSettings
from horizon_lm.runs.config.checkpoints import CheckpointSettings
from horizon_lm.runs.config.datasets import DataSettings
from horizon_lm.runs.config.engine import EngineSettings
from horizon_lm.runs.config.model import ModelSettings
from horizon_lm.runs.config.rules import WITHOUT_ROWS, Needs, OnResume, PerMachine
from horizon_lm.runs.config.training import TrainingSettings
from horizon_lm.runs.config.types import Count, CountOrZero, Interval, Names, Settings, as_list

TRACKERS = (
    "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "mlflow", "neptune", "swanlab", "tensorboard",
    "trackio", "wandb",
)  # fmt: skip
_NEEDS_EVAL_SET = Needs(eval_datasets=..., test_split_size=...)


class OutputSettings(Settings):
    """Settings for evaluation, metrics, samples and the exported model."""

    heading: ClassVar[str] = "Output"

    output_dir: Annotated[str, OnResume.FREE, PerMachine()] = Field(
        "trainer_output", description="Folder of the run: metrics, resolved settings, and the trained model in model/."
    )
    overwrite_output_dir: Annotated[bool, OnResume.FREE] = Field(
        False, description="Replace a finished run in output_dir, once the new run has finished."
    )

    fallback_dir: Annotated[str | None, OnResume.FREE, PerMachine()] = Field(
        None,
        description="Folder for the trained model if output_dir cannot be written to when the training ends; checked before it begins. "
        "Default: the temporary folder, your home folder or that above output_dir, whichever has room, another disk first.",
    )

    export_dtype: Annotated[Literal["bfloat16", "float16", "float32"] | None, OnResume.FREE] = Field(
        None,
        description="Dtype of exported weights. Default: the checkpoint's, or float32 with precision: float32. "
        "float32 keeps the full master for further training.",
    )

    eval_strategy: Annotated[Literal["no", "steps", "epoch"], OnResume.FREE, _NEEDS_EVAL_SET] = Field(
        "no", description="When to evaluate during training, in addition to before and after it: no, steps or epoch."
    )
    eval_steps: Annotated[Interval | None, OnResume.FREE, Needs(eval_strategy="steps")] = Field(
        None,
        description="Steps between evaluations, or a fraction of all steps if below 1. Default: logging_steps.",
    )
    per_device_eval_batch_size: Annotated[Count, OnResume.FREE, _NEEDS_EVAL_SET] = Field(
        8, description="Rows per forward pass of an evaluation."
    )

    logging_steps: Annotated[Interval, OnResume.FREE] = Field(
        10,
        description="Steps between lines of metrics, or a fraction of all steps if below 1. The first and the last step are "
        "always logged.",
    )
    log_unit_grad_norms: Annotated[bool, OnResume.FREE] = Field(
        False, description="Log the gradient norm of each unit of the model."
    )
    report_to: Annotated[str | list[str], OnResume.FREE] = Field(
        "none",
        description="Trackers to send metrics to, in addition to metrics.jsonl: tensorboard, wandb, trackio, mlflow, ... or none.",
    )
    run_name: Annotated[str | None, OnResume.FREE, Needs(report_to=...)] = Field(
        None, description="Name of the run in these trackers. Default: output_dir."
    )

    wandb_project: Annotated[str | None, OnResume.FREE, Needs(report_to=("wandb", "all"))] = Field(
        None,
        description="Project of the run in wandb. Default: the environment variable WANDB_PROJECT, else huggingface.",
    )

    sample_prompts: Annotated[Names | None, OnResume.FREE] = Field(
        None, description="Prompts that the model answers during training, for people to read."
    )
    sample_system_prompt: Annotated[str | None, OnResume.FREE, Needs(sample_prompts=...)] = Field(
        None, description="System prompt of the sample prompts. Default: none."
    )
    sample_steps: Annotated[Interval, OnResume.FREE, Needs(sample_prompts=...)] = Field(
        100, description="Steps between these answers, or a fraction of all steps if below 1."
    )
    sample_max_new_tokens: Annotated[Count, OnResume.FREE, Needs(sample_prompts=...)] = Field(
        64, description="Maximum number of tokens in such an answer."
    )

    trace_steps: Annotated[CountOrZero, OnResume.FREE] = Field(
        0, description="Number of steps, from the third on, whose operations are recorded in trace.json."
    )
    push_to_hub: Annotated[bool, OnResume.FREE] = Field(
        False, description="Upload the trained model to the Hugging Face hub after training."
    )
    hub_model_id: Annotated[str | None, OnResume.FREE, Needs(push_to_hub=...)] = Field(
        None, description="Repository of the upload. Default: the last part of output_dir."
    )
    hub_private_repo: Annotated[bool | None, OnResume.FREE, Needs(push_to_hub=...)] = Field(
        None, description="Make that repository private. Default: your account's default."
    )

    @field_validator("report_to")
    @classmethod
    def _reject_unknown_trackers(cls, value: str | list[str]) -> str | list[str]:
        names = [value] if isinstance(value, str) else value
        if names not in (["none"], ["all"]) and (not names or set(names) - set(TRACKERS)):
            raise ValueError(f"must be none, all, or some of {', '.join(TRACKERS)}")
        return value


# The groups of settings, last one first: pydantic and `text.groups` collect fields from the last base class to the first.
class RunConfig(
    CheckpointSettings, OutputSettings, TrainingSettings, EngineSettings, DataSettings, AdapterSettings, ModelSettings
):
    """The settings of a training run. Settings that the run would not use are rejected."""

    @property
    def exported_dtype(self) -> str | None:
        """The dtype of exported weights, or None for the dtype of the checkpoint."""
        # transformers also saves in float32 if it trained in float32.
        return self.export_dtype or ("float32" if self.precision == "float32" else None)


class TextConfig(RunConfig):
    """Settings that sft and pretrain share: packing and label smoothing."""

    heading: ClassVar[str] = "Packing and loss"

    packing: bool = Field(
        False,
        description="Pack several rows into one of up to max_length tokens; packed rows do not attend to each other. Needs TRL.",
    )
    packing_strategy: Annotated[Literal["bfd", "bfd_split", "wrapped"], Needs(packing=True)] = Field(
        "bfd",
        description="bfd truncates rows longer than max_length, bfd_split continues them in further rows, wrapped joins all rows "
        "and cuts anywhere, so that joined rows do attend to each other.",
    )
    eval_packing: Annotated[bool | None, OnResume.FREE, _NEEDS_EVAL_SET] = Field(
        None, description="Pack the rows of eval sets. Default: as packing."
    )
    label_smoothing_factor: float = Field(
        0.0, ge=0, lt=1, description="Label smoothing: share of each target that is spread over the whole vocabulary."
    )
    neftune_noise_alpha: PositiveFloat | None = Field(
        None,
        le=1e4,
        description="Scale of the noise that training adds to embeddings (NEFTune, arXiv 2310.05914). Default: none.",
    )

    @field_validator("packing", "eval_packing")
    @classmethod
    def _needs_max_length(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("max_length", 1) is None:
            raise ValueError("needs a max_length to pack up to, but max_length is null")
        return value


class SftConfig(TextConfig):
    """The settings of supervised fine-tuning."""

    heading: ClassVar[str] = "Supervised fine-tuning"

    train_on: Literal["assistant", "completion", "all"] | None = Field(
        None,
        description="Tokens to train on: assistant, completion (all that follows the prompt) or all. Default: assistant for "
        "conversations, completion for rows with a prompt, all for text. Assistant tokens are found from the template's "
        "{% generation %} marks, else from TRL's patched template, else by locating each answer in the rendered text; "
        "ambiguous rows are rejected.",
    )
    loss_type: Literal["nll", "dft"] = Field(
        "nll",
        description="nll (negative log-likelihood), or dft, which weights each token's loss by its probability (arXiv 2508.05629).",
    )

    @field_validator("loss_type")
    @classmethod
    def _reject_smoothing_with_dft(cls, value: str, info: ValidationInfo) -> str:
        if value == "dft" and info.data.get("label_smoothing_factor"):
            raise ValueError("cannot be combined with label_smoothing_factor; remove one of the two")
        return value


class PretrainConfig(TextConfig):
    """The settings of continued pre-training on text."""

    heading: ClassVar[str] = "Continued pre-training"

    objective: Literal["sft", "pretrain", "dpo"] = Field(
        "pretrain", description=TextConfig.model_fields["objective"].description
    )


DpoLoss = Literal["sigmoid", "hinge", "ipo", "robust"]


class DpoConfig(RunConfig):
    """The settings of direct preference optimization (arXiv 2305.18290)."""

    heading: ClassVar[str] = "Direct preference optimization"

    objective: Literal["sft", "pretrain", "dpo"] = Field(
        "dpo", description=RunConfig.model_fields["objective"].description
    )
    learning_rate: PositiveFloat = Field(1e-6, le=1e3, description=RunConfig.model_fields["learning_rate"].description)
    beta: PositiveFloat = Field(
        0.1, le=1e4, description="Strength of the penalty on departing from the model that the run starts from."
    )
    loss_type: Annotated[list[DpoLoss], BeforeValidator(as_list), Field(min_length=1)] = Field(
        ["sigmoid"], description="Loss of a pair: sigmoid, hinge, ipo or robust; or a list of them, which are summed."
    )
    loss_weights: list[Annotated[float, Field(ge=0, le=1e6)]] | None = Field(
        None, description="Weights of the losses in that list. Default: 1 each."
    )
    label_smoothing: Annotated[float, Needs(loss_type="robust")] = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="With loss_type: robust, the probability that a preference is labelled the wrong way round.",
    )
    disable_dropout: bool = Field(True, description="Train without dropout, as the reference is computed.")
    precompute_ref_batch_size: Annotated[Count | None, OnResume.FREE] = Field(
        None, description="Rows per forward pass of the reference. Default: per_device_train_batch_size."
    )

    @property
    def reference_batch_size(self) -> int:
        """The number of rows in one forward pass of the reference."""
        return self.precompute_ref_batch_size or self.per_device_train_batch_size

    @field_validator("loss_weights")
    @classmethod
    def _match_losses(cls, value: list[float] | None, info: ValidationInfo) -> list[float] | None:
        losses = info.data.get("loss_type")
        if value is not None and losses is not None and len(value) != len(losses):
            raise ValueError(f"must have one number for each of the {len(losses)} losses in loss_type")
        return value


SCHEMAS: dict[str, type[RunConfig]] = {"sft": SftConfig, "pretrain": PretrainConfig, "dpo": DpoConfig}


def settings_with(rule: object) -> set[str]:
    """Return the names of the settings of all objectives that have a rule."""
    return {
        name for schema in SCHEMAS.values() for name, field in schema.model_fields.items() if rule in field.metadata
    }


def plan_config(**settings: Any) -> RunConfig:
    """Return the settings of a run that is planned before its rows exist.

    Raises:
        ValidationError: from pydantic, if a setting is invalid.
    """
    return SCHEMAS[settings.get("objective", "sft")].model_validate(settings, context=WITHOUT_ROWS)
