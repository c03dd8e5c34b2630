"""Settings of adapters that are trained on a frozen model, with TRL's names."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, ValidationInfo, field_validator

from horizon_lm.runs.config.rules import NeedsEvenByDefault, OnResume, PerMachine
from horizon_lm.runs.config.types import MAX_COUNT, Count, Fraction, Names, Settings, as_list

OF_THE_BASE = {"use_peft", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "adapter_name_or_path"}
_COMPONENTS = {"freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False}
_NEEDS_PEFT, _NEEDS_4BIT = NeedsEvenByDefault(use_peft=True), NeedsEvenByDefault(load_in_4bit=True)


def _as_float(value: Any) -> Any:
    """Return a whole number as a float, since they are saved as floats; return anything else unchanged."""
    return float(value) if type(value) is int and abs(value) < MAX_COUNT else value


class AdapterSettings(Settings):
    """The LoRA adapters of PEFT to train, instead of the model's weights."""

    heading: ClassVar[str] = "Adapters"

    use_peft: bool = Field(
        False, description="Train LoRA adapters (arXiv 2106.09685) of PEFT on the frozen model. Needs peft."
    )
    lora_r: Annotated[Count, OnResume.STATE, _NEEDS_PEFT] = Field(16, description="Rank of the adapters.")
    lora_alpha: Annotated[PositiveFloat, BeforeValidator(_as_float), _NEEDS_PEFT] = Field(
        32.0, le=1e6, description="Adapters are scaled by lora_alpha / lora_r."
    )
    lora_dropout: Annotated[Fraction, _NEEDS_PEFT] = Field(0.05, description="Dropout of the adapters' inputs.")
    lora_target_modules: Annotated[str | Names | None, OnResume.STATE, _NEEDS_PEFT] = Field(
        None,
        description="Names of the linear layers that get adapters, a regular expression of their names, or all-linear. Default: "
        "PEFT's choice for the model, or the layers of its attention.",
    )
    lora_target_parameters: Annotated[Names | None, OnResume.STATE, _NEEDS_PEFT] = Field(
        None,
        description="Names of parameters that get adapters, such as mlp.experts.gate_up_proj, for stacked experts. Needs lora_dropout: 0.",
    )
    lora_modules_to_save: Annotated[Names | None, OnResume.STATE, _NEEDS_PEFT] = Field(
        None, description="Names of modules to train as a whole beside the adapters, such as embed_tokens."
    )
    use_rslora: Annotated[bool, _NEEDS_PEFT] = Field(
        False, description="Scale adapters by lora_alpha / sqrt(lora_r) (arXiv 2312.03732)."
    )
    use_dora: Annotated[bool, OnResume.STATE, _NEEDS_PEFT] = Field(
        False, description="Train magnitude and direction of weights apart (arXiv 2402.09353)."
    )
    load_in_4bit: Annotated[bool, OnResume.STATE, _NEEDS_PEFT] = Field(
        False,
        description="Quantize the frozen weights of blocks to 4 bits while they are read (QLoRA, arXiv 2305.14314).",
    )
    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], OnResume.STATE, _NEEDS_4BIT] = Field(
        "nf4", description="Format of 4-bit weights, as in bitsandbytes."
    )
    use_bnb_nested_quant: Annotated[bool, OnResume.STATE, _NEEDS_4BIT] = Field(
        False, description="Quantize the scales of 4-bit weights, too."
    )
    adapter_name_or_path: Annotated[str | None, PerMachine(), _NEEDS_PEFT] = Field(
        None, description="Folder or hub id of an adapter to go on with. Its own ranks and targets are used."
    )

    @field_validator("use_peft")
    @classmethod
    def _reject_trainable(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("trainable") is not None:
            raise ValueError("trains adapters alone, so trainable is not used; remove one of the two")
        return value

    @field_validator("lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
    @classmethod
    def _reject_names_in_one_text(cls, value: str | Names | None) -> str | Names | None:
        for each in as_list(value) or ():
            names = [part.strip() for part in each.split(",")]
            if len(names) > 1 and all(re.fullmatch(r"[\w.]+", name) for name in names):  # and no regular expression
                raise ValueError(f"write a list: [{', '.join(names)}]")
        return value

    @field_validator("lora_target_modules")
    @classmethod
    def _reject_name_of_llamafactory(cls, value: str | Names | None) -> str | Names | None:
        if as_list(value) == ["all"]:
            raise ValueError("write all-linear for all linear layers")
        return value

    @field_validator("load_in_4bit")
    @classmethod
    def _reject_decoded_weights(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("dequantize"):
            raise ValueError("quantizes the weights that dequantize: true decodes; remove one of the two")
        return value

    @field_validator("lora_target_parameters")
    @classmethod
    def _reject_dropout(cls, value: Names | None, info: ValidationInfo) -> Names | None:
        if value is not None and info.data.get("lora_dropout"):
            raise ValueError("adapters of stacked experts have no dropout; set lora_dropout: 0")
        return value

    @field_validator("adapter_name_or_path")
    @classmethod
    def _reject_settings_of_a_new_adapter(cls, value: str | None, info: ValidationInfo) -> str | None:
        for name, field in AdapterSettings.model_fields.items() if value is not None else ():
            if name not in OF_THE_BASE and info.data.get(name, field.default) != field.default:
                raise ValueError(f"has its own {name}; remove one of the two")
        for name, default in _COMPONENTS.items() if value is not None else ():
            if info.data.get(name, default) != default:
                raise ValueError(f"has its own layers, so {name} is not used; remove one of the two")
        return value
