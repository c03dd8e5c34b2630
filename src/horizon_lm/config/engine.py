"""Settings of where a run keeps things, and in what precision. None of them changes which rows form a step."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from horizon_lm.config.datasets import DataSettings
from horizon_lm.config.types import Bytes, DeviceName, UnusedError


class EngineSettings(DataSettings):
    """Memory and precision"""

    device: DeviceName = Field("auto", description="What computes: auto (cuda if there is one), cpu, cuda or cuda:N.")
    precision: Literal["fp32_master", "bf16", "float32"] = Field(
        "fp32_master",
        description="How weights are kept in host memory: 14, 12 or 16 bytes per parameter with gradient and moments.",
    )
    grad_dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="How gradients are kept in host memory; null for float32 if precision is, else bfloat16."
    )
    moments: Literal["float32", "bfloat16", "8bit"] = Field(
        "float32", description="How AdamW's moments are kept: 8, 4 or 2 bytes per parameter."
    )
    host_memory: Bytes | None = Field(
        None,
        description="Host memory that the run may take, such as 512GiB, even if less is free now; null for what is free.",
    )
    device_memory: Bytes | None = Field(
        None, description="Device memory that buffers may take, such as 300MiB; null for no limit."
    )
    device_micro_batch_size: PositiveInt | None = Field(
        None, description="Rows on the device at once inside a block; null for what the plan finds room for."
    )
    head: Literal["chunked", "whole"] = Field(
        "chunked", description="Compute the loss over chunks of tokens, or over all logits at once."
    )
    head_chunk_tokens: PositiveInt | None = Field(
        None, description="Tokens whose logits exist at once with head chunked; null for what the plan finds."
    )
    activation_checkpoints: Literal["auto", "device", "host"] | NonNegativeInt = Field(
        "auto",
        description="Where blocks' inputs wait for the backward: device, host, auto, or in how many last blocks on the device.",
    )
    resident_blocks: NonNegativeInt | None = Field(
        None,
        description="Last blocks whose weights stay on the device for the backward; null for what activation_checkpoints leaves.",
    )
    resident_graphs: NonNegativeInt | None = Field(
        None, description="Of these, so many keep their whole computation, which is then not repeated in the backward."
    )

    mlp_chunk_tokens: PositiveInt | None = Field(
        None, description="Tokens whose feed-forward activations exist at once, for very long rows; null for all."
    )
    compile: Literal["auto"] | bool = Field(
        "auto", description="Compile blocks with torch.compile, each structure once; auto for where there is a GPU."
    )

    check_gradients: NonNegativeInt = Field(
        0,
        description="Before training, compare so many blocks with plain autograd on the device, with a real batch; 0 for none.",
    )

    @field_validator("head_chunk_tokens")
    @classmethod
    def _chunks_need_chunked_head(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("head") == "whole":
            raise UnusedError("is not used with head: whole; remove one of the two")
        return value

    @field_validator("resident_graphs")
    @classmethod
    def _graphs_need_weights(cls, value: int | None, info: ValidationInfo) -> int | None:
        if (value or 0) > (info.data.get("resident_blocks") or 0):
            raise ValueError("is more than resident_blocks; a graph needs its block's weights")
        return value
