"""The options shared by `horizon_lm.stream`, the settings of a run and the planner, with their descriptions. Nothing here imports torch."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from horizon_lm.errors import ConfigError

WHOLE_BATCHES = "leave device_micro_batch_size unset"
"""The remedy where a batch cannot be cut into micro-batches."""
SMALLER_BATCHES = "lower device_micro_batch_size or per_device_train_batch_size"
"""The remedy where the device has too little memory for a batch."""


def chosen(default: Any) -> Any:
    """Return a field that a plan chooses if it is left open."""
    return field(default=default, metadata={"chosen": True})


@dataclass(frozen=True, kw_only=True)
class StreamingOptions:
    """Options for streaming a model, described in `OPTION_TEXTS`. None and ``auto`` leave the choice to the planner.

    Raises:
        ConfigError: a value that is not possible.
    """

    precision: str = "fp32_master"
    grad_dtype: Any = None
    device_memory: int | None = None
    device_micro_batch_size: int | None = chosen(None)
    head: str = chosen("chunked")
    head_chunk_tokens: int | None = chosen(None)
    activation_checkpoints: str | int = chosen("auto")
    resident_blocks: int | None = chosen(None)
    resident_graphs: int | None = chosen(None)
    mlp_chunk_tokens: int | None = None
    expert_tile: int | str | None = chosen(None)
    compile: bool | str = "auto"
    products: str = "plain"

    def __post_init__(self) -> None:
        for name in ("device_micro_batch_size", "head_chunk_tokens", "mlp_chunk_tokens", "expert_tile"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1, or unset")
        if self.head not in ("chunked", "whole"):
            raise ConfigError(f"head is {self.head!r}; choose 'chunked' or 'whole'")
        checkpoints = self.activation_checkpoints
        is_number = isinstance(checkpoints, int) and not isinstance(checkpoints, bool) and checkpoints >= 0
        if checkpoints not in ("auto", "device", "host") and not is_number:
            raise ConfigError(
                f"activation_checkpoints is {checkpoints!r}; choose 'auto', 'device', 'host', or a number of blocks"
            )
        if self.compile not in (True, False, "auto"):
            raise ConfigError(f"compile is {self.compile!r}; choose True, False or 'auto'")
        if self.products not in ("plain", "float8"):
            raise ConfigError(f"products is {self.products!r}; choose 'plain' or 'float8'")
        if not 0 <= (self.resident_graphs or 0) <= (self.resident_blocks or 0):
            raise ConfigError(
                f"resident_graphs is {self.resident_graphs}, but resident_blocks is {self.resident_blocks}; a graph needs "
                "its block's weights"
            )

    @property
    def in_micro_batches(self) -> bool:
        """True if batches are cut into micro-batches, whose gradients are summed."""
        return self.device_micro_batch_size is not None

    @property
    def chunked_head(self) -> bool:
        """True if the loss is computed over chunks of tokens."""
        return self.head == "chunked"

    @property
    def chunk_tokens(self) -> int | None:
        """The tokens per chunk of logits, if they are chosen; None if all logits are computed at once."""
        return self.head_chunk_tokens if self.chunked_head else None

    def rows_at_once(self, rows: int) -> int:
        """Return the rows of a micro-batch of a batch with this many rows."""
        return min(self.device_micro_batch_size or rows, rows)

    def in_micro_batches_of(self, rows: int) -> Self:
        """Return these options with batches cut into micro-batches of this many rows."""
        return replace(self, device_micro_batch_size=rows)

    def choices(self) -> dict[str, Any]:
        """Return the options that a plan may choose, by name."""
        chosen_values = {name: getattr(self, name) for name in self.names_of_choices()}
        return chosen_values | {"head_chunk_tokens": self.chunk_tokens}  # None with a whole head

    def with_choices(self, other: "StreamingOptions") -> Self:
        """Return these options with the choices of others."""
        return replace(self, **{name: getattr(other, name) for name in self.names_of_choices()})

    @classmethod
    def names_of_choices(cls) -> list[str]:
        """Return the names of the options that a plan may choose."""
        return [each.name for each in fields(cls) if each.metadata.get("chosen")]

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the options."""
        return [each.name for each in fields(cls)]

    @staticmethod
    def of(settings: Any) -> dict[str, Any]:
        """Return the options contained in the settings of a run, by name."""
        return {name: getattr(settings, name) for name in StreamingOptions.names()}

    def requested_residency(self, num_blocks: int, auto_on_device: bool) -> tuple[int, int, int]:
        """Return how many of the last blocks keep their checkpoint, their weights and their graph on the device by request, in this order.

        A resident graph needs the weights and the checkpoint of its block, so the number of graphs is never larger than the other two.

        Args:
            num_blocks: number of blocks in the model.
            auto_on_device: ``activation_checkpoints="auto"`` means the device; otherwise host memory.
        """
        weights = min(self.resident_blocks or 0, num_blocks)
        graphs = min(self.resident_graphs or 0, weights)
        where = self.activation_checkpoints
        if isinstance(where, int):
            checkpoints = where
        else:
            on_device = where == "device" or (where == "auto" and auto_on_device)
            checkpoints = num_blocks if on_device else graphs
        return max(graphs, min(checkpoints, num_blocks)), weights, graphs


