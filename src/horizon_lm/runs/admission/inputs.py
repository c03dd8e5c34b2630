"""The properties of a run's model and examples that determine memory and time."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from horizon_lm.errors import ConfigError
from horizon_lm.memory.layout.model import ModelLayout
from horizon_lm.memory.layout.units import StorageLayout
from horizon_lm.model import hf_config, hub
from horizon_lm.model.adapter_config import ADAPTER_CONFIG, require_weights
from horizon_lm.model.adapters import Adapters, class_of_adapters
from horizon_lm.model.components import Component, frozen_components
from horizon_lm.model.files.quantized_checkpoint import Quantized
from horizon_lm.model.files.weight_files import WeightFiles
from horizon_lm.model.generation import Generation
from horizon_lm.model.known_models import find_known, known_config
from horizon_lm.model.opening import opened_dtype
from horizon_lm.model.quantization import requested_quantization, require_adapters
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.measure import model_outline
from horizon_lm.planning.measure.cache_probe import CacheProbe
from horizon_lm.planning.measure.image_costs import RowsWithImages
from horizon_lm.runs.config import RunConfig, SftConfig, TextConfig
from horizon_lm.runs.data.loader import Loader
from horizon_lm.runs.data.token_dataset import TokenTable


@dataclass(frozen=True)
class Source:
    """The model of a run.

    Attributes:
        model: the model, with its config.
        stored_bytes: bytes per element of the checkpoint.
        is_local: the weights are on this machine.
        in_bfloat16: all weights of the checkpoint are in bfloat16.
        is_streamed: the model is streamed already, with the adapters that it has.
        head_values: per-token values from which the loss is computed; None for those that the run's settings imply.
        adapters: adapters that are trained; None for those of the run's settings.
        quantized: the quantized weights of a model that is streamed already; None to find them by the model's config.
        images: the images of rows; None for rows of text.
    """

    model: ModelSource
    stored_bytes: int
    is_local: bool
    in_bfloat16: bool = False
    is_streamed: bool = False
    head_values: tuple[str, ...] | None = None
    adapters: Any = None
    quantized: Any = None
    images: RowsWithImages | None = None
    _outlines: dict[Any, ModelOutline] = field(default_factory=dict, init=False)
    _cache_bytes: dict[Any, int] = field(default_factory=dict, init=False)
    _beside_text: list[frozenset[Component]] = field(default_factory=list, init=False)

    @property
    def config(self) -> Any:
        """The Hugging Face config of the model."""
        return self.model.config

    def checkpoint_bytes(self, layout: ModelLayout[StorageLayout]) -> int:
        """Return the bytes of the weights in the published files, with codes and scales if these are quantized.

        Args:
            layout: the layout of the model in a run.
        """
        if self.model.quantization is None:
            return round(layout.num_parameters * self.stored_bytes)
        if not layout.is_quantized:  # the run decodes the weights, so its layout lacks the codes in the files
            layout = model_outline.published_layout(
                self.model, Quantized.of(self.model.quantization, self.model.folder)
            )
        return layout.file_bytes(self.stored_bytes)

    def cache_bytes(self, run: RunConfig, length: int) -> int:
        """Return the device bytes of the key-value cache of a row with this number of tokens, over all blocks."""
        key = dtype, accelerated, _ = compute_dtype(run), run.device != "cpu", length
        if key not in self._cache_bytes:
            self._cache_bytes[key] = CacheProbe(self.model, dtype, accelerated).cache_bytes(Generation(1, 1, length))
        return self._cache_bytes[key]

    def beside_text(self) -> frozenset[Component]:
        """Return the components of the model that rows of text do not reach; none if a row of text cannot be tried."""
        if not self._beside_text:
            self._beside_text.append(model_outline.components_beside_text(self.model))
        return self._beside_text[0]

    def outline(
        self, run: RunConfig, *, length: int, masked: bool = True, mlp_chunk_tokens: int | None = None
    ) -> ModelOutline:
        """Return the model's outline for a run. The arguments are as in `model_outline.outline_model`."""
        quantized = self.quantized
        if quantized is None and not run.dequantize:
            published = Quantized.of(self.model.quantization, self.model.folder)
            quantized = published or Quantized.of(requested_quantization(run), None)
        accelerated = run.device != "cpu"
        options: dict[str, Any] = {
            "length": length,
            "dtype": compute_dtype(run),
            "masked": masked,
            "on_accelerator": accelerated,
            "mlp_chunk_tokens": mlp_chunk_tokens or run.mlp_chunk_tokens,
            "products": run.products,
            "trainable": run.trainable,
            "in_bfloat16": self.in_bfloat16,
            "frozen": frozenset() if self.is_streamed else frozen_components(run),
            "adapters": self.adapters or Adapters.of(run),
            "quantized": quantized,
            "packed": isinstance(run, TextConfig) and bool(run.packing or run.eval_packing),
            "allow_unproven_model": run.allow_unproven_model,
            "head_values": _head_values(run) if self.head_values is None else self.head_values,
            "images": self.images,
        }
        key = tuple(options.values())
        if key not in self._outlines:
            self._outlines[key] = model_outline.outline_model(self.model, **options)
        return self._outlines[key]


def compute_dtype(run: RunConfig) -> Any:
    """Return the dtype of weights and hidden states on the device."""
    return torch.bfloat16 if run.device != "cpu" and run.precision != "float32" else torch.float32


def _head_values(run: RunConfig) -> tuple[str, ...]:
    """Return the per-token values from which the loss is computed; empty for Hugging Face's own loss."""
    if isinstance(run, TextConfig) and run.label_smoothing_factor:
        return "logprobs", "mean"
    is_dft = isinstance(run, SftConfig) and run.loss_type == "dft"
    return ("logprobs",) if run.objective == "dpo" or is_dft else ()


