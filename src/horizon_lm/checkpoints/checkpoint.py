"""Save and load the whole state of a training: weights, low halves, moments, and what the caller adds."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from horizon_lm.checkpoints.manifest import Manifest, read_manifest, require_hash, verify
from horizon_lm.checkpoints.random_state import random_state, restore_random_state
from horizon_lm.checkpoints.saving import STATE, UNITS, CheckpointWriter, RateLimit, Saving, unit_file, write_json
from horizon_lm.checkpoints.unit_file import UnitFile, hash_file, read_into
from horizon_lm.device.host_threads import DISK_THREADS
from horizon_lm.disk import Disk
from horizon_lm.engine.executor import Engine
from horizon_lm.errors import ConfigError, StreamingError
from horizon_lm.optim.adamw import AdamW
from horizon_lm.store.checkpoint_writer import write_configs

BUFFERS, ARRAYS = "buffers.safetensors", "arrays.safetensors"


def save_checkpoint(
    folder: str | Path,
    model: Any,
    optimizer: AdamW | None = None,
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
    that of this moment in any case.

    Args:
        folder: the folder of the checkpoint; one that exists is replaced once the new one is complete.
        model: a streamed model.
        optimizer: its `AdamW`; None to save the weights alone.
        state: further state as plain data for JSON, such as the state dict of a scheduler.
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
        OSError: with ``wait``, if the checkpoint cannot be written, for example because the disk is full.
    """
    engine, disk, folder = _engine(model), disk or Disk(), Path(folder)
    if optimizer is not None:
        _require_own(optimizer, engine)
    engine.wait_for_saves()
    engine.foreign_writes.follow()
    store, moments = engine.store, optimizer.moments if optimizer else None
    scalars = optimizer.scalars() if optimizer else None
    content = json.loads(
        json.dumps(
            {"optimizer": scalars, "random": random_state(devices=not engine.device_lost), "state": dict(state or {})}
        )
    )
    # Copies: these change with the next step.
    tensors = {
        BUFFERS: {name: buffer.detach().cpu().clone() for name, buffer in _buffers(engine).items()},
        ARRAYS: {name: array.detach().cpu().clone() for name, array in (arrays or {}).items()},
    }

    def fill(part: Path) -> None:
        write_json(disk, part / STATE, content)
        for name, each in tensors.items():
            if each:
                with disk.create(part / name) as output:
                    output.write(safetensors.torch.save(each))

    def describe(files: Any, entries: Any) -> Manifest:
        dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in store.source_dtypes.items()}
        kind = None if moments is None else moments.kind
        return Manifest(scalars["step"] if scalars else 0, store.precision.name, kind, dtypes, files, entries)

    files = {unit: unit_file(store, moments, unit) for unit in store.units}
    writer = CheckpointWriter(folder, files, describe, fill, published, disk, rate_limit or RateLimit(None))
    writer.prepare(lambda part: _write_side_files(engine, part, add_files))
    if engine.device_lost:  # nothing changes any more, so no update has to wait
        with ThreadPoolExecutor(DISK_THREADS) as threads:
            list(threads.map(lambda moves: moves[0].run(engine.device.link), writer.moves().values()))
    else:
        engine.running_save = writer
        engine.run_save(writer.moves())
    if wait:
        engine.wait_for_saves()
        writer.saving.wait()
    return writer.saving


