"""A step of several ranks has the bits of a step of one process."""

import gc
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import horizon_lm
from horizon_lm.common.constants import PAGE
from horizon_lm.common.units import block
from horizon_lm.distributed.collectives import Group
from horizon_lm.engine.units.expert_call import ExpertCall
from horizon_lm.engine.units.tiled_backward import TiledBackward
from horizon_lm.errors import (
    DisagreementError,
    ModelNotSupportedError,
    RankLostError,
    StreamingError,
    SummedLossWarning,
)
from tests.distributed.pool import Pool
from tests.distributed.training import Outcome, Training, alone, assert_same, batches_of, build, run, train
from tests.support import tiny_models
from tests.support.thinned_cases import thinned, without
from tests.support.threaded_device import ThreadedDevice

TIED = {"tie_word_embeddings": True}
QUIET = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
CASES: dict[str, Training] = {
    "two": Training(),
    "four": Training(shard=4),
    "two equal": Training(equal=True),
    "four equal": Training(shard=4, equal=True),
    "two machines": Training(shard=4, local=2, optimizer={"max_grad_norm": 0.1}),
    "two machines, tied": Training(shard=4, local=2, overrides=TIED, together=True, optimizer={"moments": "8bit"}),
    "two machines, micro-batches": Training(
        shard=4,
        local=2,
        equal=True,
        settings={"precision": "bf16", "grad_dtype": torch.float32, "device_micro_batch_size": 1},
    ),
    "replicas": Training(replicate=2, shard=2, equal=True),
    "replicas alone": Training(replicate=2, shard=1),
    "tied": Training(overrides=TIED, together=True),
    "MoE": Training(family="qwen3_moe"),
    "experts": Training(family="mixtral", shard=4),
    "clipping equal": Training(shard=4, equal=True, optimizer={"max_grad_norm": 0.1}),
    "8-bit tied": Training(shard=4, optimizer={"moments": "8bit"}, overrides=TIED, together=True),
    "Muon, experts": Training(
        family="mixtral",
        optim="Muon",
        optimizer={"lr": 1e-3},
        settings={"precision": "bf16", "grad_dtype": torch.float32},
    ),
    "bf16": Training(settings={"precision": "bf16", "grad_dtype": torch.float32}, shard=4),
    "whole head": Training(settings={"head": "whole"}),
    "offloaded": Training(settings={"activation_checkpoints": "host", "resident_blocks": 1}),
    "gpt2": Training(family="gpt2", overrides=QUIET, together=True),
    "gemma3": Training(family="gemma3_text", together=True),
    "dropout": Training(shard=4, overrides={"attention_dropout": 0.2}, together=True),
    "dropout of the embedding": Training(family="gpt2", together=True),
    "adapters": Training(adapters="lora"),
    "adapters added later": Training(replicate=2, equal=True, adapters="later", settings={"precision": "fp32_master"}),
    "adapters of experts": Training(adapters="experts", family="mixtral", shard=4, settings={"resident_blocks": 1}),
    "adapters with dropout": Training(adapters="dropout", shard=4, together=True),
    "DoRA": Training(adapters="dora", settings={"precision": "fp32_master"}, optimizer={"moments": "8bit"}),
    "some weights": Training(
        shard=4, trainable="mlp|norm|lm_head", optimizer={"moments": "8bit", "max_grad_norm": 0.1}
    ),
    "weights in float32": Training(
        shard=4, in_float32=True, settings={"precision": "fp32_master", "grad_dtype": torch.float32}
    ),
    "weights in float32, 8-bit moments": Training(
        in_float32=True,
        settings={"precision": "bf16", "grad_dtype": torch.float32, "resident_blocks": 1},
        optimizer={"moments": "8bit", "max_grad_norm": 0.1},
    ),
    "weights in float32, adapters": Training(in_float32=True, adapters="lora", settings={"precision": "fp32_master"}),
    "weights in float32, in backward": Training(
        shard=4, equal=True, in_float32=True, optimizer={"update_in_backward": True}
    ),
    "in backward equal": Training(equal=True, optimizer={"update_in_backward": True}),
    "in backward tied": Training(equal=True, shard=4, optimizer={"update_in_backward": True}, overrides=TIED),
}

