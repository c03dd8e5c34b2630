"""Law: a training allocates the bytes that were planned for it, on the device and in host memory."""

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.optimizers import MOMENT_BYTES, OPTIMIZERS, OptimizerEntry
from horizon_lm.common.units import block
from horizon_lm.memory.precision import PRECISIONS
from horizon_lm.model import hf_config
from horizon_lm.model.adapters import Adapters
from horizon_lm.model.files.quantized_checkpoint import Quantized
from horizon_lm.model.quantization import four_bits, take_quantization
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.arithmetic.request import Request
from horizon_lm.planning.measure.model_outline import outline_model
from tests.laws.trainings import QUANTIZED, TILED, Folders, adapted_base, engine_of
from tests.support import tiny_models
from tests.support.float32_llama import float32_llama
from tests.support.planned_bytes import (
    DEFAULTS,
    HERE,
    LENGTH,
    Case,
    draw_case,
    require_planned_bytes,
    require_planned_bytes_of,
)
from tests.support.thinned_cases import covering, thinned

UPDATES = [(entry, False) for entry in OPTIMIZERS.values()]
UPDATES += [(entry, True) for entry in OPTIMIZERS.values() if entry.updates_in_backward]


def case_of(entry: OptimizerEntry, seed: str, **changes: Any) -> Case:
    """Return random settings of a training with an optimizer."""
    case = replace(draw_case(random.Random(seed)), optim=entry.name, **changes)
    if entry.orthogonalizes:  # block 0 has the matrices that are trained in any case
        return replace(case, in_backward=False, frozen=case.frozen - {block(0)})
    return case


@pytest.mark.parametrize("moments", MOMENT_BYTES)
@pytest.mark.parametrize(("entry", "in_backward"), UPDATES, ids=lambda each: getattr(each, "name", each))
def test_of_each_optimizer(entry: OptimizerEntry, in_backward: bool, moments: str) -> None:
    case = case_of(entry, f"{entry.name} {moments} {in_backward}", moments=moments, in_backward=in_backward)
    require_planned_bytes("llama", case)


@pytest.mark.parametrize(("family", "seed"), covering(tiny_models.FAMILIES, range(6)))
def test_of_each_family(family: str, seed: int) -> None:
    entry = list(OPTIMIZERS.values())[seed % len(OPTIMIZERS)]
    require_planned_bytes(family, case_of(entry, f"{family} {seed}"))


@pytest.mark.parametrize(
    ("family", "tile", "seed"), thinned(itertools.product(TILED, (1, 2, 3, 9), range(3)), every=11)
)
def test_of_tiles(family: str, tile: int, seed: int) -> None:
    case = draw_case(random.Random(f"tiles {family} {tile} {seed}"))
    require_planned_bytes(family, replace(case, options=case.options | {"expert_tile": tile}))


@pytest.mark.parametrize("seed", thinned(range(12), every=6))
def test_of_weights_in_float32(seed: int) -> None:
    with float32_llama():
        require_planned_bytes("llama", draw_case(random.Random(f"llama {seed}")))


ATTENTION = {"target_modules": ("q_proj", "v_proj")}
ADAPTERS: dict[str, dict[str, Any]] = {
    "of all layers": {"target_modules": "all-linear"},
    "DoRA": ATTENTION | {"use_dora": True},
    "of the embedding": {"target_modules": ("q_proj", "embed_tokens")},
    "a copy of the embedding": ATTENTION | {"modules_to_save": ("embed_tokens",)},
    "of experts": ATTENTION | {"target_parameters": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")},
}


@pytest.mark.filterwarnings("ignore")  # PEFT warns of tied embeddings
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ADAPTERS)
def test_of_adapters(name: str, tied: bool) -> None:
    pytest.importorskip("peft", reason="needs the whole installation")
    case = replace(draw_case(random.Random(f"adapters {name} {tied}")), frozen=frozenset(), optim="AdamW")
    in_float32 = (
        None if case.options["precision"] == "float32" else torch.float32
    )  # as gradients of adapters always are
    case = replace(case, options=case.options | {"grad_dtype": in_float32})
    family = "qwen3_moe" if name == "of experts" else "llama"
    if name == "of experts":
        case = replace(case, options=case.options | {"expert_tile": 3, "resident_blocks": 0, "resident_graphs": 0})
    adapters = Adapters(r=4, lora_dropout=0.0, **ADAPTERS[name])
    require_planned_bytes_of(tiny_models.build(family, tie_word_embeddings=tied), case, adapters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "precision", "tile"), covering(QUANTIZED, PRECISIONS, [None, 3]))
def test_of_quantized_bases(kind: str, precision: str, tile: int | None, folders: Folders) -> None:
    """Host memory and traffic; the base never moves out."""
    pytest.importorskip("peft", reason="needs the whole installation")
    folder, tile = folders(QUANTIZED[kind], kind), tile if QUANTIZED[kind] in TILED else None
    config = hf_config.read_config(folder, trust_remote_code=False)
    published = take_quantization(config)
    outline = outline_model(
        ModelSource(config, kind), length=LENGTH, dtype=torch.float32, adapters=Adapters(r=4, target_modules=("o_proj",)),
        quantized=Quantized.of(published or four_bits(), folder if published else None),
    )  # fmt: skip
    step = choose(outline, Request(3, precision=precision, grad_bytes=4, expert_tile=tile), HERE).step
    model = adapted_base(kind, folders, device="cpu", precision=precision, expert_tile=tile).train()
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    model(**tiny_models.batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    engine = engine_of(model)
    engine.synchronize()
    assert {name: num for name, num in engine.store.num_bytes.items() if num} == host_bytes(step)
    packed = [slabs.packed.layout.num_params for slabs in engine.store.units.values()]
    assert packed == [slabs.packed.layout.num_params for slabs in outline.layout.units.values()]
    assert sum(packed) > 0
    moved = engine.device.counters.moved
    assert not any(num for name, num in moved.items() if name.startswith("stream_out:block"))
    for name, slabs in engine.store.units.items() if tile is None else ():
        num_bytes = slabs.plain.weights.nbytes + slabs.packed.layout.num_params + slabs.float32.weights.nbytes
        assert not name.is_block or moved[f"stream_in:{name}"] == 2 * num_bytes


# Controls: a plan for other settings has other bytes

PLAIN = Case(2, DEFAULTS | {"device": "cpu"}, "float32", False, frozenset())
OTHERS: dict[str, Callable[[Case], Case]] = {
    "the same": lambda case: case,
    "rows": lambda case: replace(case, rows=3),
    "precision": lambda case: replace(case, options=case.options | {"precision": "fp32_master"}),
    "checkpoints": lambda case: replace(case, options=case.options | {"activation_checkpoints": "host"}),
    "resident blocks": lambda case: replace(case, options=case.options | {"resident_blocks": 2}),
    "moments": lambda case: replace(case, moments="8bit"),
    "in backward": lambda case: replace(case, in_backward=True),
    "frozen": lambda case: replace(case, frozen=frozenset({block(1)})),
    "optimizer": lambda case: replace(case, optim="Lion"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_for_other_settings_is_noticed(name: str) -> None:
    planned = OTHERS[name](PLAIN)
    with nullcontext() if name == "the same" else pytest.raises(AssertionError):
        require_planned_bytes_of(tiny_models.build("llama"), PLAIN, planned=planned)
