"""Tiny models of images and text with towers of any depth, rows with images, and their plans."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

import horizon_lm
from horizon_lm.model.components import Component
from horizon_lm.model.freezing import freeze
from horizon_lm.model.packed_positions import packed_positions, rope_index_of
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.planning.measure.image_costs import RowsWithImages
from horizon_lm.planning.measure.model_outline import outline_model
from tests.census.images import image_batch
from tests.support.models_with_images import tiny
from tests.support.planned_bytes import HERE, Case
from tests.support.tensor_memory import StorageMeter

_OF_TEXT = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")
DEEP = {"llava": "num_hidden_layers", "gemma3": "num_hidden_layers", "qwen2_5_vl": "depth"}
"""The setting of the depth of a tower, by the type of the model."""
MASKED = "mistral3"
"""A type whose tower has a mask over the patches of all images."""


def build(kind: str, depth: int) -> Any:
    """Return a model with random weights whose tower has this many blocks."""
    settings = {DEEP.get(kind, "num_hidden_layers"): depth} | (
        {"fullatt_block_indexes": [1]} if kind == "qwen2_5_vl" else {}
    )
    return tiny(kind, vision_config=settings)


def rows_with_images(model: Any, num_rows: int = 2) -> tuple[dict[str, torch.Tensor], RowsWithImages]:
    """Return rows with one image each, an even number, and what a plan is told about them."""
    batch = image_batch(model)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    one = {name: value[: len(value) // 2] for name, value in inputs.items()}
    token = next(getattr(model.config, n) for n in ("image_token_id", "image_token_index") if hasattr(model.config, n))
    tokens = int((one["input_ids"] == token).sum())

    def call(rows: int) -> dict[str, torch.Tensor]:
        return {name: torch.cat([value] * rows) for name, value in one.items()}

    batch = {name: torch.cat([value] * (num_rows // 2)) for name, value in batch.items()}
    return batch, RowsWithImages(1, call, tokens, frozenset(inputs.keys() - set(_OF_TEXT)))


def packed(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return rows of equal lengths, without padding, packed into one."""
    rows, length = batch["input_ids"].shape
    joined = {
        name: value.reshape(1, -1).clone() if value.shape == (rows, length) else value
        for name, value in batch.items()
        if name != "attention_mask"
    }
    positions = torch.arange(length).repeat(rows)[None]
    joined["labels"][positions == 0] = -100
    if (rope_index := rope_index_of(model)) is not None:
        positions = packed_positions(rope_index, joined["input_ids"], positions, joined)
    return joined | {"position_ids": positions}


def planned_step(
    model: Any, images: RowsWithImages | None, case: Case, frozen: Collection[Component] = (), num_packed: int = 1
) -> Step:
    """Return the step of a plan for rows of the length of these, or for as many of them in a packed row."""
    source = ModelSource(model.config, "tiny", attn_implementation=model.config._attn_implementation)
    length = 24 if images is None else images.call(1)["input_ids"].shape[1] * num_packed
    outline = outline_model(
        source, length=length, dtype=torch.float32, masked=num_packed > 1, frozen=frozen, images=images
    )
    return choose(outline, replace(case.request, optimizer=case.request.optimizer), HERE).step


def counted_bytes(model: Any, batch: dict[str, torch.Tensor], case: Case, frozen: Collection[Component] = ()) -> Any:
    """Train on a batch. Return the engine, and the peak of all tensors, which includes the caller's batch."""
    freeze(model, None, frozen)
    streamed = horizon_lm.stream(model, **case.options)
    optimizer = case.optimizer(streamed, lr=1e-4, moments=case.moments, update_in_backward=case.in_backward)
    with StorageMeter() as counted:
        rows = {name: value.clone() for name, value in batch.items()}
        for _ in range(2):
            streamed(**rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    horizon_lm.synchronize(streamed)
    return streamed._horizon.engine, counted.peak


__all__ = [
    "DEEP",
    "MASKED",
    "build",
    "counted_bytes",
    "device_use",
    "host_bytes",
    "packed",
    "planned_step",
    "rows_with_images",
]
