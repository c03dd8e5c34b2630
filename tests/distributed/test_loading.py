"""Each rank reads its own part of the weights, and no more than that is in memory on the way."""

import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.store.checkpoint_reader import Checkpoint
from tests import families
from tests.distributed.pool import Pool
from tests.distributed.training import Outcome, Training, whole
from tests.thinning import thinned

MESHES = [Training(shard=2), Training(shard=4), Training(replicate=2)]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "llama, tied": {"tie_word_embeddings": True}, "qwen3_moe": {}, "mixtral": {}, "gpt2": {},
}  # fmt: skip


def model_of(folder: Path, name: str) -> Path:
    families.build(name.partition(",")[0], **FAMILIES[name]).save_pretrained(folder / name)
    return folder / name


def load(folder: str, **settings: Any) -> tuple[dict[str, tuple[int, torch.Tensor]], int]:
    """Load a model. Return this rank's slabs, and the bytes of the tensors that it has read."""
    read: Counter[str] = Counter()
    original = Checkpoint.read

    def counted(self: Checkpoint, names: list[str], rows: slice | None = None) -> dict[str, torch.Tensor]:
        found = original(self, names, rows)
        read.update({name: tensor.nbytes for name, tensor in found.items()})
        return found

    Checkpoint.read = counted  # type: ignore[method-assign]
    try:
        model = horizon_lm.from_pretrained(folder, device="cpu", precision="fp32_master", **settings)
    finally:
        Checkpoint.read = original  # type: ignore[method-assign]
    slabs = {}
    for unit, each in model._horizon.engine.store.units.items():
        slabs |= {f"{unit} weights": (each.own.start, each.weights[each.own].clone())}
        slabs |= {f"{unit} low": (each.own.start, each.low[each.own].clone())}
    return slabs, read.total()


def loading(rank: int, folder: str, mesh: Training) -> tuple[dict[str, tuple[int, torch.Tensor]], int]:
    shape = (mesh.replicate, mesh.shard)
    return load(folder, device_mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.replicate}x{mesh.shard}")
@pytest.mark.parametrize("name", thinned(FAMILIES, every=2))
def test_ranks_hold_what_one_process_loads(pool: Pool, tmp_path: Path, name: str, mesh: Training) -> None:
    """The first and last rows of a part, and one row of a tensor elsewhere, are read too, so all ranks read a little more than the model."""
    folder = str(model_of(tmp_path, name))
    alone, read_alone = load(folder)
    found = pool.run(mesh.world, loading, folder, mesh)
    outcomes = [Outcome([], [], slabs, {}, {}) for slabs, _ in found]
    for first in range(0, mesh.world, mesh.shard):
        parts = whole(outcomes[first : first + mesh.shard], mesh.shard)
        for key, (_, value) in alone.items():
            assert torch.equal(parts[key], value[: len(parts[key])]), key  # a table is not padded
        read = sum(read for _, read in found[first : first + mesh.shard])
        assert read < (1 + 0.2 * mesh.shard) * read_alone  # an expert is read whole, and there are only four


def failing(rank: int, folder: str) -> str:
    try:
        loading(rank, folder, Training(shard=2))
    except ConfigError as error:
        return str(error)
    return ""


def test_all_ranks_fail_if_one_part_is_damaged(pool: Pool, tmp_path: Path) -> None:
    folder = model_of(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][-1, -1] = float("nan")  # the last range
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    first, second = pool.run(2, failing, str(folder))
    assert "lm_head.weight" in second
    assert first == f"rank 1: {second}"


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def peak_of_loading(rank: int, folder: str, shard: int) -> tuple[int, int]:
    """Return the bytes of the store of this rank, and how much the memory of the process grew at most while it was loaded."""
    mesh = init_device_mesh("cpu", (1, shard), mesh_dim_names=("replicate", "shard"))
    before, peak, ended = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.0005):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = horizon_lm.from_pretrained(folder, device="cpu", precision="fp32_master", device_mesh=mesh)
    ended.set()
    watcher.join()
    return sum(model._horizon.engine.store.num_bytes.values()), peak - before


def test_peak_of_loading_is_the_store(pool: Pool, tmp_path: Path) -> None:
    """Each of four ranks stacks the experts of its part, so a machine never holds four copies of a stack."""
    size = {
        "hidden_size": 512,
        "moe_intermediate_size": 1024,
        "num_experts": 16,
        "vocab_size": 1024,
        "num_hidden_layers": 2,
    }
    model = families.build("qwen3_moe", **size)
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    pool.run(4, peak_of_loading, str(tmp_path), 4)  # libraries are imported, and their caches filled
    found = pool.run(4, peak_of_loading, str(tmp_path), 4)
    stored, peak = (sum(column) for column in zip(*found, strict=True))
    assert stored > 3 * largest
    assert peak < stored + 4 * largest, (peak, stored, largest)


def differing(rank: int, how: str) -> dict[str, tuple[int, torch.Tensor]]:
    """Make a model whose weights each rank draws from another seed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(rank)
    settings: dict[str, Any] = {"device": "cpu", "precision": "float32", "device_mesh": mesh}
    if how == "from_config":
        model = horizon_lm.from_config(families.build("llama").config, **settings)
    else:
        made = type(families.build("llama"))(families.build("llama").config)
        if how == "adapters":
            made = get_peft_model(made, LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian"))
        model = horizon_lm.stream(made, **settings)
    units = model._horizon.engine.store.units
    return {f"{unit} weights": (each.own.start, each.weights[each.own].clone()) for unit, each in units.items()}


@pytest.mark.parametrize("how", ["from_config", "stream", "adapters"])
def test_ranks_start_with_the_weights_of_the_first(pool: Pool, how: str) -> None:
    """Each rank draws other values, as it does without a seed. Both copies of the model have those of one process."""
    outcomes = [Outcome([], [], slabs, {}, {}) for slabs in pool.run(4, differing, how)]
    first, second = whole(outcomes[:2], 2), whole(outcomes[2:], 2)
    torch.manual_seed(0)
    if how == "from_config":
        alone = horizon_lm.from_config(families.build("llama").config, "cpu", "float32")
    else:
        made = type(families.build("llama"))(families.build("llama").config)
        if how == "adapters":
            made = get_peft_model(made, LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian"))
        alone = horizon_lm.stream(made, "cpu", "float32")
    for unit, each in alone._horizon.engine.store.units.items():
        for copy in (first, second):
            found = copy[f"{unit} weights"]
            assert torch.equal(found, each.weights[: len(found)]), unit


def opening_own(rank: int, folders: list[str]) -> str:
    try:
        loading(rank, folders[rank], Training(shard=2))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_other_weights_are_rejected(pool: Pool, tmp_path: Path) -> None:
    """Machines may have copies of their own, of which one is another version of the model."""
    folder = model_of(tmp_path / "a", "llama")
    other = shutil.copytree(folder, tmp_path / "b" / "llama")
    assert pool.run(2, opening_own, [str(folder), str(other)]) == ["", ""]
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    for error in pool.run(2, opening_own, [str(folder), str(other)]):
        assert "the weights of rank 1 differ from those of rank 0" in error
