"""Check a checkpoint against a model using only its headers, then load it into the store one tensor at a time."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_lm.common.units import HEAD
from horizon_lm.errors import CheckpointWarning, ConfigError, first_line, warn
from horizon_lm.memory.store import Store
from horizon_lm.model.files.checkpoint_reader import DTYPE_NAMES, StoredTensors, file_of
from horizon_lm.model.files.conversion import Conversion, Target, find_conversion
from horizon_lm.model.files.quantized_checkpoint import open_checkpoint, pack, require_untransposed
from horizon_lm.model.finite import require_finite
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.model.units import TRAINED_DTYPES

_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # saved by old versions of transformers, now computed


def is_ignored(model: Any, name: str) -> bool:
    """Return whether transformers ignores a checkpoint tensor of this name without a warning."""
    patterns = (*_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    return any(re.search(pattern, name) for pattern in patterns)


def may_be_missing(model: Any, name: str) -> bool:
    """Return whether transformers accepts a checkpoint without a tensor of this name, without a warning."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def check_folder(model: Any, folder: Path, quantization: Mapping[str, Any] | None) -> list[str]:
    """Check the weights of a folder, with this ``quantization_config`` if they are quantized, against a model; return warnings.

    Raises:
        ConfigError: as in `check_headers`, or a file cannot be read.
    """
    checkpoint = open_checkpoint(folder, quantization)
    return check_headers(model, checkpoint, find_conversion(model, checkpoint.names))


def check_headers(
    model: Any, checkpoint: StoredTensors, conversion: Conversion, optional: Collection[str] = ()
) -> list[str]:
    """Check names, dtypes and shapes of a checkpoint, and return warnings.

    Args:
        model: the model, possibly without weights.
        checkpoint: the checkpoint.
        conversion: the mapping of the checkpoint to the model.
        optional: full names of parameters that the checkpoint may lack; they will be newly initialised.

    Raises:
        ConfigError: a parameter is missing, duplicated, of another shape, or not in floating point; or the checkpoint
            has more blocks than the model.
    """
    folder, expected, parameters = checkpoint.stored.folder, model.state_dict(), parameter_names(model)
    # Parameters and buffers for which no tensor of the checkpoint has been found yet.
    missing, unset = set(parameters.values()), expected.keys() - parameters.keys()
    for target in conversion.targets:
        if target.name in parameters:
            _require_trainable(target, checkpoint)
            require_untransposed(checkpoint, target, model)
        for name, tensor in converted_on_meta(model, checkpoint, target).items():
            if name in expected:
                _require_shape(name, tensor.shape, expected[name].shape)
            missing.discard(parameters.get(name, name))
            unset.discard(name)
    if required := missing - set(optional):
        raise ConfigError(
            f"{folder} lacks {len(required)} of {len(set(parameters.values()))} parameters, for example "
            f"{min(required)}; the folder does not hold a {type(model).__name__}"
        )
    of_unused = _unused_warnings(model, folder, conversion.unused)
    return [*of_unused, *_missing_warnings(model, folder, missing, unset)]


def _missing_warnings(model: Any, folder: Path, parameters: Collection[str], buffers: Iterable[str]) -> Iterator[str]:
    """Yield warnings about optional parameters and about buffers that a checkpoint lacks."""
    if parameters:
        yield (
            f"{folder} has no {' and '.join(sorted(parameters))}, which will be newly initialised; train it before its "
            "scores are used"
        )
    if unset := [name for name in buffers if not may_be_missing(model, name)]:
        yield (
            f"{folder}: {_tensors_are(unset)} missing and will have the values of a new model; check that "
            "config.json belongs to these weights"
        )


def parameter_names(model: Any) -> dict[str, str]:
    """Map every name of every parameter to its first name, because a tied parameter has several names."""
    first: dict[int, str] = {}
    names = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(param), name)
    return names


def _require_trainable(target: Target, checkpoint: StoredTensors) -> None:
    """Reject weights that cannot be trained, or that occur twice in the checkpoint."""
    for name in target.sources:
        if (dtype := checkpoint.meta(name).dtype) not in TRAINED_DTYPES:
            raise ConfigError(
                f"{name} is {DTYPE_NAMES[dtype]} in {file_of(checkpoint, name)}, but only floating-point weights of 16, 32 or "
                "64 bits can be trained; use a bf16 copy of the model"
            )
    if target.is_ambiguous:
        raise ConfigError(
            f"{checkpoint.stored.folder} has both {' and '.join(list(target.sources)[:2])}, which are the same parameter; remove "
            "one of them"
        )


def converted_on_meta(model: Any, checkpoint: StoredTensors, target: Target) -> dict[str, torch.Tensor]:
    """Convert the sources of a target as meta tensors, and return these by their names in the model; raise ConfigError if that fails."""
    sources = {name: checkpoint.meta(name) for name in target.sources}
    try:
        return target.convert(model, sources)
    except Exception as error:  # transformers' conversions may raise any exception
        raise ConfigError(
            f"{checkpoint.stored.folder}: {next(iter(sources))} and related tensors cannot be converted to {target.name} "
            f"({first_line(error)}); config.json does not belong to these weights"
        ) from error


def _require_shape(name: str, found: torch.Size, expected: torch.Size) -> None:
    """Reject a tensor that has another shape than in the model."""
    if found != expected:
        raise ConfigError(
            f"{name} has shape {tuple(found)} in the checkpoint and {tuple(expected)} in the model; "
            "config.json does not belong to these weights"
        )


