"""Save and load the whole state of a training: weights, low halves, moments, and state that the caller adds."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from horizon_lm.common.disk import Disk, restore_folder
from horizon_lm.common.run_folders import UNITS
from horizon_lm.device.host_threads import DISK_THREADS
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import ConfigError, StreamingError, first_line
from horizon_lm.memory.store import Store
from horizon_lm.memory.unit_slabs import Slab
from horizon_lm.model.files.checkpoint_loader import fill_buffer
from horizon_lm.model.files.checkpoint_writer import write_configs
from horizon_lm.model.files.written_weights import main_dtype, persistent_buffers, unrounded_buffers
from horizon_lm.optim.slab_optimizer import SlabOptimizer
from horizon_lm.runs.checkpoints.frozen_base import hash_base, require_base, write_adapter_configs
from horizon_lm.runs.checkpoints.manifest import Manifest, read_json, verify_copies
from horizon_lm.runs.checkpoints.part_reader import PartReader, slab_of
from horizon_lm.runs.checkpoints.plain_state import (
    from_plain,
    random_state,
    require_random_state,
    restore_random_state,
    to_plain,
)
from horizon_lm.runs.checkpoints.saving import STATE, CheckpointWriter, RateLimit, Saving
from horizon_lm.runs.checkpoints.unit_file import LOW, UnitFile, unit_file

BUFFERS, ARRAYS = "buffers.safetensors", "arrays.safetensors"


def save_checkpoint(
    folder: str | Path,
    model: Any,
    optimizer: SlabOptimizer | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    arrays: Mapping[str, torch.Tensor] | None = None,
    add_files: Callable[[Path], None] | None = None,
    published: Callable[[], None] = lambda: None,
    wait: bool = True,
    disk: Disk | None = None,
    rate_limit: RateLimit | None = None,
) -> Saving:
    """Write a checkpoint of a training, between two steps. Weights and moments are written from where they lie.

    With ``wait=False``, training may go on at once: the update of a unit waits until the unit is on disk. The checkpoint is
    that of this moment in any case. Gradients that no step has applied are not part of it.

    Args:
        folder: the folder of the checkpoint; one that exists is replaced once the new one is complete. Another folder is kept
            under a name with the present time.
        model: a streamed model.
        optimizer: its `AdamW`, or another optimizer of horizon_lm; None to save the weights alone.
        state: further state as plain data, such as the state dict of a scheduler.
        arrays: further state as tensors.
        add_files: a function that writes further files into the folder before the training goes on.
        published: called in another thread when the checkpoint is on disk.
        wait: return once the checkpoint is on disk.
        disk: file operations, for tests.
        rate_limit: the limit on the bytes per second.

    Returns:
        The checkpoint that is being written; its ``wait()`` raises the error if it cannot be written.

    Raises:
        ConfigError: ``model`` or ``optimizer`` cannot be saved.
        StreamingError: a pass is running, or a step of an optimizer with ``update_in_backward`` is not finished.
        OSError: with ``wait``, if the checkpoint cannot be written, for example because the disk is full.
    """
    engine, disk, folder = engine_of(model, "a checkpoint"), disk or Disk(), Path(folder)
    _require_between_steps(engine, optimizer)
    engine.saves.wait()  # until the last checkpoint is written
    engine.foreign_writes.follow()
    contents = _other_files(engine, optimizer, state or {}, arrays or {})
    manifest = _manifest_of(engine, optimizer)
    files = _unit_files(engine, optimizer)
    rank, num_ranks = engine.mesh.rank, engine.store.shard.count
    if rank >= num_ranks:  # this rank has another copy of the model; only the first copy is saved
        files = {}
    writer = CheckpointWriter(
        folder, files, manifest, contents, published, disk, rate_limit or RateLimit(None), rank=rank, num_ranks=num_ranks
    )  # fmt: skip
    _create_folder(writer, engine, lambda part: _write_side_files(engine, part, add_files, disk))
    if not files:
        return writer.end_without_files()
    _start_writing(writer, engine)
    if wait:
        writer.saving.wait()
    return writer.saving


def _require_between_steps(engine: Engine, optimizer: SlabOptimizer | None) -> None:
    """Raise StreamingError if a step is under way. Updates that were interrupted are issued first, so that weights and moments are
    those of the end of a step.
    """
    if optimizer is not None:
        _require_own(optimizer, engine)
    engine.resume_interrupted()
    optimizer_in_backward = engine.updates.optimizer_in_backward
    if engine.cursor.active or (optimizer_in_backward is not None and optimizer_in_backward.pending):
        raise StreamingError("save_checkpoint was called inside a step; call it after optimizer.step()")


def _other_files(
    engine: Engine, optimizer: SlabOptimizer | None, state: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> dict[str, bytes]:
    """Return the contents of the files with the state that is in no unit and that the next step changes, by the files' names."""
    content = {
        "optimizer": optimizer.scalars() if optimizer else None,
        "random": random_state(devices=not engine.device_lost),
        "state": to_plain(dict(state), "the state of a checkpoint"),
    }
    tensors = {BUFFERS: unrounded_buffers(engine.parts, engine.store), ARRAYS: arrays}
    files = {STATE: (json.dumps(content, indent=1) + "\n").encode()}
    for file, group in tensors.items():
        if group:  # cloned, because the format allows no tensors that share memory
            copies = {name: each.detach().cpu().clone() for name, each in group.items()}
            files[file] = safetensors.torch.save(copies)
    return files


