"""Turn a checkpoint into an ordinary Hugging Face folder, one tensor at a time; one of adapters into PEFT's folder."""

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.disk import Disk
from horizon_lm.common.paths import lasting_name
from horizon_lm.common.units import Unit
from horizon_lm.memory.layout.units import FLOAT32
from horizon_lm.memory.precision import join_master
from horizon_lm.model import hf_config, skeletons
from horizon_lm.model.adapter_config import share_weights
from horizon_lm.model.adapters import ADAPTER_CONFIG, PREFIX, Adapters, base_of_adapters
from horizon_lm.model.files.checkpoint_loader import parameter_names
from horizon_lm.model.files.checkpoint_reader import DTYPES
from horizon_lm.model.files.checkpoint_writer import write_folder
from horizon_lm.model.files.written_weights import persistent_buffers, written_model
from horizon_lm.model.folder import TEMPLATES
from horizon_lm.model.generation import write_generation_config
from horizon_lm.model.tying import declare_untied
from horizon_lm.model.units import find_parts
from horizon_lm.runs.checkpoints.checkpoint import ARRAYS, BUFFERS, read_state, read_tensors
from horizon_lm.runs.checkpoints.manifest import Manifest, read_manifest, verify
from horizon_lm.runs.checkpoints.new_folder import require_new, write_new_folder
from horizon_lm.runs.checkpoints.part_reader import PartReader, slab_of
from horizon_lm.runs.checkpoints.saving import STATE
from horizon_lm.runs.checkpoints.unit_file import LOW

_NOT_COPIED = (STATE, BUFFERS, ARRAYS, "config.json", "generation_config.json", "run.yaml", "plan.json")


class _SavedWeights:
    """The weights in the files of a checkpoint. Implements `model.files.written_weights.Weights`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = PartReader(folder, manifest)
        self._entries = {each.tensor: each for each in manifest.tensors}  # also low halves and moments
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in manifest.dtypes.items()}
        slabs = {name: slab_of(each.file) for name, each in self._entries.items() if name in self._dtypes}
        self.unit_of = {name: Unit.parse(slab.removesuffix(FLOAT32)) for name, slab in slabs.items()}
        self.written_dtype = torch.float32 if manifest.precision == "float32" else None

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape of a weight, and with its dtype in the model that was trained."""
        return torch.empty(self._entries[name].shape, dtype=self._dtypes[name], device="meta")

    def whole(self, unit: Unit) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight in a dtype if it is saved in it, or else its fp32 master."""
        is_saved = DTYPES[self._entries[name].dtype] == dtype
        return self._reader.read_whole(name) if is_saved else self.master(name)

    def master(self, name: str) -> torch.Tensor:
        """Return the fp32 master of a weight."""
        weight, low = self._reader.read_whole(name), name + LOW
        return join_master(weight, self._reader.read_whole(low)) if low in self._entries else weight.float()


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
    weights = _SavedWeights(checkpoint, manifest)
    model = _open_model(checkpoint, weights, trust_remote_code)
    dtype_name = dtype or read_state(checkpoint)["state"].get("settled", {}).get("export_dtype")

    def fill(part: Path) -> None:
        """Write the model, and other files of the checkpoint, such as its tokenizer's."""
        as_dtype = getattr(torch, dtype_name) if dtype_name else None
        if manifest.base:
            _save_adapters(model, checkpoint, weights, part, as_dtype)
        else:
            parts = find_parts(model)
            buffers = persistent_buffers(parts, weights.unit_of)
            contents = written_model(parts, weights, buffers, as_dtype, {})
            write_folder(Disk(), part, model, contents, max_shard_size)
        for file in manifest.files:
            is_copied = Path(file).parent in (Path(), Path(TEMPLATES)) and file not in _NOT_COPIED
            if is_copied and not (part / file).exists():
                (part / file).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint / file, part / file)

    write_new_folder(folder, fill)


def _open_model(checkpoint: Path, weights: _SavedWeights, trust_remote_code: bool) -> Any:
    """Return the model of a checkpoint without weights, with its buffers."""
    config = hf_config.read_config(checkpoint, trust_remote_code)
    model_class = hf_config.saved_class(config)
    hf_config.require_model(config, str(checkpoint), model_class)
    model = skeletons.open_skeleton(checkpoint, config, model_class=model_class, trust_remote_code=trust_remote_code)
    if any(name in weights.unit_of for name, first in parameter_names(model).items() if name != first):
        declare_untied(config)  # its config ties parameters that have weights of their own in the checkpoint
        model = skeletons.open_skeleton(
            checkpoint, config, model_class=model_class, trust_remote_code=trust_remote_code
        )
    for name, value in read_tensors(checkpoint / BUFFERS).items():
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path).register_buffer(attribute, value)
    return model


def _save_adapters(
    model: Any, checkpoint: Path, weights: _SavedWeights, folder: Path, dtype: torch.dtype | None
) -> None:
    """Let PEFT write the adapters of a checkpoint, with a model that has no weights."""
    # PEFT writes the name of the model that the adapters are added to.
    model.config.name_or_path = model.name_or_path = lasting_name(base_of_adapters(checkpoint) or "")
    # PEFT writes the adapter "default" into the folder itself, and each other one into a folder of its name.
    others = {path.parent.name: path.parent for path in checkpoint.glob(f"*/{ADAPTER_CONFIG}")}
    configs = {"default": checkpoint} | others
    for name, config_folder in configs.items():
        if (config_folder / ADAPTER_CONFIG).is_file():
            model = Adapters(folder=str(config_folder)).add_to(model, draw=False, name=name)
    dtype = dtype or weights.written_dtype
    state = {PREFIX + name: weights.master(name).to(dtype or weights.meta(name).dtype) for name in weights.unit_of}
    model.save_pretrained(folder, state_dict=state)
    write_generation_config(model.generation_config, folder)  # PEFT does not
    share_weights(folder)
