"""Settings of adapters that are trained on a frozen model, with TRL's names."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, ValidationInfo, field_validator

from horizon_lm.config.types import MAX_COUNT, Count, Fraction, Names, Settings, UnusedError

OF_THE_BASE = {"use_peft", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "adapter_name_or_path"}


def _as_float(value: Any) -> Any:
    """Return a whole number as a float, since they are saved as floats; return anything else unchanged."""
    return float(value) if type(value) is int and abs(value) < MAX_COUNT else value


class AdapterSettings(Settings):
    """The LoRA adapters of PEFT to train, instead of the model's weights."""

    heading: ClassVar[str] = "Adapters"

    use_peft: bool = Field(
        False, description="Train LoRA adapters (arXiv 2106.09685) of PEFT on the frozen model. Needs peft."
    )
    lora_r: Count = Field(16, description="Rank of the adapters.")
    lora_alpha: Annotated[PositiveFloat, BeforeValidator(_as_float)] = Field(
        32.0, le=1e6, description="Adapters are scaled by lora_alpha / lora_r."
    )
    lora_dropout: Fraction = Field(0.05, description="Dropout of the adapters' inputs.")
    lora_target_modules: str | Names | None = Field(
        None,
        description="Names of the linear layers that get adapters, a regular expression of their names, or all-linear. Default: "
        "PEFT's choice for the model, or the layers of its attention.",
    )
    lora_target_parameters: Names | None = Field(
        None,
        description="Names of parameters that get adapters, such as mlp.experts.gate_up_proj, for stacked experts.",
    )
    lora_modules_to_save: Names | None = Field(
        None, description="Names of modules to train as a whole beside the adapters, such as embed_tokens."
    )
    use_rslora: bool = Field(False, description="Scale adapters by lora_alpha / sqrt(lora_r) (arXiv 2312.03732).")
    use_dora: bool = Field(False, description="Train magnitude and direction of weights apart (arXiv 2402.09353).")
    load_in_4bit: bool = Field(
        False,
        description="Quantize the frozen weights of blocks to 4 bits while they are read (QLoRA, arXiv 2305.14314).",
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field(
        "nf4", description="Format of 4-bit weights, as in bitsandbytes."
    )
    use_bnb_nested_quant: bool = Field(False, description="Quantize the scales of 4-bit weights, too.")
    adapter_name_or_path: str | None = Field(
        None, description="Folder or hub id of an adapter to go on with. Its own ranks and targets are used."
    )

    @field_validator("use_peft")
    @classmethod
    def _reject_trainable(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("trainable") is not None:
            raise ValueError("trains adapters alone, so trainable is not used; remove one of the two")
        return value

    @field_validator(
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save",
        "use_rslora", "use_dora", "load_in_4bit", "adapter_name_or_path",
    )  # fmt: skip
    @classmethod
    def _needs_peft(cls, value: Any, info: ValidationInfo) -> Any:
        if value != cls.model_fields[info.field_name or ""].default and not info.data.get("use_peft", True):
            raise UnusedError("is not used without use_peft: true; set it, or remove this")
        return value

    @field_validator("load_in_4bit")
    @classmethod
    def _reject_decoded_weights(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("dequantize"):
            raise ValueError("quantizes the weights that dequantize: true decodes; remove one of the two")
        return value

    @field_validator("bnb_4bit_quant_type", "use_bnb_nested_quant")
    @classmethod
    def _needs_four_bits(cls, value: Any, info: ValidationInfo) -> Any:
        if value != cls.model_fields[info.field_name or ""].default and not info.data.get("load_in_4bit", True):
            raise UnusedError("is not used without load_in_4bit: true; set it, or remove this")
        return value

    @field_validator("adapter_name_or_path")
    @classmethod
    def _reject_settings_of_a_new_adapter(cls, value: str | None, info: ValidationInfo) -> str | None:
        for name, field in AdapterSettings.model_fields.items() if value is not None else ():
            if name not in OF_THE_BASE and info.data.get(name, field.default) != field.default:
                raise ValueError(f"has its own {name}; remove one of the two")
        return value
