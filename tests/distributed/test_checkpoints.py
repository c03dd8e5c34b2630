"""Checkpoints that all ranks write together, read by any number of ranks."""

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import horizon_lm
from horizon_lm.errors import ConfigError, DoesNotFitError, InterruptedRunError
from horizon_lm.runs.checkpoints.checkpoint import save_checkpoint
from horizon_lm.runs.checkpoints.manifest import read_manifest, verify, verify_copies
from horizon_lm.runs.checkpoints.saving import Saving
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.training import keeping
from horizon_lm.runs.training.keeping import Keeper
from horizon_lm.runs.training.ranks import Ranks
from horizon_lm.runs.training.run_dir import RunDir
from tests.distributed.pool import Pool
from tests.distributed.training import Outcome, Training, alone, build, train, whole
from tests.support.failing_disk import FailingDisk
from tests.support.thinned_cases import thinned, without

pytestmark = pytest.mark.filterwarnings("ignore")
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "fp32_master": {"settings": {"precision": "fp32_master", "grad_dtype": torch.float32}},
    "8-bit, tied": {"optimizer": {"moments": "8bit"}, "overrides": {"tie_word_embeddings": True}},
    "adapters": {"settings": {"precision": "fp32_master"}, "adapters": "lora"},
    "bf16": {"settings": {"precision": "bf16"}, "optimizer": {"moments": "bfloat16"}},
}