def _manifest_of(engine: Engine, optimizer: SlabOptimizer | None) -> Manifest:
    """Return the manifest of a checkpoint of this moment, without files and tensors. All ranks call this, to hash a frozen base."""
    store = engine.store
    return Manifest(
        step=optimizer.scalars()["step"] if optimizer else 0,
        precision=store.precision.name,
        moments=optimizer.moments.kind if optimizer else None,
        dtypes={name: str(dtype).removeprefix("torch.") for name, dtype in store.source_dtypes.items()},
        files={},
        tensors=[],
        base=hash_base(store, engine.mesh),
    )


def _start_writing(writer: CheckpointWriter, engine: Engine) -> None:
    """Begin to write the units' files. From then on, the update of a unit waits until the unit's file is written."""
    if engine.device_lost:  # nothing changes any more, so no update has to wait
        writer.write_units()
        return
    engine.saves.running = writer
    engine.resume_interrupted()
    tasks = engine.saves.run(writer.moves(), engine.layout)
    writer.saving.issue = lambda: writer.attempt(engine.saves.finish_issuing)
    writer.saving.wait_for_moves = lambda: writer.attempt(lambda: engine.device.wait(tasks))


def _create_folder(writer: CheckpointWriter, engine: Engine, add_files: Callable[[Path], None]) -> None:
    """Create the folder of a checkpoint, on the first rank. If that fails, raise OSError on all ranks."""
    mesh, problem = engine.mesh, ""
    try:
        if mesh.rank == 0:
            writer.prepare(add_files)
    except OSError as error:
        problem = first_line(error)
        raise
    finally:  # after an error, too, because the other ranks are waiting
        problem = mesh.exchange("the folder of a checkpoint", problem)[0]
    if problem:
        raise OSError(f"rank 0 cannot write the checkpoint: {problem}")


def load_checkpoint(
    folder: str | Path, model: Any, optimizer: SlabOptimizer | None = None, *, random: bool = True
) -> dict[str, Any]:
    """Load a checkpoint into a streamed model and its optimizer, bit for bit.

    All files are verified before the first weight changes.

    Args:
        folder: the folder of a checkpoint.
        model: a streamed model of the same architecture and precision.
        optimizer: the one that was saved, with the same parameters, groups and kind of moments; None to load the weights alone.
        random: give the random generators their saved states.

    Returns:
        The ``state`` that was saved.

    Raises:
        ConfigError: the checkpoint is damaged, of another model, precision or optimizer, or another one on another rank;
            nothing was changed.
    """
    folder = Path(folder)
    restore_folder(Disk(), folder)
    content = restore(folder, verify_copies(engine_of(model, "a checkpoint").mesh, folder), model, optimizer)
    if optimizer is not None:
        optimizer.load_settings(content["optimizer"])
    if random:
        restore_random_state(content["random"])
    return content["state"]


def restore(folder: Path, manifest: Manifest, model: Any, optimizer: SlabOptimizer | None) -> dict[str, Any]:
    """Load a checkpoint whose files have been verified, and return the contents of its state file. The settings of the optimizer stay.

    Raises:
        ConfigError: the checkpoint does not fit, and nothing was changed.
        ConfigError, OSError: a file cannot be read any more, and weights were changed.
    """
    engine = engine_of(model, "a checkpoint")
    if optimizer is not None:
        _require_own(optimizer, engine)
    store = engine.store
    _require_fit(folder, manifest, engine, optimizer)
    content, buffers = read_state(folder), read_tensors(folder / BUFFERS)
    require_random_state(content["random"])
    files, reader = _unit_files(engine, optimizer), PartReader(folder, manifest)
    for file in files.values():
        reader.require(file)
    _require_buffers(folder, buffers, engine)
    # All is checked; from here on, the model changes.
    with torch.no_grad():
        engine.drain()
        if optimizer is not None:
            optimizer.load_scalars(content["optimizer"])
        with ThreadPoolExecutor(DISK_THREADS) as threads:
            list(threads.map(reader.read, files.values()))
        own_buffers = persistent_buffers(engine.parts, store.unit_of)
        for name, value in buffers.items():
            fill_buffer(store, name, own_buffers[name], value)
    store.source_dtypes.update({name: getattr(torch, dtype) for name, dtype in manifest.dtypes.items()})
    store.weights_changed()
    engine.foreign_writes.follow(with_low_halves=True)
    return content


