"""Turn a checkpoint into an ordinary Hugging Face folder, one tensor at a time; one of adapters into PEFT's folder."""

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from horizon_lm.common.paths import lasting_name
from horizon_lm.common.units import Unit
from horizon_lm.memory.layout.ranks import WHOLE
from horizon_lm.memory.layout.slabs import SlabLayout, SlotLayout
from horizon_lm.memory.layout.units import FLOAT32
from horizon_lm.memory.precision import join_master
from horizon_lm.model import hf_config, skeletons
from horizon_lm.model.adapter_config import share_weights
from horizon_lm.model.adapters import ADAPTER_CONFIG, Adapters, base_of_adapters
from horizon_lm.model.files.checkpoint_loader import parameter_names
from horizon_lm.model.files.checkpoint_writer import save_pretrained
from horizon_lm.model.folder import TEMPLATES
from horizon_lm.model.generation import write_generation_config
from horizon_lm.model.tying import declare_untied
from horizon_lm.model.units import find_parts
from horizon_lm.runs.checkpoints.checkpoint import ARRAYS, BUFFERS, read_state, read_tensors
from horizon_lm.runs.checkpoints.manifest import Manifest, TensorEntry, read_manifest, verify
from horizon_lm.runs.checkpoints.new_folder import require_new, write_new_folder
from horizon_lm.runs.checkpoints.part_reader import slab_of
from horizon_lm.runs.checkpoints.saving import STATE
from horizon_lm.runs.checkpoints.unit_file import LOW

_NOT_COPIED = (STATE, BUFFERS, ARRAYS, "config.json", "generation_config.json", "run.yaml", "plan.json")


class _Unit:
    """The layout of a unit: the only attribute of `UnitSlabs` that exporting reads."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self.layout = SlotLayout(SlabLayout(shapes))


class _CheckpointStore:
    """The weights of a checkpoint on disk, with the interface of `Store` that exporting needs."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._parts: dict[str, list[TensorEntry]] = {}  # by tensor; several if several ranks have written it
        shapes: dict[Unit, dict[str, torch.Size]] = {}
        for entry in manifest.tensors:
            self._parts.setdefault(entry.tensor, []).append(entry)
            if entry.tensor in manifest.dtypes:  # a weight, and no low half or moment of one
                unit = Unit.parse(slab_of(entry.file).removesuffix(FLOAT32))
                shapes.setdefault(unit, {})[entry.tensor] = torch.Size(entry.shape)
        self.units = {unit: _Unit(of_unit) for unit, of_unit in shapes.items()}
        self.unit_of = {name: unit for unit, of_unit in shapes.items() for name in of_unit}
        self.source_dtypes = {name: getattr(torch, dtype) for name, dtype in manifest.dtypes.items()}
        self.shard = WHOLE
        self.written_dtype = torch.float32 if manifest.precision == "float32" else None
        self.source_buffers: Mapping[str, torch.Tensor] = {}  # buffers of a checkpoint are not rounded
        self.codecs: Mapping[str, Any] = {}  # a checkpoint has no quantized weights

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self.units[self.unit_of[name]].layout.entry(name).shape)

    def weight(self, name: str) -> torch.Tensor:
        return self._read(name)

    def master(self, name: str) -> torch.Tensor:
        weight = self._read(name)
        return join_master(weight, self._read(name + LOW)) if name + LOW in self._parts else weight.float()

    def whole(self, unit: Unit) -> AbstractContextManager[None]:
        return nullcontext()

    def _read(self, tensor: str) -> torch.Tensor:
        """Return a tensor, joined from the parts that several ranks have written."""
        parts: list[torch.Tensor] = []
        for each in sorted(self._parts[tensor], key=lambda each: each.start):
            with safe_open(self._folder / each.file, "pt") as file:
                parts.append(file.get_tensor(tensor))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.reshape(-1) for part in parts]).view(self._parts[tensor][0].shape)


def export_checkpoint(
    checkpoint: str | Path,
    folder: str | Path,
    dtype: str | None = None,
    max_shard_size: int | str = "50GB",
    trust_remote_code: bool = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder. Memory is needed for one tensor at a time.

    A checkpoint of adapters becomes PEFT's folder of the adapters.

    Args:
        checkpoint: the folder of a checkpoint; its files are verified first.
        folder: the folder to write; it must not exist.
        dtype: ``bfloat16``, ``float16`` or ``float32``, which is exactly the fp32 master; None for the dtype of the run's export.
        max_shard_size: the largest size of a file.
        trust_remote_code: allow code that comes with the model.

    Raises:
        ConfigError: the checkpoint is damaged, or the folder exists.
        ModelNotSupportedError: the model needs code that the checkpoint does not have.
    """
    checkpoint, folder = Path(checkpoint), Path(folder)
    require_new(folder)
    manifest = read_manifest(checkpoint)
    verify(checkpoint, manifest)
    store: Any = _CheckpointStore(checkpoint, manifest)
    model = _open_model(checkpoint, store, trust_remote_code)
    dtype_name = dtype or read_state(checkpoint)["state"].get("settled", {}).get("export_dtype")

    def fill(part: Path) -> None:
        """Write the model, and other files of the checkpoint, such as its tokenizer's."""
        as_dtype = getattr(torch, dtype_name) if dtype_name else None
        if manifest.base:
            _save_adapters(model, checkpoint, store, part, as_dtype)
        else:
            save_pretrained(find_parts(model), store, part, as_dtype, max_shard_size)
        for file in manifest.files:
            is_copied = Path(file).parent in (Path(), Path(TEMPLATES)) and file not in _NOT_COPIED
            if is_copied and not (part / file).exists():
                (part / file).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint / file, part / file)

    write_new_folder(folder, fill)


def _open_model(checkpoint: Path, store: _CheckpointStore, trust_remote_code: bool) -> Any:
    """Return the model of a checkpoint without weights, with its buffers."""
    config = hf_config.read_config(checkpoint, trust_remote_code)
    model_class = hf_config.saved_class(config)
    hf_config.require_model(config, str(checkpoint), model_class)
    model = skeletons.open_skeleton(checkpoint, config, model_class=model_class, trust_remote_code=trust_remote_code)
    if any(name in store.unit_of for name, first in parameter_names(model).items() if name != first):
        declare_untied(config)  # its config ties parameters that have weights of their own in the checkpoint
        model = skeletons.open_skeleton(
            checkpoint, config, model_class=model_class, trust_remote_code=trust_remote_code
        )
    for name, value in read_tensors(checkpoint / BUFFERS).items():
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path).register_buffer(attribute, value)
    return model


def _save_adapters(
    model: Any, checkpoint: Path, store: _CheckpointStore, folder: Path, dtype: torch.dtype | None
) -> None:
    """Let PEFT write the adapters of a checkpoint, with a model that has no weights."""
    # PEFT writes the name of the model that the adapters are added to.
    model.config.name_or_path = model.name_or_path = lasting_name(base_of_adapters(checkpoint) or "")
    configs = {"default": checkpoint} | {
        path.parent.name: path.parent for path in checkpoint.glob("*/adapter_config.json")
    }
    for name, config_folder in configs.items():
        if (config_folder / ADAPTER_CONFIG).is_file():
            model = Adapters(folder=str(config_folder)).add_to(model, draw=False, name=name)
    prefix = "base_model.model."  # of names in PEFT's model
    dtype = dtype or store.written_dtype
    weights = {prefix + name: store.master(name).to(dtype or store.source_dtypes[name]) for name in store.unit_of}
    model.save_pretrained(folder, state_dict=weights)
    write_generation_config(model.generation_config, folder)  # PEFT does not
    share_weights(folder)
