"""Settings of the objective and of the model that a run starts from."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from horizon_lm.runs.config.rules import Needs, OnResume, PerMachine
from horizon_lm.runs.config.types import Settings, shared_option


class ModelSettings(Settings):
    """The objective, the model to start from, and the weights to train."""

    heading: ClassVar[str] = "Model"

    objective: Literal["sft", "pretrain", "dpo"] = Field(
        "sft",
        description="Training objective. sft: supervised fine-tuning on answers; pretrain: continued pre-training on text; "
        "dpo: preference optimization.",
    )
    model_name_or_path: Annotated[str, OnResume.FREE, PerMachine()] = shared_option("model_name_or_path", ...)
    gguf_file: Annotated[str | None, OnResume.FREE] = shared_option("gguf_file", None)
    dequantize: Annotated[bool, OnResume.FREE, Needs(gguf_file=None)] = Field(
        False,
        description="Decode quantized weights (MXFP4, FP8 in tiles, INT4 of compressed-tensors, bitsandbytes' 4 bits) while they are read, so that all of them can "
        "be trained. Adapters need no decoding.",
    )
    trust_remote_code: Annotated[bool, OnResume.FREE, Needs(gguf_file=None)] = shared_option("trust_remote_code", False)
    allow_unproven_model: Annotated[bool, OnResume.FREE] = shared_option("allow_unproven_model", False)
    attn_implementation: Annotated[str | None, OnResume.ROUNDING] = shared_option("attn_implementation", None)
    chat_template_path: Annotated[str | None, OnResume.FREE, PerMachine()] = Field(
        None,
        description="Chat template to train with and to save: a Jinja file, or the folder or hub id of a model that has one. "
        "Default: the tokenizer's.",
    )
    trainable: Annotated[str | None, OnResume.STATE] = Field(
        None,
        description='Weights to train: a pattern of their names, such as "layers.20.*|lm_head"; the others are frozen. '
        "Default: all.",
    )

    # A check of two fields belongs to the later one. pydantic passes the earlier fields in `info.data`, so that all
    # errors of a file are reported together. An earlier field that is itself invalid is missing from `info.data`.

    @field_validator("trainable", mode="before")
    @classmethod
    def _reject_list_of_patterns(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError(f'write one text of patterns: "{"|".join(map(str, value))}"')
        return value

    @field_validator("trainable")
    @classmethod
    def _reject_empty_pattern(cls, value: Any) -> Any:
        if value is not None and not value.strip("| "):
            raise ValueError("matches no weights; remove it to train all of them")
        return value
