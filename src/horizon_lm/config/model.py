"""Settings of the model that a run starts from."""

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from horizon_lm.config.types import Settings, UnusedError


class ModelSettings(Settings):
    """The model"""

    objective: Literal["sft", "pretrain", "dpo"] = Field(
        "sft",
        description="What is learned: sft, to answer as the rows do; pretrain, text; dpo, to prefer one answer to another.",
    )
    model_name_or_path: str = Field(description="The model to start from: a Hugging Face folder or hub id.")
    gguf_file: str | None = Field(None, description="A GGUF file in that folder to read the weights from.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    allow_unproven_model: bool = Field(
        False,
        description="Train a model, or use a feature, that was not found equal to plain autograd (docs/models.md).",
    )
    attn_implementation: str | None = Field(
        None, description="The attention that transformers uses, such as sdpa; varlen for packed and padded rows."
    )
    chat_template_path: str | None = Field(
        None,
        description="The chat template to train with and to save: a Jinja file, or the folder or hub id of a model that has it.",
    )
    trainable: str | None = Field(
        None,
        description='Which weights are trained: a pattern of their names, such as "layers.20.*|lm_head"; null for all.',
    )

    # A check belongs to the later of its fields: pydantic runs it with the earlier ones in `info.data`, so that all
    # errors of a file are found at once. An earlier field that is itself wrong is absent there.

    @field_validator("trust_remote_code")
    @classmethod
    def _no_option_of_a_config_with_gguf(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("gguf_file"):
            raise UnusedError("is not used with gguf_file; remove one of the two")
        return value

    @field_validator("trainable")
    @classmethod
    def _is_a_pattern(cls, value: Any) -> Any:
        if value is not None and not value.strip("| "):
            raise ValueError("names no weights; remove it to train all")
        return value