def load_checkpoint(folder: str | Path, model: Any, optimizer: AdamW | None = None) -> dict[str, Any]:
    """Load a checkpoint into a streamed model and its optimizer, bit for bit.

    All files are verified before the first weight changes. Random generators get their saved states.

    Args:
        folder: the folder of a checkpoint.
        model: a streamed model of the same architecture and precision.
        optimizer: its `AdamW`, with the same parameters, groups and kind of moments; None to load the weights alone.

    Returns:
        The ``state`` that was saved.

    Raises:
        ConfigError: the checkpoint is damaged, or of another model, precision or optimizer; nothing was changed.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    verify(folder, manifest)
    content = restore(folder, manifest, model, optimizer)
    restore_random_state(content["random"])
    return content["state"]


def restore(folder: Path, manifest: Manifest, model: Any, optimizer: AdamW | None) -> dict[str, Any]:
    """Load a checkpoint whose files may not have been verified, and return the contents of its state file.

    Raises:
        ConfigError: the checkpoint does not fit, and nothing was changed; or a file is damaged, and weights were changed.
    """
    engine = _engine(model)
    if optimizer is not None:
        _require_own(optimizer, engine)
    store = engine.store
    _require_fit(folder, manifest, engine, optimizer)
    for name in manifest.files:
        if not name.startswith(f"{UNITS}/"):
            require_hash(folder, manifest, name, hash_file(folder / name))
    content = read_state(folder)
    with torch.no_grad():
        engine.drain()
        if optimizer is not None:
            if content["optimizer"] is None:
                raise ConfigError(f"{folder} was saved without an optimizer; load it without one")
            optimizer.load_scalars(content["optimizer"])
        moments = optimizer.moments if optimizer is not None else None
        files = {unit: unit_file(store, moments, unit) for unit in store.units}
        with ThreadPoolExecutor(DISK_THREADS) as threads:
            for name, found in threads.map(lambda unit: _read_unit(folder, unit, files[unit]), files):
                require_hash(folder, manifest, name, found)
        for name, value in read_tensors(folder / BUFFERS).items():
            _buffers(engine)[name].copy_(value)
    store.source_dtypes.update({name: getattr(torch, dtype) for name, dtype in manifest.dtypes.items()})
    store.weights_changed()
    engine.foreign_writes.follow(with_low_halves=True)
    return content


def _read_unit(folder: Path, unit: str, file: UnitFile) -> tuple[str, str]:
    name = f"{UNITS}/{unit}.safetensors"
    return name, read_into(folder / name, file)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's state file: the optimizer's scalars, random states, and the caller's state."""
    content: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    return content


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file; none if there is no file."""
    return safetensors.torch.load_file(path) if path.is_file() else {}


def _require_fit(folder: Path, manifest: Manifest, engine: Engine, optimizer: AdamW | None) -> None:
    store = engine.store
    if manifest.precision != store.precision.name:
        raise ConfigError(
            f"{folder} was saved with precision {manifest.precision}, and this model has {store.precision.name}; use the same"
        )
    if optimizer is not None and manifest.moments != optimizer.moments.kind:
        raise ConfigError(
            f"{folder} was saved with moments {manifest.moments}, and this optimizer has {optimizer.moments.kind}; use the same"
        )
    saved = {name for name in manifest.files if name.startswith(f"{UNITS}/")}
    if saved != {f"{UNITS}/{unit}.safetensors" for unit in store.units}:
        raise ConfigError(
            f"{folder} has {len(saved)} units, and this model has {len(store.units)}; it is of another model"
        )
    own = {name: tuple(slabs.layout.entries[name].shape) for slabs in store.units.values() for name in slabs.layout}
    found = {each.tensor: each.shape for each in manifest.tensors}
    for name, shape in own.items():
        if found.get(name) != shape:
            raise ConfigError(
                f"{folder} has {name} of shape {found.get(name)}, and this model of {shape}; it is of another model"
            )


def _write_side_files(engine: Engine, part: Path, add_files: Callable[[Path], None] | None) -> None:
    dtype = next(iter(engine.store.source_dtypes.values()))
    write_configs(Disk(), engine.parts.model, part, dtype)
    if add_files is not None:
        add_files(part)


def _buffers(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a model by name."""
    parameters = {id(ref.param) for refs in engine.parts.units.values() for ref in refs}
    # Not the streamed model's own method, which waits for updates.
    state = torch.nn.Module.state_dict(engine.parts.model, keep_vars=True)
    return {n: t for n, t in state.items() if n not in engine.store.unit_of and id(t) not in parameters}


def _engine(model: Any) -> Engine:
    if not hasattr(model, "_horizon"):
        raise ConfigError("a checkpoint needs a streamed model; call horizon_lm.stream(model) first")
    engine: Engine = model._horizon.engine
    return engine


def _require_own(optimizer: Any, engine: Engine) -> None:
    if not isinstance(optimizer, AdamW):
        raise ConfigError(
            f"checkpoints hold the state of horizon_lm.AdamW, not of {type(optimizer).__name__}; save that one's state_dict()"
        )
    if optimizer._engine is not engine:
        raise StreamingError("the optimizer belongs to another model")
