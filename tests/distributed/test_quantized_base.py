"""Adapters on a quantized base of which each rank has a part: bits, traffic and memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

from torch.distributed.device_mesh import init_device_mesh

import horizon_lm
from horizon_lm.common.units import block
from horizon_lm.errors import StreamingError
from horizon_lm.model import hf_config
from horizon_lm.model.adapters import Adapters
from horizon_lm.model.files.quantized_checkpoint import Quantized
from horizon_lm.model.quantization import four_bits, take_quantization
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.measure.model_outline import outline_model
from tests.distributed.measured_bytes import Bytes, measure
from tests.distributed.pool import Pool
from tests.distributed.training import Outcome, Training, assert_same, train, whole
from tests.support.planned_bytes import LENGTH
from tests.support.quantized_folders import adapter_folder, save_published
from tests.support.thinned_cases import thinned, without
from tests.support.threaded_device import ThreadedDevice

pytestmark = pytest.mark.filterwarnings("ignore")
DOUBLE = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
}  # fmt: skip
CASES: dict[str, tuple[str, str, Training]] = {
    "4bit": ("llama", "4bit", Training()),
    "4bit, four": ("llama", "4bit", Training(shard=4, settings={"resident_blocks": 1})),
    "4bit, copies": ("llama", "4bit", Training(replicate=2, shard=1)),
    "4bit, double": ("qwen2", "4bit", Training(shard=4, settings={"quantization_config": DOUBLE})),
    "4bit, experts": ("mixtral", "4bit", Training(settings={"activation_checkpoints": "host"})),
    "nf4": ("llama", "nf4", Training(shard=3)),
    "nested": ("qwen2", "nested", Training()),
    "mxfp4": ("gpt_oss", "mxfp4", Training(shard=4)),
    "fp8, experts": ("qwen3_moe", "fp8", Training(shard=4, settings={"precision": "fp32_master"})),
    "fp8, deepseek": ("deepseek_v3", "fp8", Training(settings={"resident_blocks": 3})),
    "int4, deepseek": ("deepseek_v3", "int4", Training(shard=4)),
    "4bit, tiles": ("mixtral", "4bit", Training(settings={"expert_tile": 3, "activation_checkpoints": "host"})),
    "mxfp4, tiles": ("gpt_oss", "mxfp4", Training(shard=4, settings={"expert_tile": 1})),
    "fp8, tiles": ("qwen3_moe", "fp8", Training(shard=3, settings={"expert_tile": 3, "device_micro_batch_size": 1})),
    "fp8, deepseek, tiles": (
        "deepseek_v3",
        "fp8",
        Training(settings={"expert_tile": 3, "resident_blocks": 1}),
    ),
    "fp8, copies, tiles": ("qwen3_moe", "fp8", Training(replicate=2, shard=1, settings={"expert_tile": 1})),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns a folder of adapters on a quantized base, written once."""
    made: dict[tuple[str, str], Path] = {}

    def find(family: str, kind: str) -> str:
        if (family, kind) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{kind}")
            published = save_published(family, kind, folder / "model")
            targets = ["q_proj", "o_proj"] if family != "deepseek_v3" else ["o_proj"]
            made[family, kind] = adapter_folder(published, folder, target_modules=targets)
        return str(made[family, kind])

    return find


def opened(folder: str, kind: str, training: Training, **settings: Any) -> Any:
    options = {"precision": "float32", "device": "cpu"} | training.settings | settings
    if kind == "4bit" and "quantization_config" not in options:
        options["load_in_4bit"] = True
    return horizon_lm.from_pretrained(folder, **options).train()


def own_codes(model: Any) -> dict[str, torch.Tensor]:
    """Return the codes and scales that this rank owns, by unit."""
    units = model._horizon.engine.store.units
    return {unit: slabs.packed.weights[slabs.packed.own].clone() for unit, slabs in units.items()}


Found = tuple[Outcome, dict[str, torch.Tensor], dict[str, int]]


def trained(model: Any, training: Training, ranks: list[int]) -> Found:
    outcome = train(model, horizon_lm.AdamW(model, lr=1e-2), training, ranks)
    counters = model._horizon.engine.device.counters
    return outcome, own_codes(model), {kind: n for kind, n in counters.allocated.items() if n}


def as_rank(rank: int, folder: str, kind: str, training: Training, delayed: bool) -> Found:
    mesh = init_device_mesh("cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard"))
    device = ThreadedDevice(rank, delay=2e-3) if delayed else "cpu"
    return trained(opened(folder, kind, training, device_mesh=mesh, device=device), training, [rank])