OPTION_TEXTS = {
    "device": "Compute device: auto (cuda if available, else cpu), cpu, cuda or cuda:N.",
    "precision": "Precision of the weights in host memory: fp32_master (bf16 to compute with and 16 low bits, together an exact fp32 master), "
    "bf16 (updates are rounded stochastically) or float32. With gradient and moments they take 14, 12 and 16 bytes per parameter.",
    "grad_dtype": "Dtype of gradients in host memory: bfloat16 or float32. Default: float32 with precision float32 and for adapters, else bfloat16.",
    "device_memory": "Limit on device memory: on a GPU of all that torch allocates there, on a CPU of the engine's buffers. Default: no limit.",
    "device_micro_batch_size": "Rows per micro-batch, which a block processes on the device at once.",
    "head": "Compute the loss in chunks of tokens (chunked), or from all logits at once (whole).",
    "head_chunk_tokens": "Tokens per chunk of logits with a chunked head.",
    "activation_checkpoints": "Place where activation checkpoints (the blocks' inputs) are kept until the backward pass: device, host, the number of "
    "last blocks whose checkpoint stays on the device, or auto: on the device as far as memory allows.",
    "resident_blocks": "Number of last blocks whose weights stay on the device for the backward pass, so that they are not streamed in again. "
    "Default: as many as fit with activation_checkpoints auto, else 0.",
    "resident_graphs": "Number of resident blocks that also keep their autograd graph, so that they are not recomputed. "
    "Default: as many as fit if resident_blocks is left open, too, else 0.",
    "mlp_chunk_tokens": "Tokens per chunk of a feed-forward layer, for very long rows; the backward pass recomputes the chunks. "
    "Default: all tokens at once.",
    "expert_tile": "Number of experts of a mixture that are on the device at once: routed experts are streamed in tiles of this many, the rest of "
    "their block as one unit.",
    "compile": "Compile blocks with torch.compile, once per block structure, and the loss of a chunk of logits. auto: only on a GPU.",
    "products": "Products of blocks' linear layers. float8: inputs by weights, and gradients by weights, in FP8 with a scale for each row (compute "
    "capability 8.9 or later, weights in bf16; a CPU emulates it); gradients of weights stay in bf16. plain: all as in Hugging Face.",
    "check_gradients": "Number of blocks whose gradients are compared with plain autograd, on the device and with the first batch; 0 for none.",
    "attn_implementation": "Attention implementation of transformers, such as sdpa, or varlen, which computes no attention to padding or to other "
    "packed rows. Default: the model's, but not eager for a model with sinks; on CUDA, varlen replaces sdpa if the model was proven with it "
    "and has neither a tower nor a ``score``.",
    "allow_unproven_model": "Allow a model type or feature that is not verified against plain autograd (docs/generated/models.md).",
    "model_name_or_path": "Model to start from: a Hugging Face folder or a hub id.",
    "gguf_file": "GGUF file in the model's folder to read the weights from. Decoding it needs memory for the whole model, in addition.",
    "trust_remote_code": "Run Python code that ships with the model.",
}
"""The descriptions of the options that are both settings of a run and arguments of `horizon_lm.stream` or `horizon_lm.from_pretrained`.

The settings are described by them (`horizon_lm.runs.config.types.shared_option`), and ``scripts/option_texts.py`` writes them into the docstrings.
"""