def begin(rank: int, training: Training, folder: str) -> None:
    mesh = init_device_mesh("cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(training, device_mesh=mesh)
    train(model, optimizer, training, [rank])
    horizon_lm.save_checkpoint(folder, model, optimizer, state={"steps": training.steps})


def go_on(rank: int, training: Training, folder: str) -> Outcome:
    mesh = init_device_mesh("cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(training, device_mesh=mesh)
    state = horizon_lm.load_checkpoint(folder, model, optimizer)
    assert state == {"steps": 2}
    return train(model, optimizer, training, [rank])


@pytest.mark.parametrize("kind", without(CASES, ["fp32_master", "bf16"]))
def test_other_numbers_of_ranks_go_on_exactly(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Equal rows: 4 ranks write, 2, 3 and 1 read, and all go on as 4 that were not interrupted."""
    training = Training(shard=4, steps=2, equal=True, **CASES[kind])
    folder = str(tmp_path / "checkpoint")
    pool.run(4, begin, training, folder)
    manifest = read_manifest(Path(folder))
    verify(Path(folder), manifest)
    assert {name.split(".")[-2] for name in manifest.files if name.startswith("units/")} == {
        f"rank{n}" for n in range(4)
    }
    uninterrupted = alone(replace(training, steps=4))
    later = replace(training, steps=2, first=2)
    for shard in (2, 4):
        again = replace(later, shard=shard)
        outcomes = pool.run(shard, go_on, again, folder)
        found = whole(outcomes, shard)
        assert all(
            torch.equal(found[name], slab[: len(found[name])]) for name, (_, slab) in uninterrupted.slabs.items()
        )
    model, optimizer = build(training)
    horizon_lm.load_checkpoint(folder, model, optimizer)
    one = train(model, optimizer, later, [0])
    assert all(torch.equal(one.slabs[name][1], slab) for name, (_, slab) in uninterrupted.slabs.items())


def test_other_numbers_of_ranks_go_on_with_other_tiles(pool: Pool, tmp_path: Path) -> None:
    """A checkpoint knows nothing of tiles: others are read, or whole blocks, with the bits of a run of whole blocks."""
    whole_blocks = Training(shard=4, steps=2, equal=True, family="deepseek_v3", optimizer={"moments": "8bit"})

    def tiled(training: Training, size: int | None) -> Training:
        return replace(training, settings={"expert_tile": size})

    folder = str(tmp_path / "checkpoint")
    pool.run(4, begin, tiled(whole_blocks, 3), folder)
    uninterrupted = alone(replace(whole_blocks, steps=4))
    for shard, size in ((2, 2), (2, None), (4, 1)):
        later = replace(tiled(whole_blocks, size), shard=shard, first=2)
        found = whole(pool.run(shard, go_on, later, folder), shard)
        assert all(
            torch.equal(found[name], slab[: len(found[name])]) for name, (_, slab) in uninterrupted.slabs.items()
        )
    later = replace(tiled(whole_blocks, 2), first=2)
    model, optimizer = build(later)
    horizon_lm.load_checkpoint(folder, model, optimizer)
    one = train(model, optimizer, later, [0])
    assert all(torch.equal(one.slabs[name][1], slab) for name, (_, slab) in uninterrupted.slabs.items())


def test_three_ranks_read_what_one_has_written(pool: Pool, tmp_path: Path) -> None:
    training = Training(shard=3, steps=2)
    model, optimizer = build(training)
    train(model, optimizer, training, [0, 1, 2])
    horizon_lm.save_checkpoint(tmp_path / "checkpoint", model, optimizer, state={"steps": 2})
    later = replace(training, first=2)
    outcomes = pool.run(3, go_on, later, str(tmp_path / "checkpoint"))
    expected = train(model, optimizer, later, [0, 1, 2])
    found = whole(outcomes, 3)
    assert all(torch.equal(found[name], slab[: len(found[name])]) for name, (_, slab) in expected.slabs.items())


def test_export(pool: Pool, tmp_path: Path) -> None:
    training = Training(shard=2, replicate=2, steps=1, equal=True, settings={"precision": "fp32_master"})
    pool.run(4, begin, training, str(tmp_path / "checkpoint"))
    horizon_lm.export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported", dtype="float32")
    model, optimizer = build(training)
    train(model, optimizer, training, [0])
    model.save_pretrained(tmp_path / "one", dtype=torch.float32)
    ranks, one = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "one"))
    assert all(torch.equal(ranks[name], value) for name, value in one.items())


def load_own(rank: int, folders: list[str], how: str) -> str:
    """Open this rank's copy of a checkpoint, as a script of one's own does, or a run that goes on."""
    training = Training()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(training, device_mesh=mesh)
    try:
        if how == "script":
            horizon_lm.load_checkpoint(folders[rank], model, optimizer)
        else:
            verify_copies(model._horizon.engine.mesh, Path(folders[rank]), is_verified=True)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["script", "run"])
def test_copies_of_a_checkpoint_are_compared(pool: Pool, tmp_path: Path, how: str) -> None:
    """Each machine may have its own: an equal one, one with a flipped bit, or that of another run, which is whole."""
    pool.run(2, begin, Training(steps=1), str(tmp_path / "one"))
    pool.run(2, begin, Training(steps=2), str(tmp_path / "other"))
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    shutil.copytree(tmp_path / "one", tmp_path / "flipped")
    unit = tmp_path / "flipped/units/block0.rank1.safetensors"
    data = bytearray(unit.read_bytes())
    data[-1] ^= 1
    unit.write_bytes(data)

    def load(name: str) -> list[str]:
        found: list[str] = pool.run(2, load_own, [str(tmp_path / "one"), str(tmp_path / name)], how)
        return found

    assert load("one") == load("copy") == ["", ""]
    for error in load("flipped"):
        assert "block0.rank1.safetensors is damaged" in error
    for error in load("other"):
        assert "rank 1 has another checkpoint than rank 0; give all machines the same files" in error


def exporting(rank: int, folder: str, how: str) -> tuple[str, list[str]]:
    """Export at the end of a training, where the first rank's folder fails at first, or for good until a signal arrives."""
    keeping._RETRY_SECONDS = keeping._PATIENCE_SECONDS = 0.0
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(Training(), device_mesh=mesh)
    train(model, optimizer, Training(steps=1), [rank])
    ranks = Ranks(model._horizon.engine.mesh)
    settings = {"model_name_or_path": "m", "datasets": "d", "output_dir": f"{folder}/run"}
    config = as_config(settings)
    run_dir, said, looked = RunDir(config, ranks), list[str](), count()
    disk = FailingDisk(
        {"folder": 2, "weights": 6, "never": 0, "checkpoint": 0}[how] if rank == 0 else 10**9,
        how in ("never", "checkpoint"),
    )
    run_dir.take()
    run_dir.disk, run_dir.second_place = disk, None

    def write(folder: Path, step: int, **options: Any) -> Saving:
        if how != "checkpoint":
            raise OSError("no checkpoint can be written")
        return save_checkpoint(folder, model, optimizer, **(options | {"disk": None}))

    keeper = Keeper(
        config, run_dir, model, SimpleNamespace(save_pretrained=lambda part: None), write, said.append,
        requested=lambda: "SIGTERM" if rank == 1 and next(looked) > 20 else "",
    )  # fmt: skip
    try:
        with run_dir:
            keeper.export(1)
    except (DoesNotFitError, InterruptedRunError) as error:
        return f"{type(error).__name__}: {error}", said
    return "", said


@pytest.mark.parametrize("how", thinned(["never", "folder", "weights", "checkpoint"], every=3))
def test_an_export_that_fails_is_tried_again_by_all_ranks(pool: Pool, tmp_path: Path, how: str) -> None:
    (error, said), (other, _) = pool.run(2, exporting, str(tmp_path), how)
    assert "no space is left" in said[0]
    assert error == other
    if how == "never":
        assert "interrupted by SIGTERM while the trained model could not be written" in error
        assert "The trained weights are lost." in error
    elif how == "checkpoint":
        assert error.startswith("InterruptedRunError: interrupted by SIGTERM")
        assert f"Kept: {tmp_path / 'run' / 'checkpoint-1'}. Run the same command again to go on from there" in error
        verify(tmp_path / "run" / "checkpoint-1", read_manifest(tmp_path / "run" / "checkpoint-1"))
    else:
        assert not error
        assert load_file(tmp_path / "run" / "model" / "model.safetensors")