def _unit_files(engine: Engine, optimizer: SlabOptimizer | None) -> dict[Slab, UnitFile]:
    """Return the layouts of the units' files, by the slab of weights in each. A tied head and a frozen base have no files."""
    moments = optimizer.moments if optimizer is not None else None
    units = [unit for unit in engine.store.units if engine.slab_unit(unit) == unit and unit not in engine.store.frozen]
    return {slab: unit_file(slab, moments) for unit in units for slab in engine.store.units[unit].saved}


def read_state(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's state file: the optimizer's scalars, random states, and the caller's state.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    content = read_json(folder / STATE)
    try:
        return {"optimizer": content["optimizer"], "random": content["random"], "state": from_plain(content["state"])}
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / STATE} is damaged: it is not the state of a training") from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file; none if there is no file. Raise ConfigError if it is damaged."""
    try:
        return safetensors.torch.load_file(path) if path.is_file() else {}
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error


def _require_fit(folder: Path, manifest: Manifest, engine: Engine, optimizer: SlabOptimizer | None) -> None:
    """Raise ConfigError if a checkpoint is of another model, or in another format than this model and optimizer."""
    store = engine.store
    if manifest.precision != store.precision.name:
        raise ConfigError(
            f"{folder} was saved with precision {manifest.precision}, and this model has {store.precision.name}; use the same"
        )
    if optimizer is not None and manifest.moments != optimizer.moments.kind:
        raise ConfigError(
            f"{folder} was saved with moments {manifest.moments}, and this optimizer has {optimizer.moments.kind}; use the same"
        )
    require_base(folder, manifest, store, engine.mesh)
    if optimizer is not None:  # after the base: moments are found by the names of this model's parameters
        _require_moments(folder, manifest, store, optimizer)
    saved_slabs = {slab_of(name) for name in manifest.files if name.startswith(f"{UNITS}/")}
    if saved_slabs != (expected := {slab.name for slab in _unit_files(engine, None)}):
        raise ConfigError(
            f"{folder} has {len(saved_slabs)} units, and this model has {len(expected)}; it is of another model"
        )
    own_shapes = {name: tuple(store.shape(name)) for name, unit in store.unit_of.items() if unit not in store.frozen}
    saved_shapes = {each.tensor: each.shape for each in manifest.tensors}
    for name, shape in own_shapes.items():
        if saved_shapes.get(name) != shape:
            raise ConfigError(
                f"{folder} has {name} of shape {saved_shapes.get(name)}, and this model of {shape}; it is of another model"
            )


def _require_moments(folder: Path, manifest: Manifest, store: Store, optimizer: SlabOptimizer) -> None:
    """Raise ConfigError if a checkpoint has moments of other names than this optimizer's: it was saved with another one."""
    saved, own = set[str](), set(optimizer.moments.names)
    for each in manifest.tensors:  # a parameter, or one with a suffix: its low half, or a moment
        name, _, suffix = each.tensor.rpartition(".")
        is_parameter = each.tensor in store.unit_of
        if not is_parameter and name in store.unit_of and f".{suffix}" != LOW:
            saved.add(suffix)
    if saved != own:
        raise ConfigError(
            f"{folder} was saved with another optimizer: it has {', '.join(sorted(saved))} of each parameter, and "
            f"horizon_lm.{optimizer.rule.name} {', '.join(sorted(own))}; use the same"
        )


def _require_buffers(folder: Path, buffers: Mapping[str, torch.Tensor], engine: Engine) -> None:
    """Raise ConfigError unless a checkpoint and the model have the same buffers, in the same shapes."""
    saved = {name: each.shape for name, each in buffers.items()}
    own = {name: each.shape for name, each in persistent_buffers(engine.parts, engine.store.unit_of).items()}
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            raise ConfigError(
                f"{folder} has the buffer {name} of shape {saved.get(name)}, and this model {own.get(name)}"
            )


def _write_side_files(engine: Engine, part: Path, add_files: Callable[[Path], None] | None, disk: Disk) -> None:
    """Write the configs that make the checkpoint a model of transformers or PEFT, and the files of the caller."""
    write_configs(disk, engine.parts.model, part, main_dtype(engine.store))
    write_adapter_configs(engine.parts.model, part)
    if add_files is not None:
        add_files(part)


def _require_own(optimizer: Any, engine: Engine) -> None:
    """Raise ConfigError for an optimizer that is none of horizon_lm, and StreamingError for one of another model."""
    if not isinstance(optimizer, SlabOptimizer):
        raise ConfigError(
            f"checkpoints hold the state of an optimizer of horizon_lm, such as AdamW, not of {type(optimizer).__name__}; save that "
            "one's state_dict()"
        )
    if not optimizer.belongs_to(engine):
        raise StreamingError("the optimizer belongs to another model")