def _unused_warnings(model: Any, folder: Path, unused: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings about tensors that the model does not have; reject tensors of missing blocks."""
    buffers = {name for name, _ in model.named_buffers()}
    rest = {name: target for name, target in unused.items() if target not in buffers and name not in buffers}
    known = [name for name, target in rest.items() if is_ignored(model, name) or is_ignored(model, target)]
    for name in known:
        del rest[name]
    _reject_dropped(model, folder, rest)
    kind = type(model).__name__
    if known:
        yield f"{folder}: {_tensors_are(known)} known not to belong to a {kind}, and will not be exported"
    if rest:
        yield (
            f"{folder}: {_tensors_are(list(rest))} not part of a {kind} and will be neither trained nor exported; check that "
            "config.json belongs to these weights"
        )


def _tensors_are(names: list[str]) -> str:
    """Return the subject and verb of a sentence about these tensors."""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} (for example {min(names)}) {'are' if len(names) > 1 else 'is'}"


def _reject_dropped(model: Any, folder: Path, unused: Mapping[str, str]) -> None:
    """Reject tensors of blocks or experts beyond the end of the model's lists."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for name, target in unused.items():
        parts = target.split(".")
        for place, part in enumerate(parts):
            path = ".".join(parts[:place])
            if path not in lists:  # the names of a checkpoint of the decoder alone lack the decoder's prefix
                path = f"{model.base_model_prefix}.{path}"
            if part.isdigit() and path in lists and int(part) >= lists[path]:
                raise ConfigError(
                    f"{folder} has {path}.{part} (for example {name}), but the model of its config.json has only "
                    f"{lists[path]} of {path}; set num_hidden_layers, or the setting for their number, to that of the "
                    "weights, or remove the extra tensors"
                )


def load_weights(parts: ModelParts, store: Store, checkpoint: StoredTensors) -> list[ParamRef]:
    """Check a checkpoint and load it into the store. Emit a CheckpointWarning for tensors that are ignored or missing.

    Returns:
        The parameters that the checkpoint lacks and that must be initialised: the `score` of a classifier that is made
        of a causal language model.

    Raises:
        ConfigError: the headers do not match the model (see `check_headers`), weights are NaN or infinite, or a tied head
            differs from the table.
    """
    model = parts.model
    conversion = find_conversion(model, checkpoint.names)
    optional = parts.units[HEAD] if parts.classifies else []
    for sentence in check_headers(model, checkpoint, conversion, [ref.name for ref in optional]):
        warn(sentence, CheckpointWarning)
    parameters, buffers = parameter_names(model), dict(model.named_buffers())
    written: dict[str, str] = {}  # by parameter, the name of the tensor that it was read from last
    for target in conversion.targets:
        parameter = parameters.get(target.name)  # None for a buffer
        is_packed = parameter in store.codecs and checkpoint.quantized.keys() >= target.sources.keys()
        if parameter is not None and is_packed:
            _load_packed(model, store, checkpoint, target, parameter)
            written[parameter] = target.name
            continue
        rows = None if parameter is None else _rows_to_read(store, target, parameter)
        first_row = 0 if rows is None else rows.start
        for name, tensor in read_target(model, checkpoint, target, rows, must_be_finite=parameter is not None).items():
            if name in buffers:
                fill_buffer(store, name, buffers[name], tensor)
            elif name in parameters:
                full = parameters[name]  # the first name of a tied parameter
                if full not in written:
                    store.source_dtypes[full] = torch.float32 if full in store.in_float32 else tensor.dtype
                    store.write(full, tensor, first_row)
                elif not store.holds(full, tensor, first_row):
                    raise _not_tied(checkpoint.stored.folder, written[full], name)
                written[full] = name
    return [ref for ref in optional if ref.name not in written]


def fill_buffer(store: Store, name: str, buffer: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the value that a file has for a buffer. If this may round it, the store keeps the file's value, too."""
    buffer.copy_(source)
    store.source_buffers.pop(name, None)  # of a file that was read before
    if buffer.dtype not in (source.dtype, torch.float32):
        store.source_buffers[name] = source.clone()


def read_target(
    model: Any, checkpoint: StoredTensors, target: Target, rows: slice | None = None, must_be_finite: bool = True
) -> dict[str, torch.Tensor]:
    """Return the tensors of a target by their names in the model, or these rows of them; reject NaN and infinity."""
    if rows is not None and target.is_stack:  # whose rows are tensors of the checkpoint
        target, rows = target.of_rows(rows), None
    tensors = checkpoint.read(list(target.sources), rows)
    if must_be_finite:
        for name, tensor in tensors.items():
            require_finite(name, tensor, file_of(checkpoint, name))
    return target.convert(model, tensors)


def _not_tied(folder: Path, first: str, second: str) -> ConfigError:
    """Return the error of a tied parameter with two values, which transformers would untie."""
    return ConfigError(
        f"{first} and {second} have different values in {folder}, but its config.json says "
        "that they are one parameter; set tie_word_embeddings: false in it"
    )


def _load_packed(model: Any, store: Store, checkpoint: StoredTensors, target: Target, name: str) -> None:
    """Load the codes and scales of a parameter into the store, and note the dtype of the weight that was quantized."""
    if store.owns(name):
        with store.packing(name) as packed:
            pack(checkpoint, model, target, store.codecs[name], packed, store.shape(name))
    dtype = checkpoint.quantized[next(iter(target.sources))].dtype
    store.source_dtypes[name] = store.decoded_dtypes[name] = dtype


def _rows_to_read(store: Store, target: Target, parameter: str) -> slice | None:
    """Return the rows of a target that this rank reads (`Store.rows_to_read`); None if it reads all of the parameter."""
    return store.rows_to_read(parameter) if target.converter is None or target.is_stack else None
