"""The options shared by `horizon_lm.stream`, the settings of a run and the planner. Nothing here imports torch."""

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
    """Options for streaming a model, documented in `horizon_lm.stream`. None and ``auto`` leave the choice to the
    planner.

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