# Each of their settings is in another case, too.
IN_OTHER_CASES = (
    "two", "two equal", "four equal", "two machines", "two machines, micro-batches", "replicas alone", "tied", "MoE", "experts", "8-bit tied", "whole head", "gpt2", "adapters of experts",
    "bf16", "adapters", "weights in float32", "weights in float32, 8-bit moments", "weights in float32, adapters", "in backward equal",
)  # fmt: skip

BF16 = {"precision": "bf16", "device_micro_batch_size": 1}
NO_AUXILIARY_LOSS = {"router_aux_loss_coef": 0.0}  # which is that of each batch, not of the number of targets
TILED: dict[str, Training] = {
    "mixtral, 1": Training(family="mixtral", optimizer={"max_grad_norm": 0.1}),
    "mixtral, 3": Training(family="mixtral", shard=3, together=True, optimizer={"moments": "8bit"}),
    "qwen3_moe, 1": Training(family="qwen3_moe", shard=3, settings={"precision": "fp32_master", "grad_dtype": torch.float32}),
    "qwen3_moe, 3": Training(family="qwen3_moe", optimizer={"max_grad_norm": 0.1}),
    "deepseek_v3, 1": Training(family="deepseek_v3", settings={"activation_checkpoints": "host", "resident_blocks": 1}),
    "deepseek_v3, 3": Training(family="deepseek_v3", shard=3, settings={"device_micro_batch_size": 1}),
    # A width that AVX-512 divides: see decision 025.
    "gpt_oss, 3": Training(
        family="gpt_oss", shard=4, local=2, overrides={"intermediate_size": 64}, optimizer={"max_grad_norm": 0.1}
    ),
    "copies, 3": Training(family="deepseek_v3", replicate=2, equal=True, settings={"device_micro_batch_size": 1}),
    "copies alone, accumulator, 3": Training(family="deepseek_v3", replicate=2, shard=1, equal=True, settings=BF16),
    "accumulated, 2": Training(family="deepseek_v3", equal=True, accumulation=2, optimizer={"max_grad_norm": 0.1}),
    "in backward, 3": Training(
        family="qwen3_moe", shard=4, equal=True, overrides=NO_AUXILIARY_LOSS, optimizer={"update_in_backward": True}
    ),
    "in backward, 1": Training(family="deepseek_v3", equal=True, settings=BF16, optimizer={"update_in_backward": True}),
    "adapters, 3": Training(family="qwen3_moe", shard=3, adapters="lora", settings={"precision": "fp32_master"}),
    "adapters of experts, 3": Training(family="mixtral", shard=4, adapters="experts", optimizer={"max_grad_norm": 0.1}),
    "adapters of experts, 1": Training(family="qwen3_moe", adapters="experts", settings={"device_micro_batch_size": 1}),
    "frozen experts, 3": Training(family="deepseek_v3", shard=3, trainable="self_attn|norm"),
    "experts alone, 1": Training(family="deepseek_v3", shard=3, trainable="experts"),
    "dropout, 3": Training(family="qwen3_moe", overrides={"attention_dropout": 0.2}, together=True),
}  # fmt: skip
"""By family or kind, and the number of experts in a tile."""


def in_tiles(name: str) -> Training:
    training = TILED[name]
    return replace(training, settings=training.settings | {"expert_tile": int(name.rpartition(" ")[2])})


@pytest.mark.parametrize("name", thinned(TILED, every=4, keep=["in backward, 3", "adapters of experts, 1"]))
def test_bits_of_one_process_in_tiles(pool: Pool, name: str) -> None:
    """And those of one process that moves whole blocks."""
    training = in_tiles(name)
    outcomes = pool.run(training.world, run, training)
    assert any(".tile1" in unit for unit in outcomes[0].moved)
    for expected in (alone(training), alone(TILED[name])):
        assert_same(outcomes, expected, training)
        losses = [sum(each.losses[step] for each in outcomes) for step in range(training.steps)]
        assert losses == pytest.approx(expected.losses, rel=1e-6)


@pytest.mark.parametrize("name", without(CASES, IN_OTHER_CASES))
def test_bits_of_one_process(pool: Pool, name: str) -> None:
    training = CASES[name]
    outcomes = pool.run(training.world, run, training)
    expected = alone(training)
    assert_same(outcomes, expected, training)
    losses = [sum(each.losses[step] for each in outcomes) for step in range(training.steps)]
    assert losses == pytest.approx(expected.losses, rel=1e-6)


