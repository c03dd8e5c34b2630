"""Settings of memory and precision. None of them changes which rows a step trains on."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from horizon_lm.runs.config.rules import Needs, OnResume, PerMachine
from horizon_lm.runs.config.types import Bytes, Count, CountOrZero, DeviceName, Seconds, Settings


class EngineSettings(Settings):
    """Placement and precision of weights, gradients, moments and activations."""

    heading: ClassVar[str] = "Memory and precision"

    device: Annotated[DeviceName, OnResume.ROUNDING, PerMachine()] = Field(
        "auto", description="Compute device: auto (cuda if available, else cpu), cpu, cuda or cuda:N."
    )
    dp_shard_size: Annotated[Count | None, OnResume.ROUNDING] = Field(
        None,
        description="With torchrun: number of processes that share a copy of the model, each with a part of its weights, gradients "
        "and moments. Default: those of a machine.",
    )
    dp_replicate_size: Annotated[Count | None, OnResume.ROUNDING] = Field(
        None,
        description="With torchrun: number of copies of the model. Default: the number of processes by dp_shard_size.",
    )
    precision: Annotated[Literal["fp32_master", "bf16", "float32"], OnResume.STATE] = Field(
        "fp32_master",
        description="Precision of the weights in host memory. fp32_master computes in bf16 and updates an fp32 master. "
        "With gradient and moments, fp32_master takes 14, bf16 12 and float32 16 bytes per parameter.",
    )
    grad_dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="Dtype of gradients in host memory. Default: float32 with precision: float32, else bfloat16."
    )
    moments: Annotated[Literal["auto", "float32", "bfloat16", "8bit"], OnResume.STATE] = Field(
        "float32",
        description="Dtype of the moments in host memory: each takes 4, 2 or 1 bytes per parameter, and AdamW has two. "
        "auto: bfloat16 where the planned step is notably shorter with it, because updates are exposed; else float32.",
    )
    host_memory: Annotated[Bytes | None, OnResume.FREE, PerMachine()] = Field(
        None,
        description="Host memory that the run may use, such as 512GiB; may exceed what is free now. Default: what is free.",
    )
    device_memory: Annotated[Bytes | None, OnResume.FREE] = Field(
        None,
        description="Limit on device memory, such as 20GiB: on a GPU of all that torch allocates there, on a CPU of the engine's buffers. Default: no limit.",
    )
    device_micro_batch_size: Annotated[Count | None, OnResume.ROUNDING] = Field(
        None,
        description="Rows per micro-batch: those that a block processes on the device at once. Default: chosen by the plan.",
    )
    head: Annotated[Literal["chunked", "whole"], OnResume.ROUNDING] = Field(
        "chunked", description="Compute the loss in chunks of tokens (chunked), or from all logits at once (whole)."
    )
    head_chunk_tokens: Annotated[Count | None, OnResume.ROUNDING, Needs(head="chunked")] = Field(
        None, description="Tokens per chunk of logits with head: chunked. Default: chosen by the plan."
    )
    activation_checkpoints: Annotated[Literal["auto", "device", "host"] | CountOrZero, OnResume.FREE] = Field(
        "auto",
        description="Where activation checkpoints (the blocks' inputs) are kept until the backward pass: device, host, auto, "
        "or the number of last blocks whose checkpoint stays on the device.",
    )
    resident_blocks: Annotated[CountOrZero | None, OnResume.FREE] = Field(
        None,
        description="Number of last blocks whose weights stay on the device for the backward pass. "
        "Default: chosen by the plan with activation_checkpoints: auto, else 0.",
    )
    resident_graphs: Annotated[CountOrZero | None, OnResume.FREE] = Field(
        None,
        description="Number of those blocks that also keep their autograd graph, so that they are not recomputed. "
        "Default: chosen by the plan if resident_blocks is, else 0.",
    )

    mlp_chunk_tokens: Annotated[Count | None, OnResume.ROUNDING] = Field(
        None, description="Tokens per chunk of a feed-forward layer, for very long rows. Default: all tokens at once."
    )
    expert_tile: Annotated[Literal["auto"] | Count | None, OnResume.FREE] = Field(
        "auto",
        description="Number of experts of a mixture that are on the device at once: routed experts are streamed in tiles of this many. "
        "null: whole blocks. auto: tiles where whole blocks do not fit twice, or where the planned step is notably shorter with them.",
    )
    compile: Annotated[Literal["auto"] | bool, OnResume.ROUNDING] = Field(
        "auto",
        description="Compile blocks with torch.compile, once per block structure, and the loss of a chunk of logits. auto: only on a GPU.",
    )

    products: Annotated[Literal["plain", "float8"], OnResume.ROUNDING] = Field(
        "plain",
        description="Products of blocks' linear layers. float8: inputs by weights, and gradients by weights, in FP8 with a scale for each "
        "row (compute capability 8.9 or later; a CPU emulates it); gradients of weights stay in bf16. plain: all as in Hugging Face.",
    )

    check_gradients: Annotated[CountOrZero, OnResume.FREE] = Field(
        0,
        description="Number of blocks whose gradients are compared with plain autograd before training, on the device and "
        "with the first batch; 0 for none.",
    )

    rank_timeout: Annotated[Seconds | None, OnResume.FREE] = Field(
        600.0,
        description="With torchrun: seconds after which a process that stays behind the others ends the run, with its name. null for "
        "never. One that dies ends it within 30 seconds.",
    )
    step_timeout: Annotated[Seconds | None, OnResume.FREE] = Field(
        1800.0,
        description="Seconds after which a step that is not finished is reported, with the operations that it waits for and the "
        "stacks of all threads; the run goes on waiting. null for never.",
    )

    @property
    def rows_kept_together(self) -> int:
        """The rows of a step that go to one process, because it computes them at once."""
        return self.device_micro_batch_size or 1

    @field_validator("resident_graphs")
    @classmethod
    def _graphs_need_weights(cls, value: int | None, info: ValidationInfo) -> int | None:
        if (value or 0) > (info.data.get("resident_blocks") or 0):
            raise ValueError("is more than resident_blocks; a graph needs its block's weights")
        return value