def compare(pool: Pool, folder: str, kind: str, training: Training, delayed: bool = False) -> list[Found]:
    """Compare ranks with one process: losses, adapters, and the codes of the base. Return what the ranks found."""
    found = pool.run(training.world, as_rank, folder, kind, training, delayed)
    expected, codes, _ = trained(opened(folder, kind, training), training, list(range(training.world)))
    outcomes = [outcome for outcome, _, _ in found]
    assert_same(outcomes, expected, training)
    losses = [sum(each.losses[step] for each in outcomes) for step in range(training.steps)]
    assert losses == pytest.approx(expected.losses, rel=1e-6)
    assert expected.losses[0] != expected.losses[-1]
    for unit, data in codes.items():
        for copy in range(training.replicate):
            parts = [own[unit] for _, own, _ in found[copy * training.shard : (copy + 1) * training.shard]]
            assert torch.equal(torch.cat(parts), data), unit
    return found


# Of a format with and without tiles, one is tried.
WITH_TILES_ALONE = (
    "4bit", "4bit, four", "4bit, copies", "4bit, experts", "nf4", "mxfp4", "fp8, experts", "fp8, tiles", "fp8, deepseek",
)  # fmt: skip


@pytest.mark.parametrize("name", without(CASES, WITH_TILES_ALONE))
def test_bits_of_one_process(pool: Pool, folders: Any, name: str) -> None:
    family, kind, training = CASES[name]
    compare(pool, folders(family, kind), kind, training)


@pytest.mark.parametrize("more", thinned([{"resident_blocks": 2}, {}, {"expert_tile": 1}], every=2), ids=str)
def test_delays_on_each_rank_change_no_bit(pool: Pool, folders: Any, more: dict[str, int]) -> None:
    """Codes are gathered and decoded in threads, with pauses that differ from rank to rank."""
    settings = {"activation_checkpoints": "host", **more}
    compare(pool, folders("gpt_oss", "mxfp4"), "mxfp4", Training(shard=4, settings=settings), delayed=True)


@pytest.mark.parametrize("shard", thinned([4, 2], every=2))
def test_traffic_and_memory_of_a_rank(pool: Pool, folders: Any, shard: int) -> None:
    """Codes cross host links and networks as codes: a rank moves and keeps its share of them, and receives the others."""
    training = Training(shard=shard, steps=2)
    folder = folders("llama", "4bit")
    found = compare(pool, folder, "4bit", training)
    model = opened(folder, "4bit", training)
    one, codes, _ = trained(model, replace(training, equal=True), [0])
    for unit in (block(0), block(1), block(2)):
        slabs = model._horizon.engine.store.units[unit]
        plain, packed = 4 * slabs.plain.layout.numel, slabs.packed.layout.numel
        moved = [outcome.moved[f"stream_in:{unit}"] for outcome, _, _ in found]
        assert sum(moved) == 2 * (plain + packed)
        assert max(moved) <= 2 * ((plain + packed) / shard + 256 * 4 + 256)
        assert all(f"stream_out:{unit}" not in outcome.moved for outcome, _, _ in found)
        received = [outcome.moved[f"gather:{unit}"] for outcome, _, _ in found]
        most = 2 * (shard - 1) * ((plain + packed) / shard + 256 * 4 + 256)
        assert 2 * (shard - 1) / shard * (plain + packed) <= min(received) <= max(received) <= most
        assert most < 2 * (shard - 1) / shard * 4 * slabs.layout.numel / 2  # of the decoded weights
    whole_bytes = one.host["packed_weights"]
    assert max(outcome.host["packed_weights"] for outcome, _, _ in found) <= whole_bytes / shard + 3 * 2 * 4096
    largest = max(len(data) for data in codes.values())
    for _, _, allocated in found:
        assert 2 * largest <= allocated["packed_slots"] <= 2 * (largest + 256 * shard)


def begin(rank: int, folder: str, training: Training, checkpoint: str) -> None:
    mesh = init_device_mesh("cpu", (training.shard,), mesh_dim_names=("shard",))
    model = opened(folder, "4bit", training, device_mesh=mesh)
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    train(model, optimizer, training, [rank])
    horizon_lm.save_checkpoint(checkpoint, model, optimizer, state={})


def go_on(rank: int, folder: str, training: Training, checkpoint: str) -> Outcome:
    mesh = init_device_mesh("cpu", (training.shard,), mesh_dim_names=("shard",))
    model = opened(folder, "4bit", training, device_mesh=mesh)
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    horizon_lm.load_checkpoint(checkpoint, model, optimizer)
    return train(model, optimizer, training, [rank])