LONG: dict[str, Training] = {
    "two": Training(),
    "four, clipped": Training(shard=4, optimizer={"max_grad_norm": 0.5}),
    "replicas, tied": Training(replicate=2, overrides=TIED),
    # The auxiliary loss of a router is that of each batch, so it depends on how rows are put into batches.
    "MoE": Training(family="qwen3_moe", overrides={"router_aux_loss_coef": 0.0}),
    "in backward": Training(optimizer={"update_in_backward": True}),
    # At 1e-3, one process that computes the rows in four parts differs from itself by 1.6e-5, as four ranks do: rounding changes
    # a few codes.
    "8-bit moments": Training(shard=4, optimizer={"moments": "8bit", "lr": 3e-4}),
    "bf16 moments": Training(replicate=2, optimizer={"moments": "bfloat16"}),
    "adapters": Training(shard=4, adapters="lora"),
    "dropout": Training(shard=4, family="gpt2", settings={"device_micro_batch_size": 1}),
}


@pytest.mark.parametrize("name", thinned(LONG, every=8))
def test_losses_of_twenty_steps(pool: Pool, name: str) -> None:
    """The rows of all ranks as one batch of one process round differently, which Adam amplifies a little."""
    training = replace(LONG[name], steps=20, joined=True, optimizer={"lr": 1e-3} | LONG[name].optimizer)
    outcomes, expected = pool.run(training.world, run, training), alone(training)
    assert outcomes[0].norms[0] == pytest.approx(expected.norms[0], rel=1e-6)
    losses = [sum(each.losses[step] for each in outcomes) for step in range(training.steps)]
    assert losses == pytest.approx(expected.losses, abs=1e-5)


def delayed(rank: int, training: Training, seed: int) -> Outcome:
    device = ThreadedDevice(seed * 10 + rank, delay=2e-3)
    return run(rank, replace(training, settings={**training.settings, "device": device}))


