"""Ranks of which some have batches with images compute what one process does."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import horizon_lm
from tests.census.images import image_batch
from tests.distributed.pool import Pool
from tests.support.models_with_images import streamed, text_batch, tiny
from tests.support.thinned_cases import thinned

# By step, whether the batch of each rank has images.
STEPS = [(True, False), (False, False), (False, True), (True, True)]


def batch_of(plain: Any, has_images: bool) -> dict[str, torch.Tensor]:
    return image_batch(plain) if has_images else text_batch()


def train(
    model: Any, plain: Any, ranks: list[int], **options: Any
) -> tuple[list[float], dict[str, tuple[int, torch.Tensor]]]:
    """Train a few steps. Return the losses, and the ranges of slabs that this rank has."""
    optimizer, losses = horizon_lm.AdamW(model, lr=1e-2, **options), []
    for with_images in STEPS:
        batches = [batch_of(plain, with_images[rank]) | {"num_items_in_batch": 20} for rank in ranks]
        calls = [partial(_loss, model, batch) for batch in batches]
        losses.append(0.0)
        # Updates in the backward pass need one pass of all batches.
        for group in [calls] if options.get("update_in_backward") else [[call] for call in calls]:
            found = torch.stack(horizon_lm.run_together(group))
            found.sum().backward()
            losses[-1] += found.sum().item()
        optimizer.step()
        optimizer.zero_grad()
    horizon_lm.synchronize(model)
    slabs = model._horizon.engine.store.slabs
    return losses, {each.name: (each.own.start, each.weights[each.own].clone()) for each in slabs}


def _loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def run(rank: int, kind: str, settings: dict[str, Any], options: dict[str, Any]) -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    plain = tiny(kind)
    model = streamed(plain, device_mesh=mesh, **settings)
    with torch.no_grad():  # and without a backward pass
        model(**batch_of(plain, rank == 1))
    return train(model, plain, [rank], **options)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llava", {"activation_checkpoints": "host"}, {}),
    ("qwen3_vl", {"activation_checkpoints": "host"}, {}),
    ("video_llava", {}, {}),
    ("granite4_vision", {"head": "chunked"}, {}),
    ("qwen2_5_vl", {}, {"update_in_backward": True}),
    ("qwen3_vl", {"resident_blocks": 3}, {}),
    ("llava", {"grad_dtype": torch.float32, "precision": "bf16"}, {}),
]


@pytest.mark.parametrize(("kind", "settings", "options"), thinned(CASES, every=2))
def test_bits_of_one_process(pool: Pool, kind: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    outcomes = pool.run(2, run, kind, settings, options)
    plain = tiny(kind)
    losses, expected = train(streamed(plain, **settings), plain, [0, 1], **options)
    assert [sum(each) for each in zip(*(losses for losses, _ in outcomes), strict=True)] == pytest.approx(
        losses, rel=1e-5
    )
    for name, (_, slab) in expected.items():
        found = torch.cat([slabs[name][1] for _, slabs in outcomes])
        assert torch.equal(found[: len(slab)], slab), name