def test_other_numbers_of_ranks_go_on_exactly(pool: Pool, folders: Any, tmp_path: Path) -> None:
    """The base is in the checkpoint as hashes, which do not depend on the number of ranks."""
    folder, checkpoint = folders("llama", "4bit"), str(tmp_path / "checkpoint")
    training = Training(shard=4, steps=2, equal=True)
    pool.run(4, begin, folder, training, checkpoint)
    later = replace(training, steps=2, first=2)
    expected, _, _ = trained(opened(folder, "4bit", training), replace(training, steps=4), [0])
    for shard in (2, 3):
        again = replace(later, shard=shard)
        outcomes = pool.run(shard, go_on, folder, again, checkpoint)
        assert all(
            torch.allclose(slab, expected.slabs[name][1][: len(slab)], atol=1e-6)
            for name, slab in whole(outcomes, shard).items()
        )
    model = opened(folder, "4bit", training)
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    horizon_lm.load_checkpoint(checkpoint, model, optimizer)
    one = train(model, optimizer, later, [0])
    assert all(torch.equal(one.slabs[name][1], slab) for name, (_, slab) in expected.slabs.items())


def measured(rank: int, folder: str, family: str, kind: str, training: Training) -> tuple[Bytes, Bytes]:
    mesh = init_device_mesh("cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard"))
    model = opened(folder, kind, training, device_mesh=mesh)
    base = Path(model.peft_config["default"].base_model_name_or_path)
    config = hf_config.read_config(base, trust_remote_code=False)
    published = take_quantization(config)
    quantized = Quantized.of(published or four_bits(), base if published else None)
    adapters = Adapters(r=4, target_modules=tuple(model.peft_config["default"].target_modules))
    outline = outline_model(ModelSource(config, family, attn_implementation=config._attn_implementation), length=LENGTH, dtype=torch.float32, adapters=adapters, quantized=quantized)  # fmt: skip
    return measure(model, horizon_lm.AdamW(model, lr=1e-2), outline, training, rank)


PLANNED: dict[str, tuple[str, str, Training]] = {
    "4bit": ("llama", "4bit", Training(shard=4, settings={"precision": "fp32_master", "grad_dtype": torch.float32})),
    "resident": ("llama", "4bit", Training(settings={"resident_blocks": 3, "activation_checkpoints": "host"})),
    "fp8, experts": ("qwen3_moe", "fp8", Training(shard=3)),
    "mxfp4, copies": ("gpt_oss", "mxfp4", Training(replicate=2)),
    "fp8, tiles": ("qwen3_moe", "fp8", Training(shard=3, settings={"expert_tile": 3})),
    "fp8, deepseek, tiles": (
        "deepseek_v3",
        "fp8",
        Training(shard=3, settings={"expert_tile": 1, "resident_blocks": 1}),
    ),
    "mxfp4, tiles": ("gpt_oss", "mxfp4", Training(shard=4, settings={"expert_tile": 3})),
    "4bit, tiles": ("mixtral", "4bit", Training(settings={"expert_tile": 2})),
}


@pytest.mark.parametrize("name", without(PLANNED, ["fp8, experts", "mxfp4, tiles", "fp8, tiles"]))
def test_planned_bytes_of_each_rank(pool: Pool, folders: Any, name: str) -> None:
    family, kind, training = PLANNED[name]
    for planned, counted in pool.run(training.world, measured, folders(family, kind), family, kind, training):
        assert planned[:2] == counted[:2]
        assert planned[0]["packed_weights"] > 0
        assert planned[1].get("packed_slots", 0) + planned[1].get("tile_packed_slots", 0) > 0
        for unit in (block(0), block(1), block(2)):
            if (
                "expert_tile" not in training.settings and f"gather:{unit}" in counted[2]
            ):  # a resident block of a frozen base is gathered once
                priced, moved = (each[2][f"gather:{unit}"] for each in (planned, counted))
                assert priced <= moved <= 1.4 * priced  # padding is much of small tensors


def reading(rank: int, folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = opened(folder, "4bit", Training(), device_mesh=mesh)
    weight = next(param for param in model.parameters() if hasattr(param, "decode"))
    errors = []
    for read in (weight.decode, weight.packed):
        with pytest.raises(StreamingError) as error:
            read()
        errors.append(str(error.value))
    return errors


def test_other_code_cannot_read_a_part_for_the_whole(pool: Pool, folders: Any) -> None:
    for errors in pool.run(2, reading, folders("llama", "4bit")):
        assert all("each of 2 ranks keeps a part of every weight" in error for error in errors)