def launches(rank: int, training: Training) -> tuple[list[str], int]:
    """Return the collectives of a training in the order in which this rank launches them, and the number of threads that do."""
    found: list[tuple[str, int]] = []

    def watched(name: str, run: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            found.append((name, threading.get_ident()))
            run(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather", "sum"):
            patch.setattr(Group, name, watched(name, getattr(Group, name)))
        delayed(rank, training, 0)
    return [collective for collective, _ in found], len({thread for _, thread in found})


def test_all_ranks_launch_their_collectives_in_one_order(pool: Pool) -> None:
    """Launched by two threads, those of two groups may wait for each other: each rank would run another one first."""
    training = Training(replicate=2, settings={"activation_checkpoints": "host"})
    found = pool.run(4, launches, training)
    assert all(order == found[0][0] for order, _ in found)
    assert [num_threads for _, num_threads in found] == [1] * 4
    assert set(found[0][0]) == {"gather", "sum"}


@pytest.mark.parametrize("seed", thinned(range(2), every=2))
def test_delays_on_each_rank_change_no_bit(pool: Pool, seed: int) -> None:
    """Streams are threads with random delays, which differ from rank to rank."""
    training = Training(
        shard=4, local=4 - 2 * seed, settings={"activation_checkpoints": "host"}, overrides=TIED, together=True
    )
    assert_same(pool.run(4, delayed, training, seed), alone(training), training)


SPARE = (
    200_000,
    300_000,
    10**9,
)  # bytes of a device: for activation checkpoints, also for weights and a graph, and for everything


def of_unequal_devices(rank: int, training: Training, spare: Sequence[int]) -> tuple[Outcome, tuple[int, ...]]:
    """Train on devices of which each has other memory to spare."""
    device = ThreadedDevice(rank, delay=1e-4, spare=spare[rank])
    settings = training.settings | {
        "device": device,
        "device_mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)),
    }
    model, optimizer = build(training, **settings)
    outcome = train(model, optimizer, training, [rank])
    return outcome, astuple(model._horizon.engine.residency)


@pytest.mark.parametrize("spare", [(SPARE[2], SPARE[1]), pytest.param((SPARE[0], SPARE[2]), marks=pytest.mark.slow)])
def test_ranks_keep_as_much_on_the_device_as_the_smallest_can(pool: Pool, spare: Sequence[int]) -> None:
    """Otherwise they would gather different units. Later batches are longer on one rank only, and are planned by both."""
    training = Training(steps=4)
    found = pool.run(2, of_unequal_devices, training, spare)
    outcomes, residencies = [outcome for outcome, _ in found], [residency for _, residency in found]
    assert_same(outcomes, alone(training), training)
    assert residencies[0] == residencies[1]
    smallest = pool.run(2, of_unequal_devices, training, (min(spare), min(spare)))
    largest = pool.run(2, of_unequal_devices, training, (SPARE[2], SPARE[2]))
    assert smallest[0][1] == residencies[0]
    assert sum(residencies[0]) < sum(largest[0][1])


@pytest.mark.parametrize("shard", [2, 4])
def test_traffic_and_memory_of_a_rank(pool: Pool, shard: int) -> None:
    """A rank moves and keeps its share of every unit, but for rounding to blocks of 256 elements and to pages."""
    training = Training(shard=shard, steps=2, overrides={"hidden_size": 64, "intermediate_size": 256})
    outcomes, one = pool.run(shard, run, training), alone(replace(training, replicate=1, equal=True))
    for unit in (block(0), block(1), block(2)):
        slab = len(one.slabs[f"{unit} weights"][1])
        for kind, passes in (("stream_in", 2), ("stream_out", 1)):
            moved = [each.moved[f"{kind}:{unit}"] for each in outcomes]
            assert sum(moved) == passes * slab * 4 == one.moved[f"{kind}:{unit}"]
            assert max(moved) <= passes * (slab / shard + 256) * 4
        gathered = [each.moved[f"gather:{unit}"] for each in outcomes]
        assert all(each == 2 * (shard - 1) * -(-slab // (256 * shard)) * 256 * 4 for each in gathered)
        assert all(each.moved[f"reduce:{unit}"] <= (shard - 1) * (slab / shard + 256) * 4 for each in outcomes)
    units = len(one.slabs)
    for kind, whole_bytes in one.host.items():
        most = max(each.host[kind] for each in outcomes)
        assert most <= whole_bytes / shard + 2 * units * (PAGE + 1024), kind


@pytest.mark.parametrize("name", thinned(["deepseek_v3, 3", "qwen3_moe, 1"], every=2))
def test_traffic_of_tiles(pool: Pool, name: str) -> None:
    """Together ranks copy and land each tile as often as one process; each receives what it does not own."""
    training = replace(in_tiles(name), equal=True)
    outcomes, one = pool.run(training.world, run, training), alone(training)
    units = {key.partition(":")[2] for key in one.moved if ".tile" in key}
    assert units
    for unit in units:
        moved = {
            kind: [each.moved.get(f"{kind}:{unit}", 0) for each in outcomes]
            for kind in ("stream_in", "stream_out", "gather", "reduce")
        }
        copied, landed = one.moved[f"stream_in:{unit}"], one.moved[f"stream_out:{unit}"]
        assert sum(moved["stream_in"]) == copied
        assert sum(moved["stream_out"]) == landed
        itemsize = 4 if training.settings.get("precision") is None else 2  # in host memory; 4 on the device
        for own, gathered in zip(moved["stream_in"], moved["gather"], strict=True):
            assert (copied - own) * 4 <= gathered * itemsize <= (copied - own) * 4 + 2 * 4 * 4 * 256
        assert sum(moved["reduce"]) >= (training.shard - 1) * landed
    assert len({each.moved.get(f"stream_in:{unit}", 0) for unit in units for each in outcomes}) > 1  # uneven


@pytest.mark.parametrize("name", thinned(["qwen3_moe, 3", "deepseek_v3, 1"], every=2))
def test_delays_on_each_rank_change_no_bit_of_tiles(pool: Pool, name: str) -> None:
    """A rank that is late copies into a slot, or lands from one, that others have gathered or summed long ago."""
    training = replace(in_tiles(name), shard=4, steps=2)
    assert_same(pool.run(4, delayed, training, 1), alone(training), training)


def answering(rank: int, training: Training) -> torch.Tensor:
    """Return the logits of a few tokens, other ones on each rank."""
    mesh = init_device_mesh("cpu", (training.shard,), mesh_dim_names=("shard",))
    return logits_of(build(training, device_mesh=mesh)[0], rank)


@torch.no_grad()
def logits_of(model: Any, rank: int) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(torch.tensor([[5 + rank, 9]])).logits
    return logits


def test_few_tokens_of_each_rank_find_their_experts(pool: Pool) -> None:
    """Ranks are routed to other experts, so all of them are streamed."""
    training = Training(family="qwen3_moe", shard=3, overrides={"num_experts": 16}, settings={"expert_tile": 3})
    expected = build(training)[0]
    for rank, found in enumerate(pool.run(3, answering, training)):
        assert torch.equal(found, logits_of(expected, rank))


def in_other_tiles(rank: int, training: Training, sizes: Sequence[int]) -> str:
    """Cut the experts of each rank into other tiles."""
    mesh = init_device_mesh("cpu", (training.shard,), mesh_dim_names=("shard",))
    model, _ = build(training, device_mesh=mesh, expert_tile=sizes[rank])
    with pytest.raises(DisagreementError) as error:
        model(**tiny_models.batch())
    return str(error.value)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3)], ids=str)
def test_ranks_with_other_tiles_are_named(pool: Pool, sizes: Sequence[int]) -> None:
    """They would gather other tiles, of which there may be as many: of four experts, two tiles of two, or of three and one."""
    found = pool.run(2, in_other_tiles, Training(family="qwen3_moe"), sizes)
    assert found[0] == found[1]
    assert "rank 0 and rank 1 are not at the same place of the program" in found[0]
    assert all(f"in tiles of {size}" in found[0] for size in sizes)


def leaving_out(rank: int, what: str, folder: str) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(Training(), device_mesh=mesh)
    batch = batches_of(Training(), 0)[rank]
    try:
        if what == "evaluation" and rank:
            with torch.no_grad():
                model(**batch)
        if what == "saving" and rank:
            model.save_pretrained(folder)
        if what == "checkpoint" and rank:
            horizon_lm.save_checkpoint(folder, model, optimizer)
        if what == "frozen" and rank:
            model.model.layers[0].requires_grad_(False)
        loss = model(**batch).loss
        if what == "backward" and rank:
            loss = model(**batch).loss
        loss.backward()
        if what != "step" or rank:
            optimizer.step()
        model(**batch)
    except DisagreementError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", thinned(["backward", "evaluation", "frozen", "saving", "checkpoint", "step"]))
def test_a_rank_at_another_place_is_named(pool: Pool, tmp_path: Path, what: str) -> None:
    """Nothing hangs: all ranks raise, and both places are named."""
    found = pool.run(2, leaving_out, what, str(tmp_path))
    assert found[0] == found[1]
    assert "rank 0 and rank 1 are not at the same place of the program" in found[0]


def saved(rank: int, training: Training, folder: str) -> None:
    mesh = init_device_mesh("cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(training, device_mesh=mesh)
    train(model, optimizer, training, [rank])
    model.save_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("precision", thinned(["fp32_master", "float32"], every=2))
def test_all_ranks_save_one_model(pool: Pool, tmp_path: Path, precision: str) -> None:
    training = Training(replicate=2, steps=1, equal=True, settings={"precision": precision})
    pool.run(4, saved, training, str(tmp_path / "ranks"))
    model, optimizer = build(training)
    train(model, optimizer, training, [0])
    model.save_pretrained(tmp_path / "one", dtype=torch.float32)
    ranks, one = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "one"))
    assert ranks.keys() == one.keys()
    assert all(torch.equal(ranks[name], value) for name, value in one.items())


