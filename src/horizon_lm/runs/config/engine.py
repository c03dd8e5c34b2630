"""Settings of memory and precision. None of them changes which rows a step trains on."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from horizon_lm.runs.config.rules import Needs, OnResume, PerMachine
from horizon_lm.runs.config.types import Bytes, Count, CountOrZero, DeviceName, Seconds, Settings, shared_option


class EngineSettings(Settings):
    """Placement and precision of weights, gradients, moments and activations."""

    heading: ClassVar[str] = "Memory and precision"

    device: Annotated[DeviceName, OnResume.ROUNDING, PerMachine()] = shared_option("device", "auto")
    dp_shard_size: Annotated[Count | None, OnResume.ROUNDING] = Field(
        None,
        description="With torchrun: number of processes that share a copy of the model, each with a part of its weights, gradients "
        "and moments. Default: those of a machine.",
    )
    dp_replicate_size: Annotated[Count | None, OnResume.ROUNDING] = Field(
        None,
        description="With torchrun: number of copies of the model. Default: the number of processes by dp_shard_size.",
    )
    precision: Annotated[Literal["fp32_master", "bf16", "float32"], OnResume.STATE] = shared_option(
        "precision", "fp32_master"
    )
    grad_dtype: Literal["bfloat16", "float32"] | None = shared_option("grad_dtype", None)
    moments: Annotated[Literal["auto", "float32", "bfloat16", "8bit"], OnResume.STATE] = Field(
        "float32",
        description="Dtype of the moments in host memory: each takes 4, 2 or 1 bytes per parameter, and AdamW has two. "
        "auto: bfloat16 where the planned step is notably shorter with it, because updates are exposed; else float32.",
    )
    host_memory: Annotated[Bytes | None, OnResume.FREE, PerMachine()] = Field(
        None,
        description="Host memory that the run may use, such as 512GiB; may exceed what is free now. Default: what is free.",
    )
    device_memory: Annotated[Bytes | None, OnResume.FREE] = shared_option(
        "device_memory", None, "A size such as 20GiB."
    )
    device_micro_batch_size: Annotated[Count | None, OnResume.ROUNDING] = shared_option(
        "device_micro_batch_size", None, "Default: chosen by the plan."
    )
    head: Annotated[Literal["chunked", "whole"], OnResume.ROUNDING] = shared_option("head", "chunked")
    head_chunk_tokens: Annotated[Count | None, OnResume.ROUNDING, Needs(head="chunked")] = shared_option(
        "head_chunk_tokens", None, "Default: chosen by the plan."
    )
    activation_checkpoints: Annotated[Literal["auto", "device", "host"] | CountOrZero, OnResume.FREE] = shared_option(
        "activation_checkpoints", "auto"
    )
    resident_blocks: Annotated[CountOrZero | None, OnResume.FREE] = shared_option("resident_blocks", None)
    resident_graphs: Annotated[CountOrZero | None, OnResume.FREE] = shared_option("resident_graphs", None)

    mlp_chunk_tokens: Annotated[Count | None, OnResume.ROUNDING] = shared_option("mlp_chunk_tokens", None)
    expert_tile: Annotated[Literal["auto"] | Count | None, OnResume.FREE] = shared_option(
        "expert_tile",
        "auto",
        "null: whole blocks. auto: tiles where whole blocks do not fit twice, or where the planned step is notably shorter with them.",
    )
    compile: Annotated[Literal["auto"] | bool, OnResume.ROUNDING] = shared_option("compile", "auto")

    products: Annotated[Literal["plain", "float8"], OnResume.ROUNDING] = shared_option("products", "plain")

    check_gradients: Annotated[CountOrZero, OnResume.FREE] = shared_option(
        "check_gradients", 0, "They are compared before training."
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
