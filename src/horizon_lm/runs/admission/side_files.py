"""Measure the files of a run that hold no weights, by writing those whose size nothing else tells."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.disk import Disk, is_of_system
from horizon_lm.common.units import HEAD
from horizon_lm.model.files.checkpoint_writer import header_bytes, write_configs
from horizon_lm.model.files.written_weights import persistent_buffers
from horizon_lm.model.units import find_parts
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.request import SideFiles
from horizon_lm.runs.admission.inputs import Source
from horizon_lm.runs.config import RunConfig

# At most, for what is not written in advance.
_TOKEN_BYTES = 128  # of a token, in the files of a tokenizer that is not on this machine
_CONFIG_BYTES = 16 * 2**10
_ADAPTER_BYTES, _HEADER_ENTRY_BYTES = 16 * 2**10, 224  # of PEFT's config and page, and of a tensor in a header
_RUN_BYTES = 2**20  # of config.yaml, plan.json, predicted_trace.json and loss.png
_LINE_BYTES = 2**10  # of a line in metrics.jsonl
_CHARACTER_BYTES = 8  # of a token in samples.jsonl


def side_files(
    run: RunConfig, source: Source, outline: ModelOutline, num_steps: int | None, itemsize: int, tokenizer: Any = None
) -> SideFiles:  # fmt: skip
    """Return the bytes of the files of a run that hold no weights.

    Args:
        run: settings of the run.
        source: its model.
        outline: the outline of the model.
        num_steps: optimizer steps of the run; None if unknown.
        itemsize: bytes per element of the exported model.
        tokenizer: the tokenizer of the run; None if it is not loaded.
    """
    saved_bytes = _tokenizer_bytes(outline, tokenizer)
    if outline.base_is_frozen:
        trained = sum(len(slab.grad_layout.entries) for slab in outline.layout.slabs())
        saved_bytes += _ADAPTER_BYTES + _HEADER_ENTRY_BYTES * trained
    else:
        saved_bytes += _model_bytes(source, itemsize) if source.is_local else _CONFIG_BYTES
    return SideFiles(saved_bytes, _bytes_of_records(run, num_steps))


def _model_bytes(source: Source, itemsize: int) -> int:
    """Return the bytes of a saved model without its weights: its configs, its buffers, and the headers of the files of weights."""
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    model = source.model.skeleton()
    parts = find_parts(model)
    units = [
        {ref.name: torch.empty(ref.param.shape, dtype=dtype, device="meta") for ref in refs}
        for unit, refs in parts.units.items()
        if not (unit == HEAD and parts.tied)
    ]
    buffers = persistent_buffers(parts, {name for names in units for name in names})
    num_bytes = sum(buffer.nbytes for buffer in buffers.values()) + header_bytes(model, [*units, buffers])
    return num_bytes + _bytes_written(lambda folder: write_configs(Disk(), model, folder, dtype), _CONFIG_BYTES)


def _tokenizer_bytes(outline: ModelOutline, tokenizer: Any) -> int:
    """Return the bytes of a tokenizer's files with its templates; an estimate if it is not loaded."""
    estimate = _TOKEN_BYTES * outline.layout.vocabulary
    return estimate if tokenizer is None else _bytes_written(tokenizer.save_pretrained, estimate)


def _bytes_written(write: Callable[[Path], object], estimate: int) -> int:
    """Return the bytes of the files that a function writes into a temporary folder; the estimate if the system cannot write there."""
    try:
        with tempfile.TemporaryDirectory(prefix="horizon-lm-plan-") as folder:
            write(Path(folder))
            return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    except Exception as error:
        if not is_of_system(error):
            raise
        return estimate


def _bytes_of_records(run: RunConfig, num_steps: int | None) -> int:
    """Return the bytes of the files that a run writes besides models and checkpoints, at most."""
    if num_steps is None:
        return _RUN_BYTES
    lines = num_steps / run.logging_steps if run.logging_steps >= 1 else 1 / run.logging_steps
    sample = sum(len(prompt) + run.sample_max_new_tokens for prompt in run.sample_prompts or ()) * _CHARACTER_BYTES
    return _RUN_BYTES + round((2 * _LINE_BYTES + sample) * (lines + 1))  # a line of an evaluation for each of training
