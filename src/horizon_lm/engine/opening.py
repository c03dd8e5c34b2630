"""Making a model streamed: one that is built already, one from a folder or hub id, one from a config."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_lm.device.base import Device
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.memory import Options
from horizon_lm.engine.parameters import require_plain
from horizon_lm.engine.streamed import StreamedModel, attach
from horizon_lm.errors import ConfigError, HeadWarning, ModelNotSupportedError, StreamingError
from horizon_lm.model import attention, capture, source
from horizon_lm.model.head_path import ChunkedPath, find_chunked_path
from horizon_lm.model.head_run import head_peak
from horizon_lm.model.outer_trial import require_each_block_once, try_outer
from horizon_lm.model.parts import ModelParts, ParamRef, find_parts
from horizon_lm.model.skeleton import build_skeleton
from horizon_lm.plan.residency import Residency
from horizon_lm.plan.spare import head_chunk_tokens
from horizon_lm.store.load import Checkpoint, load_weights
from horizon_lm.store.precision import Precision, get_precision
from horizon_lm.store.store import Store


def stream(
    model: Any,
    device: str | Device = "cpu",
    precision: str = "fp32_master",
    device_micro_batch_size: int | None = None,
    head: str = "chunked",
    *,
    boundaries: str | int = "auto",
    held_blocks: int | None = None,
    held_graphs: int | None = None,
    head_chunk_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    device_memory: int | None = None,
    mlp_chunk_tokens: int | None = None,
    compile: bool | str = "auto",
    check_recompute: bool = False,
    attn_implementation: str | None = None,
) -> Any:
    """Stream a Hugging Face causal language model that is in memory already.

    Its parameters move into the store one by one, and each is freed where it was. The module stays the same object,
    and so do its parameters.

    Args:
        model: a transformers causal language model with its weights.
        device: ``cpu``, ``cuda`` (or ``cuda:1``), ``simulated``, or a `Device`.
        precision: how weights are kept: ``fp32_master`` (bf16 and 16 low bits, an exact fp32 master), ``bf16``
            (stochastically rounded updates) or ``float32``.
        device_micro_batch_size: rows on the device at once inside a block; None for the whole batch.
        head: ``chunked`` (loss only, logits never whole) or ``whole`` (Hugging Face's own head and loss, with logits).
        boundaries: where a block's input waits for the backward: ``device``, ``host``, a number for the device in so many of
            the last blocks, or ``auto`` for the device as far as there is room. With ``auto``, what room is left then is
            spent on held blocks, once the first batch is there.
        held_blocks: so many of the last blocks keep their weights on the device from forward to backward, so that they are
            not streamed in a second time; None for none, or with ``auto`` as many as there is room for.
        held_graphs: so many of these keep their whole computation, so that it is not repeated in the backward.
        head_chunk_tokens: tokens whose logits exist at once with ``chunked``; None for about 64 MiB of logits in host memory,
            and a sixteenth of the free memory elsewhere.
        compute_dtype: on the device; None for float32 on the CPU and the stored dtype elsewhere.
        grad_dtype: of the gradients in host memory, 2 or 4 bytes per parameter; None for float32 in precision ``float32``
            and bfloat16 otherwise. Several backward calls per step add up with fewer roundings in float32.
        device_memory: bytes that buffers on the device may take; None for no limit of ours.
        mlp_chunk_tokens: tokens whose feed-forward activations exist at once, for very long rows; they are computed once more
            in the backward. None for all.
        compile: compile blocks with torch.compile, each structure once; ``auto`` on CUDA.
        check_recompute: compare each recomputed output with the forward's (for tests; keeps all outputs).
        attn_implementation: as in transformers, or ``varlen``: packed and padded rows without a mask, through flash-attn or
            torch's own kernel on CUDA. None for what the model has, and on CUDA ``varlen`` instead of ``sdpa`` where it can.

    Raises:
        ConfigError: a setting that is not possible.
        ModelNotSupportedError: a model that cannot be streamed exactly.
    """
    settings = Settings(
        device, precision, device_micro_batch_size, head, boundaries, held_blocks, held_graphs, head_chunk_tokens,
        compute_dtype, grad_dtype, device_memory, mlp_chunk_tokens, compile, check_recompute, attn_implementation,
    )  # fmt: skip
    return _stream(model, settings)


def from_pretrained(
    model_name_or_path: str | Path,
    device: str | Device = "cpu",
    precision: str = "fp32_master",
    *,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Open a folder of safetensors or a hub id, streamed. Weights go straight into the store, tensor by tensor.

    Args:
        model_name_or_path: a Hugging Face folder or hub id.
        gguf_file: a GGUF file in it to read instead; the whole model is in memory once while it is dequantized.
        trust_remote_code: allow the model's own code.
        options: the other arguments of `stream`, which raise what they raise there.
    """
    settings = Settings(device, precision, **options)
    folder = source.local_folder(model_name_or_path)
    if gguf_file is not None:
        return _stream(source.load_gguf(folder, gguf_file), settings)
    config = source.load_config(folder, trust_remote_code)
    attention.register()
    model = source.open_skeleton(
        folder, config, trust_remote_code=trust_remote_code, attn_implementation=settings.attn_implementation
    )
    parts, store = _empty(model, settings)
    load_weights(parts, store, Checkpoint(folder))
    return settings.attach(parts, store)


def from_config(config: Any, device: str | Device = "cpu", precision: str = "fp32_master", **options: Any) -> Any:
    """A model with random weights; options as in `stream`.

    Transformers' own initialisation draws them on the device, unit by unit: no more than the largest unit is there.
    """
    settings = Settings(device, precision, **options)
    opened = open_device(settings.device, settings.device_memory)
    model = build_skeleton(config)
    parts, store = _empty(model, settings)
    for refs in parts.units.values():
        _draw(parts.model, refs, store, opened.torch_device)
    return replace(settings, device=opened).attach(parts, store)


def _draw(model: Any, refs: Sequence[ParamRef], store: Store, device: torch.device) -> None:
    """Initialise the parameters of one unit on a device, and keep them in the store."""
    drawn = {ref.name: torch.zeros(ref.param.shape, dtype=store.weight(ref.name).dtype, device=device) for ref in refs}
    for ref in refs:
        for module, attribute in ref.places:
            module._parameters[attribute] = nn.Parameter(drawn[ref.name], requires_grad=False)
    for module in {id(m): m for ref in refs for m, _ in ref.places}.values():
        model._init_weights(module)
    for ref in refs:
        store.source_dtypes[ref.name] = drawn[ref.name].dtype
        store.write(ref.name, drawn[ref.name])
        for module, attribute in ref.places:
            module._parameters[attribute] = ref.param


@dataclass(frozen=True)
class Settings:
    """The arguments of `stream`, checked when they are made."""

    device: str | Device = "cpu"
    precision: str = "fp32_master"
    device_micro_batch_size: int | None = None
    head: str = "chunked"
    boundaries: str | int = "auto"
    held_blocks: int | None = None
    held_graphs: int | None = None
    head_chunk_tokens: int | None = None
    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    device_memory: int | None = None
    mlp_chunk_tokens: int | None = None
    compile: bool | str = "auto"
    check_recompute: bool = False
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        self.get_precision()
        for name in ("device_micro_batch_size", "head_chunk_tokens", "mlp_chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1, or unset")
        if self.head not in ("chunked", "whole"):
            raise ConfigError(f"head is {self.head!r}; choose 'chunked' or 'whole'")
        is_number = isinstance(self.boundaries, int) and not isinstance(self.boundaries, bool) and self.boundaries >= 0
        if self.boundaries not in ("auto", "device", "host") and not is_number:
            raise ConfigError(
                f"boundaries is {self.boundaries!r}; choose 'auto', 'device', 'host', or a number of blocks"
            )
        if self.compile not in (True, False, "auto"):
            raise ConfigError(f"compile is {self.compile!r}; choose True, False or 'auto'")
        if not 0 <= (self.held_graphs or 0) <= (self.held_blocks or 0):
            raise ConfigError(
                f"held_graphs is {self.held_graphs}, but held_blocks is {self.held_blocks}; a graph needs its block's weights"
            )

    def get_precision(self) -> Precision:
        """How weights and gradients are kept."""
        return get_precision(self.precision, self.grad_dtype)

    def take_apart(self, model: Any) -> ModelParts:
        """Find the units of a model, and refuse it before anything of it is touched."""
        capture.install_hooks(model)
        parts = find_parts(model)
        trial = try_outer(parts)
        require_each_block_once(parts, trial)
        if self.device_micro_batch_size is not None and trial is not None and not trial.rows_first:
            raise ModelNotSupportedError(
                f"{type(model).__name__}: rows are not the first dimension of its hidden states, so they cannot be cut into "
                "micro-batches; leave device_micro_batch_size unset"
            )
        attention.register()
        attention.choose(model, self.attn_implementation, self._on_accelerator)
        return parts

    def _chunked_path(self, parts: ModelParts) -> ChunkedPath | None:
        """How the loss is computed in chunks; None with head ``whole``, and with a warning where it cannot be."""
        if self.head == "whole":
            return None
        path = find_chunked_path(parts)
        if isinstance(path, ChunkedPath):
            return path
        warnings.warn(
            f"{type(parts.model).__name__}: head='whole' is used, with all logits at once, because {path}; "
            "set head='whole' to choose it yourself",
            HeadWarning,
            stacklevel=5,
        )
        return None

    @property
    def _on_accelerator(self) -> bool:
        if isinstance(self.device, str):
            return self.device.partition(":")[0] not in ("cpu", "simulated")
        return self.device.torch_device.type != "cpu"

    def attach(self, parts: ModelParts, store: Store) -> Any:
        """Put the model on its device."""
        device = open_device(self.device, self.device_memory)
        on_host = device.torch_device.type == "cpu"
        dtype = self.compute_dtype or (torch.float32 if on_host else store.precision.weight_dtype)
        path = self._chunked_path(parts)
        trunk = parts.trunks()[-1] if path is None else path.trunk
        options = Options(
            dtype,
            self._residency(parts.num_blocks, device),
            self.device_micro_batch_size,
            "whole" if path is None else "chunked",
            self.head_chunk_tokens or head_chunk_tokens(device.spare_bytes(), parts.sizes().vocabulary),
            None if device.spare_bytes() is None else head_peak(parts, trunk, dtype, chunked=path is not None),
            self.mlp_chunk_tokens,
            self._on_accelerator if self.compile == "auto" else bool(self.compile),
            self.check_recompute,
        )
        return attach(parts, store, device, options, path)

    def _residency(self, num_blocks: int, device: Device) -> Residency | None:
        """What stays on the device, as far as that is said."""
        asked = self.held_blocks is not None or self.held_graphs is not None
        if self.boundaries == "auto" and not asked and device.spare_bytes() is not None:
            return None
        held = min(self.held_blocks or 0, num_blocks)
        graphs = min(self.held_graphs or 0, held)
        said = (
            self.boundaries if isinstance(self.boundaries, int) else graphs if self.boundaries == "host" else num_blocks
        )
        return Residency(max(graphs, min(said, num_blocks)), held, graphs)


def _stream(model: Any, settings: Settings) -> Any:
    if isinstance(model, StreamedModel):
        raise StreamingError("the model is streamed already")
    parts = settings.take_apart(model)
    for refs in parts.units.values():
        for ref in refs:
            require_plain(ref.param)
    store = Store(_shapes(parts), settings.get_precision())
    for refs in parts.units.values():
        for ref in refs:
            store.source_dtypes[ref.name] = ref.param.dtype
            store.write(ref.name, ref.param.data)
            ref.param.data = store.weight(ref.name)  # frees what it pointed to before
    return settings.attach(parts, store)


def _shapes(parts: ModelParts) -> dict[str, dict[str, torch.Size]]:
    return {unit: {ref.name: ref.param.shape for ref in refs} for unit, refs in parts.units.items()}


def _empty(model: Any, settings: Settings) -> tuple[ModelParts, Store]:
    """A skeleton whose parameters are views into a new store."""
    parts = settings.take_apart(model)
    store = Store(_shapes(parts), settings.get_precision())
    for refs in parts.units.values():
        for ref in refs:
            ref.param = nn.Parameter(store.weight(ref.name), ref.param.requires_grad)
            for module, attribute in ref.places:
                module._parameters[attribute] = ref.param
    return parts, store


def open_device(device: str | Device, capacity: int | None = None) -> Device:
    """The device of that name; one that is already open is returned as it is.

    Raises:
        ConfigError: no such device, or none of that kind here.
    """
    if not isinstance(device, str):
        return device
    if device == "cpu":
        return CpuDevice(capacity)
    if device == "simulated":
        return SimulatedDevice(capacity=capacity)
    if device.partition(":")[0] == "cuda":
        from horizon_lm.device.cuda import CudaDevice

        return CudaDevice(device, capacity)
    raise ConfigError(f"device is {device!r}; choose 'cpu', 'cuda' or 'simulated'")
