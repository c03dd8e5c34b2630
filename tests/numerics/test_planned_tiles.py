"""Planned bytes of models whose experts are moved in tiles, compared with the bytes counted in real steps."""

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

import horizon_lm
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.measure.model_outline import outline_model
from tests.support import tiny_models
from tests.support.planned_bytes import DEFAULTS, HERE, Case, require_planned_bytes_of
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned

FAMILIES = ("mixtral", "qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v3")


@pytest.mark.slow  # 9 GiB
@pytest.mark.parametrize("tile", [None, 4])
def test_bytes_of_a_block_as_wide_as_deepseek_v3(tile: int | None) -> None:
    config = DeepseekV3Config(
        num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=8, n_group=2, topk_group=2, vocab_size=4096,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    options = DEFAULTS | {"device": "cpu", "precision": "bf16", "activation_checkpoints": "host", "expert_tile": tile}
    require_planned_bytes_of(model, Case(1, options, "8bit", False, frozenset()))


def test_slots_of_cores_and_of_tiles_have_the_bytes_of_whole_blocks() -> None:
    options = DEFAULTS | {"precision": "fp32_master"}
    whole, tiled = (
        device_use(
            choose(wide_outline("qwen3_moe", 96), Case(2, each, "float32", False, frozenset()).request, HERE).step
        ).buffers
        for each in (options, options | {"expert_tile": 1})
    )
    assert tiled["weight_slots"] + 4 * tiled["tile_slots"] == whole["weight_slots"]  # four experts
    assert tiled["grad_slots"] + 4 * tiled["tile_grad_slots"] == whole["grad_slots"]


WIDE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 128, "vocab_size": 600, "output_router_logits": False,
}  # fmt: skip


def wide_outline(family: str, length: int, mlp_chunk_tokens: int | None = None) -> Any:
    config = tiny_models.build(family, **WIDE).config
    source = ModelSource(config, "tiny", attn_implementation=config._attn_implementation)
    return outline_model(source, length=length, dtype=torch.float32, mlp_chunk_tokens=mlp_chunk_tokens)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"device_micro_batch_size": 1, "activation_checkpoints": "host"},
    {"device_micro_batch_size": 2, "resident_blocks": 1},
    {"activation_checkpoints": "host", "expert_tile": 4},
]


CHUNKED = ({"activation_checkpoints": "host", "expert_tile": 4, "mlp_chunk_tokens": 32}, "deepseek_v3")


@pytest.mark.parametrize(
    ("options", "family"), [*thinned(itertools.product(OPTIONS, FAMILIES), every=11), pytest.param(*CHUNKED)], ids=str
)
def test_activations_fit_the_plan(family: str, options: dict[str, Any]) -> None:
    """The plan is made for the worst case, in which a single tile has all tokens; the last options are that case."""
    options = {"precision": "float32", "head_chunk_tokens": None, "grad_dtype": None, "expert_tile": 1} | options
    case = Case(4, {**DEFAULTS, **options}, "float32", False, frozenset())
    step = choose(wide_outline(family, 96, options.get("mlp_chunk_tokens")), case.request, HERE).step
    streamed = horizon_lm.stream(tiny_models.build(family, **WIDE), **options)
    optimizer = horizon_lm.AdamW(streamed, lr=1e-4)
    ids = torch.randint(3, 600, (4, 96))
    with StorageMeter() as counted:
        for _ in range(2):
            streamed(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    horizon_lm.synchronize(streamed)
    planned = device_use(step).total
    print(f"{family} {options}: counted {counted.peak:,}, planned {planned:,}, {counted.peak / planned:.3f}")
    # As with whole blocks, of which 5% more or less are allowed.
    assert (0.8 if options["expert_tile"] == 4 else 0.5) * planned < counted.peak <= 1.05 * planned
