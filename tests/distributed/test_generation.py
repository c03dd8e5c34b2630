"""Ranks that answer other prompts with other numbers of tokens: the answers of one process, and nobody waits for another one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.pool import Pool
from tests.distributed.training import Training, build
from tests.support import tiny_models
from tests.support.limited_device import LimitedDevice, take_room, watch_resident_blocks
from tests.support.thinned_cases import covering

FAMILIES = {
    "llama": Training(),
    "gemma3_text": Training(family="gemma3_text"),
    "qwen3_moe in tiles": Training(
        family="qwen3_moe", settings={"expert_tile": 3}, overrides={"output_router_logits": False}
    ),
}


def answers(model: Any, rank: int, new_tokens: int, **settings: Any) -> torch.Tensor:
    """Return the answers to two prompts, whose length depends on the rank."""
    ids = torch.randint(3, tiny_models.VOCABULARY, (2, 4 + 5 * rank), generator=torch.Generator().manual_seed(rank))
    found: torch.Tensor = model.eval().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **settings
    )
    return found


def answering(rank: int, training: Training, new_tokens: Sequence[int], settings: dict[str, Any]) -> torch.Tensor:
    """Answer two prompts, and compute a pass with gradients, which ranks in the middle of an answer could not join."""
    mesh = init_device_mesh("cpu", (training.shard,), mesh_dim_names=("shard",))
    model, _ = build(training, device_mesh=mesh)
    found = answers(model, rank, new_tokens[rank], **settings)
    model.train()(**tiny_models.batch(seed=rank), num_items_in_batch=100).loss.backward()
    return found


@pytest.mark.parametrize(
    ("family", "settings"),
    covering(FAMILIES, [{}, {"num_beams": 2}, {"eos_token_id": list(range(3, 40))}]),
    ids=str,
)
def test_answers_of_other_lengths(pool: Pool, family: str, settings: dict[str, Any]) -> None:
    training, new_tokens = FAMILIES[family], (3, 8)
    expected = build(training)[0]
    for rank, found in enumerate(pool.run(2, answering, training, new_tokens, settings)):
        assert torch.equal(found, answers(expected, rank, new_tokens[rank], **settings))


def making_room(rank: int, training: Training) -> tuple[list[int], torch.Tensor]:
    """Answer a prompt for which the second rank has less room than the first. Return the resident blocks of each pass."""
    mesh = init_device_mesh("cpu", (training.shard,), mesh_dim_names=("shard",))
    device = LimitedDevice(10**9)
    model, _ = build(training, device=device, device_mesh=mesh)
    answers(model, rank, 8)
    if rank:
        take_room(model, device)
    seen = watch_resident_blocks(model)
    found = answers(model, rank, 8)
    return [*sorted(set(seen)), model._horizon.engine.residency.weights], found


def test_ranks_agree_on_the_blocks_that_make_room(pool: Pool) -> None:
    training = Training(settings={"resident_blocks": 2})
    expected = build(Training())[0]
    for rank, (resident, found) in enumerate(pool.run(2, making_room, training)):
        assert resident == [1, 2]
        assert torch.equal(found, answers(expected, rank, 8))
