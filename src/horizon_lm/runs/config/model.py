"""Settings of the objective and of the model that a run starts from."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from horizon_lm.runs.config.rules import Needs, NeedsEvenByDefault, OnResume, PerMachine
from horizon_lm.runs.config.types import Settings, shared_option

_WITHOUT_PATTERNS = NeedsEvenByDefault(trainable=None)


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
        "Default: all but the components that the next three settings freeze.",
    )
    freeze_vision_tower: Annotated[bool, OnResume.STATE, _WITHOUT_PATTERNS] = Field(
        True,
        description="Freeze the towers of a model, which encode images, video or audio: they have no gradients, no optimizer state and no adapters.",
    )
    freeze_multi_modal_projector: Annotated[bool, OnResume.STATE, _WITHOUT_PATTERNS] = Field(
        True, description="Freeze what lies between the towers and the language model."
    )
    freeze_language_model: Annotated[bool, OnResume.STATE, _WITHOUT_PATTERNS] = Field(
        False, description="Freeze the language model with its embedding and head, to train its towers or projector."
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

    @field_validator("freeze_language_model")
    @classmethod
    def _require_trained_component(cls, value: bool, info: ValidationInfo) -> bool:
        others = ("freeze_vision_tower", "freeze_multi_modal_projector")
        if value and info.data.get("trainable") is None and all(info.data.get(name, False) for name in others):
            raise ValueError(f"leaves nothing to train; set {' or '.join(others)} to false")
        return value