def open_source(run: RunConfig) -> Source:
    """Find the config of a run's model on this machine, among the known models, or on the hub.

    Raises:
        ConfigError: there is no config, or transformers cannot read it.
        ModelNotSupportedError: the model is not a causal language model.
    """
    name = run.model_name_or_path
    if (folder := hub.folder_here(name)) is not None:
        return _source_in_folder(run, folder)
    known = find_known(name)
    config = known_config(known) if known else hub.fetch_config(name, run.trust_remote_code)
    if known and known.quantization:
        config.quantization_config = dict(known.quantization)
    model = _checked_model(run, config, None)
    in_bfloat16 = model.quantization is None and hf_config.config_dtype(config) == torch.bfloat16
    return Source(model, hf_config.config_bytes(config), is_local=False, in_bfloat16=in_bfloat16)


def fetch_source(run: RunConfig) -> Source:
    """Return the model of a run, whose files are downloaded unless they are on this machine.

    Raises:
        ConfigError, ModelNotSupportedError: as for `open_source`.
    """
    return _source_in_folder(run, hub.local_folder(run.model_name_or_path))


def _source_in_folder(run: RunConfig, folder: Path) -> Source:
    """Return a run's model whose files are in a folder."""
    config = hf_config.load_config(folder, run.trust_remote_code, run.gguf_file)
    model = _checked_model(run, config, folder)
    if run.gguf_file:
        stored_itemsize = 2  # weights of a GGUF file are decoded to 16 bits, except for training in float32
    elif model.quantization:
        stored_itemsize = hf_config.config_bytes(config)  # the files also hold codes and scales, in dtypes of their own
    else:
        stored_itemsize = hf_config.stored_bytes(folder, config)
    in_bfloat16 = not run.gguf_file and model.quantization is None and _is_in_bfloat16(folder)
    return Source(model, stored_itemsize, is_local=True, in_bfloat16=in_bfloat16)


def _is_in_bfloat16(folder: Path) -> bool:
    """Return whether all weights in a folder are in bfloat16; False if they cannot be read, which is an error later."""
    try:
        return WeightFiles.is_in(folder) and WeightFiles(folder).in_bfloat16
    except ConfigError:
        return False


def _checked_model(run: RunConfig, config: Any, folder: Path | None) -> ModelSource:
    """Return a run's model with this config; raise an error if the run would train quantized weights, or its adapters are missing.

    ``folder``: the folder of the model's files; None if they are not on this machine.
    """
    require_adapters(config, run)
    if run.adapter_name_or_path is not None:
        try:
            adapter = hub.local_folder(run.adapter_name_or_path)
        except ConfigError as error:
            raise ConfigError(f"adapter_name_or_path: {error}") from error
        if (adapter / ADAPTER_CONFIG).is_file():
            require_weights(adapter)
    return ModelSource(
        config, run.model_name_or_path, folder, model_class=class_of_adapters(Adapters.of(run), config), trust_remote_code=run.trust_remote_code,
        attn_implementation=run.attn_implementation, dtype=opened_dtype(run.precision),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowShape:
    """The properties of a run's examples that determine its memory.

    Attributes:
        length, eval_length: tokens of the longest training example, and of the longest example in the eval set.
        typical_length: tokens of the longest example of an average step; None for ``length``.
        tokens: tokens of an average step without padding; None if unknown.
        prompt_length: tokens of the longest sample prompt; 0 if there is no prompt, or if the length is unknown.
        masked: attention needs a mask, because examples are padded or packed.
        distinct_tokens: number of distinct tokens in all examples; None if unknown.
        has_images: a training example has an image; None if unknown.
    """

    length: int
    eval_length: int
    masked: bool = True
    distinct_tokens: int | None = None
    typical_length: int | None = None
    tokens: float | None = None
    prompt_length: int = 0
    has_images: bool | None = None

    @classmethod
    def of(cls, loader: Loader, held_out: Iterable[TokenTable], prompt_length: int = 0) -> "RowShape":
        """Return the shape of tokenized examples, given the loader of their steps."""
        rows, held_out = loader.rows, list(held_out)
        assert isinstance(rows, TokenTable)
        steps = [loader.sampler.rows(step) for step in range(loader.sampler.steps_per_epoch)]
        padded_tokens = sum(rows.lengths[step].max() * len(step) for step in steps)  # of an epoch
        return cls(
            length=int(rows.lengths.max()),
            eval_length=max((int(table.lengths.max()) for table in held_out), default=0),
            masked=any(table.needs_mask for table in (rows, *held_out)),
            # One more for padding. The longest sample prompt may add as many distinct tokens as it has.
            distinct_tokens=_num_distinct([rows, *held_out]) + 1 + prompt_length,
            typical_length=round(padded_tokens / sum(map(len, steps))),
            tokens=float(sum(rows.num_tokens[step].sum() for step in steps)) / len(steps),
            prompt_length=prompt_length,
            has_images=rows.has_images,
        )


def _num_distinct(tables: Iterable[TokenTable]) -> int:
    """Return the number of distinct tokens in all rows."""
    is_present = np.zeros(1, dtype=bool)  # by token id
    for ids in (ids for table in tables for ids in table.token_ids() if len(ids)):
        if (largest := int(ids.max())) >= len(is_present):
            is_present = np.pad(is_present, (0, 2 * largest + 1 - len(is_present)))  # doubled, to grow seldom
        is_present[ids] = True
    return int(is_present.sum())
