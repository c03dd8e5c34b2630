"""The model of a run, as far as its config tells."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizon_lm.config import RunConfig, SftConfig, TextConfig
from horizon_lm.plan.outline import ModelOutline


@dataclass(frozen=True)
class Source:
    """A model of which a config is known.

    Attributes:
        name: as it was asked for.
        config: Hugging Face's.
        stored_bytes: of an element of its weights.
        is_here: its weights need not be fetched.
    """

    name: str
    config: Any
    stored_bytes: int
    is_here: bool
    _outlines: dict[Any, ModelOutline] = field(default_factory=dict)

    def cache_bytes_per_token(self, run: RunConfig) -> int:
        """Keys and values that all blocks keep of a token in generation, on the device."""
        config = self.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if not heads:  # a state, which does not grow
            return 0
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        if getattr(config, "kv_lora_rank", None) is None:
            heads = getattr(config, "num_key_value_heads", None) or heads
        else:  # they are kept as they are expanded (arXiv 2405.04434)
            width = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
        return int(2 * config.num_hidden_layers * heads * width * _compute_dtype(run).itemsize)

    def outline(
        self, run: RunConfig, *, length: int, masked: bool = True, mlp_chunk_tokens: int | None = None
    ) -> ModelOutline:
        """Its outline for a run. Arguments: as `model.outline.outline_config` has them."""
        from horizon_lm.model.outline import outline_config

        accelerated = run.device != "cpu"
        options: dict[str, Any] = {
            "length": length,
            "dtype": _compute_dtype(run),
            "masked": masked,
            "attn_implementation": run.attn_implementation,
            "on_accelerator": accelerated,
            "mlp_chunk_tokens": mlp_chunk_tokens or run.mlp_chunk_tokens,
            "trust_remote_code": run.trust_remote_code,
            "trainable": run.trainable,
            "packed": isinstance(run, TextConfig) and bool(run.packing or run.eval_packing),
            "allow_unproven_model": run.allow_unproven_model,
            "head_values": _head_values(run),
        }
        key = tuple(options.values())
        if key not in self._outlines:
            self._outlines[key] = outline_config(self.config, self.name, **options)
        return self._outlines[key]


def _compute_dtype(run: RunConfig) -> Any:
    """Of weights and hidden states on the device."""
    import torch

    return torch.bfloat16 if run.device != "cpu" and run.precision != "float32" else torch.float32


def _head_values(run: RunConfig) -> tuple[str, ...]:
    """What of each token the run's loss is made of, where it is not Hugging Face's own."""
    if isinstance(run, TextConfig) and run.label_smoothing_factor:
        return "logprobs", "mean"
    return ("logprobs",) if run.objective == "dpo" or (isinstance(run, SftConfig) and run.loss_type == "dft") else ()


def open_source(run: RunConfig) -> Source:
    """The config of a run's model: from a folder, of a published model that is known, or fetched from the hub.

    Raises:
        ConfigError: there is none, or transformers cannot read it.
        ModelNotSupportedError: not a causal language model.
    """
    from horizon_lm.model import source
    from horizon_lm.plan.known import find_known

    name = run.model_name_or_path
    if Path(name).expanduser().is_dir():
        folder = Path(name).expanduser()
        config = source.load_config(folder, run.trust_remote_code, run.gguf_file)
        stored = 2 if run.gguf_file else source.stored_bytes(folder, config)
        return Source(name, config, stored, is_here=True)
    known = find_known(name)
    hub_id = source.full_name(name)
    config = source.known_config(known) if known else source.fetch_config(name, run.trust_remote_code)
    return Source(name, config, source.config_bytes(config), source.is_cached(hub_id))