def adapted(rank: int, training: Training, folder: str) -> str:
    """Save adapters, and return the error of what several processes do not support."""
    mesh = init_device_mesh("cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(training, device_mesh=mesh)
    train(model, optimizer, training, [rank])
    model.save_pretrained(folder, is_main_process=rank == 0)
    copying = get_peft_model(
        tiny_models.build("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    with pytest.raises(ModelNotSupportedError) as error:
        horizon_lm.stream(copying, "cpu", device_mesh=mesh)
    return str(error.value)


@pytest.mark.parametrize("precision", thinned(["fp32_master", "float32"], every=2))
def test_all_ranks_save_one_folder_of_adapters(pool: Pool, tmp_path: Path, precision: str) -> None:
    training = Training(replicate=2, steps=2, equal=True, adapters="lora", settings={"precision": precision})
    for copying in pool.run(4, adapted, training, str(tmp_path / "ranks")):
        assert "modules_to_save is not supported with several processes" in copying
    model, optimizer = build(training)
    train(model, optimizer, training, [0])
    model.save_pretrained(tmp_path / "one")
    ranks, one = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ranks", "one"))
    assert ranks.keys() == one.keys()
    assert all(torch.equal(ranks[name], value) for name, value in one.items())


def reading(rank: int) -> list[str]:
    model, _ = build(Training(), device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    errors = []
    assert model.lm_head.weight.grad is None
    model(**tiny_models.batch()).loss.backward()
    weight, grad = model.lm_head.weight, model.lm_head.weight.grad
    assert (grad.shape, grad.dtype) == (weight.shape, torch.float32)
    uses = [
        lambda: weight.sum(), lambda: model.state_dict(), lambda: grad.norm(), lambda: grad.mul_(2.0), lambda: weight.grad + 1,
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), lambda: setattr(weight, "grad", torch.zeros(1)),
        lambda: weight.data.zero_(), lambda: grad.tolist(), lambda: bool((grad == 0).all()), lambda: grad.numpy(),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(StreamingError) as error:
            use()
        errors.append(str(error.value))
    weight.grad = None  # one may be dropped, and all of them
    assert weight.grad is None
    assert model.model.norm.weight.grad is not None
    torch.nn.Module.zero_grad(model)
    assert all(param.grad is None for param in model.parameters())
    return errors


def test_other_code_cannot_read_a_part_for_the_whole(pool: Pool) -> None:
    for errors in pool.run(2, reading):
        assert all("keeps a part of every" in error for error in errors)


def noisy(rank: int) -> tuple[list[float], float]:
    """Return the losses of a model with noise on its embeddings, and the next random number of this rank."""
    model, _ = build(Training(), device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    add_noise = lambda module, args, output: output + torch.rand_like(output)  # noqa: E731
    model.get_input_embeddings().register_forward_hook(add_noise)
    torch.manual_seed(0)
    losses = [float(model(**tiny_models.batch()).loss) for _ in range(2)]
    return losses, float(torch.rand(()))


def test_ranks_draw_other_noise_and_stay_in_step(pool: Pool) -> None:
    (first, next_of_first), (second, next_of_second) = pool.run(2, noisy)
    assert len({*first, *second}) == 4
    assert next_of_first == next_of_second


def ending(rank: int) -> str:
    """One rank ends its program while the other goes on."""
    model, _ = build(Training(), device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    if rank:
        return ""
    with pytest.raises(RankLostError) as error:
        model(**tiny_models.batch())
    return str(error.value)


def test_a_rank_that_has_ended_is_reported(pool: Pool) -> None:
    assert "another rank has failed or ended its program" in pool.run(2, ending)[0]


class FailedError(Exception):
    """A failure of one rank."""


def ending_in_a_tile(rank: int, owner: type, method: str) -> str:
    """One rank fails in a tile, and ends its program."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model, _ = build(Training(family="qwen3_moe"), device_mesh=mesh, expert_tile=1)
    calls = count()

    def fail(*args: Any) -> None:
        if next(calls) == 2:
            raise FailedError
        original(*args)

    original = getattr(owner, method)
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(owner, method, fail)
        with pytest.raises(FailedError if rank else RankLostError) as error:
            model(**tiny_models.batch()).loss.backward()
    message = str(error.value)
    del error, model
    gc.collect()  # the error's frames keep the connections to the other rank open
    return message


@pytest.mark.parametrize(
    ("owner", "method"), thinned([(TiledBackward, "_differentiate_tile"), (ExpertCall, "compute")], every=2)
)
def test_a_rank_that_has_ended_in_a_tile_is_reported(pool: Pool, owner: type, method: str) -> None:
    """The other waits for its part of the next tile, or of the sum of gradients."""
    assert "another rank has failed or ended its program" in pool.run(2, ending_in_a_tile, owner, method)[0]


def without_number_of_targets(rank: int) -> list[str]:
    model, _ = build(Training(), device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SummedLossWarning)
        for _ in range(2):
            model(**tiny_models.batch()).loss.backward()
        model(**tiny_models.batch(), num_items_in_batch=20)
    return [str(each.message) for each in caught if each.category is SummedLossWarning]


def test_a_mean_over_one_rank_is_warned_of(pool: Pool) -> None:
    for found in pool.run(2, without_number_of_targets):
        assert len(found) == 1
        assert "pass num_items_in_batch, the number of targets of all ranks" in found[0]
