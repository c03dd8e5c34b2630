"""Each rank reads its own part of the weights, and no more than that is in memory on the way."""

import json
import shutil
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import horizon_lm
from horizon_lm.distributed import same_files
from horizon_lm.errors import ConfigError
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from tests.distributed.pool import Pool
from tests.distributed.training import Outcome, Training, whole
from tests.support import tiny_models
from tests.support.quantized_folders import save_published
from tests.support.thinned_cases import thinned

MESHES = [Training(shard=2), Training(shard=4), Training(replicate=2)]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "llama, tied": {"tie_word_embeddings": True}, "qwen3_moe": {}, "mixtral": {}, "gpt2": {},
}  # fmt: skip


def model_of(folder: Path, name: str) -> Path:
    tiny_models.build(name.partition(",")[0], **FAMILIES[name]).save_pretrained(folder / name)
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
    for unit, slabs_of_unit in model._horizon.engine.store.units.items():
        each = slabs_of_unit.plain
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
    model = tiny_models.build("qwen3_moe", **size)
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
        model = horizon_lm.from_config(tiny_models.build("llama").config, **settings)
    else:
        made = type(tiny_models.build("llama"))(tiny_models.build("llama").config)
        made.model.norm.register_buffer("bias", torch.tensor([float(rank)]))
        if how == "adapters":
            made = get_peft_model(made, LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian"))
        model = horizon_lm.stream(made, **settings)
        assert (
            made.get_buffer("base_model.model.model.norm.bias" if how == "adapters" else "model.norm.bias").item() == 0
        )
    slabs = model._horizon.engine.store.slabs
    return {f"{each.name} weights": (each.own.start, each.weights[each.own].clone()) for each in slabs}


@pytest.mark.parametrize("how", ["from_config", "stream", "adapters"])
def test_ranks_start_with_the_weights_of_the_first(pool: Pool, how: str) -> None:
    """Each rank draws other values, as it does without a seed. Both copies of the model have those of one process."""
    outcomes = [Outcome([], [], slabs, {}, {}) for slabs in pool.run(4, differing, how)]
    first, second = whole(outcomes[:2], 2), whole(outcomes[2:], 2)
    torch.manual_seed(0)
    if how == "from_config":
        alone = horizon_lm.from_config(tiny_models.build("llama").config, "cpu", "float32")
    else:
        made = type(tiny_models.build("llama"))(tiny_models.build("llama").config)
        if how == "adapters":
            made = get_peft_model(made, LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian"))
        alone = horizon_lm.stream(made, "cpu", "float32")
    for each in alone._horizon.engine.store.slabs:
        for copy in (first, second):
            found = copy[f"{each.name} weights"]
            assert torch.equal(found, each.weights[: len(found)]), each.name


def opening_own(
    rank: int, cases: list[list[str]], mesh: Training, reference: str, on_machines: bool = False, settings: Any = None
) -> list[tuple[str, int]]:
    """Open each case's folder of this rank. Return the error, or how the slabs differ from the reference, and the bytes read."""
    expected, found = torch.load(reference), []
    if on_machines:
        same_files._machine = lambda: f"machine {rank}"  # type: ignore[assignment]
    device_mesh = init_device_mesh("cpu", (mesh.replicate, mesh.shard), mesh_dim_names=("replicate", "shard"))
    for folders in cases:
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", RuntimeWarning)
                slabs, read = load(folders[rank], device_mesh=device_mesh, **(settings or {}))
        except ConfigError as error:
            found.append((str(error), 0))
            continue
        bad = [
            key for key, (start, value) in slabs.items() if not torch.equal(value, expected[key][start:][: len(value)])
        ]
        assert len(said) == (rank == 0 and "not one folder" in str([each.message for each in said])), said
        found.append((f"trains with {bad}" if bad else f"loaded {len(said)}", read))
    same_files._machine = MACHINE
    return found


MACHINE = same_files._machine


def copy_with_a_flipped_bit(folder: Path, target: Path, at: float) -> str:
    """Copy a folder, and flip the lowest bit of a weight at this share of the weights."""
    shutil.copytree(folder, target)
    with (target / "model.safetensors").open("r+b") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        place = data + int(at * (file.seek(0, 2) - data - 1)) // 4 * 4  # the lowest byte of a float32
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    return str(target)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model of some MB, too large for a sample, and the file of its slabs."""
    folder = tmp_path_factory.mktemp("large")
    model = tiny_models.build("llama", vocab_size=4096, hidden_size=128, intermediate_size=512)
    model.save_pretrained(folder / "model")
    slabs = {key: value for key, (_, value) in load(str(folder / "model"))[0].items()}
    torch.save(slabs, folder / "slabs")
    return str(folder / "model"), str(folder / "slabs")


PLACES = [0.0, 0.3, 0.57, 0.999]
MESHES_OF_COPIES = [
    Training(shard=2),
    Training(replicate=2, shard=1),
    pytest.param(Training(replicate=2), marks=pytest.mark.slow),
    pytest.param(Training(shard=4), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mesh", MESHES_OF_COPIES, ids=lambda mesh: f"{mesh.replicate}x{mesh.shard}")
def test_a_flipped_bit_is_found_wherever_it_is_used(
    pool: Pool, tmp_path: Path, large: tuple[str, str], mesh: Training
) -> None:
    """Each rank in turn has a folder of its own, in which one bit of a weight differs."""
    folder, slabs = large
    flipped = [copy_with_a_flipped_bit(Path(folder), tmp_path / str(at), at) for at in PLACES]
    cases, names = [], []
    for odd in range(mesh.world):
        for at, other in zip(PLACES, flipped, strict=True):
            cases.append([other if rank == odd else folder for rank in range(mesh.world)])
            names.append((odd, at))
    found = pool.run(mesh.world, opening_own, cases, mesh, slabs)
    rejected: Counter[float] = Counter()
    for (odd, at), ranks in zip(names, zip(*found, strict=True), strict=True):
        errors = {text for text, _ in ranks}
        if any("differ" in text for text in errors):
            # All ranks end, with the same message.
            assert len({text.partition(": ")[2] for text in errors}) == 1, errors
            rejected[at] += 1
        else:  # this rank has not read that weight, and no other one has this file
            assert mesh.shard > 1
            assert all(text.startswith("loaded") for text in errors), (odd, at, errors)
    # The first rank's file is compared with all that others read, and each copy of the model has the weight on a rank.
    assert all(rejected[at] >= mesh.replicate for at in PLACES), rejected


def test_the_first_machine_alone_reads_more(pool: Pool, tmp_path: Path, large: tuple[str, str]) -> None:
    """Equal copies on four machines: three read their shares, and the first one what nobody there has read."""
    folder, slabs = large
    size = (Path(folder) / "model.safetensors").stat().st_size
    copies = [shutil.copytree(folder, tmp_path / str(rank)) for rank in range(4)]
    own, shared = zip(
        *pool.run(4, opening_own, [[*map(str, copies)], [folder] * 4], Training(shard=4), slabs, True), strict=True
    )
    assert [text for text, _ in own] == ["loaded 1", "loaded 0", "loaded 0", "loaded 0"]
    assert own[0][1] > 0.95 * size
    assert own[1][1] < 0.6 * size  # also what the first rank trains with
    assert all(read < 0.35 * size for _, read in own[2:])
    # On a shared file system they are the same files, and nothing is read twice.
    assert [text for text, _ in shared] == ["loaded 0"] * 4
    assert all(read < 0.35 * size for _, read in shared)
    # Where each machine has a whole copy, all bytes are compared anyway.
    (copied,) = zip(
        *pool.run(4, opening_own, [[folder, folder, *[str(copies[0])] * 2]], Training(replicate=2), slabs), strict=True
    )
    assert [text for text, _ in copied] == ["loaded 0"] * 4
    assert all(read < 0.6 * size for _, read in copied)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "kind"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8")])
def test_ranks_decode_their_parts(pool: Pool, tmp_path: Path, family: str, kind: str) -> None:
    """Weights that are decoded while they are read are those of one process, and copies are compared as they are in the files."""
    folder, decoded = save_published(family, kind, tmp_path / "model"), {"quantization_config": {"dequantize": True}}
    torch.save({key: value for key, (_, value) in load(str(folder), **decoded)[0].items()}, tmp_path / "slabs")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    scales = load_file(folder / "model.safetensors")
    part = next(name for name in scales if name.endswith(("_scales", "_scale_inv")))
    scales[part].view(torch.uint8).view(-1)[0] ^= 1
    save_file(scales, other / "model.safetensors", {"format": "pt"})
    copy = str(shutil.copytree(folder, tmp_path / "copy"))
    cases = [[str(folder)] * 2, [str(folder), copy], [str(folder), str(other)]]
    found = pool.run(2, opening_own, cases, Training(shard=2), str(tmp_path / "slabs"), True, decoded)
    for rank, (one, same, differs) in enumerate(found):
        assert one[0] == "loaded 0"
        assert same[0] == f"loaded {1 - rank}"
        assert f"differ from those of rank 0 in {part}" in differs[0]


@pytest.mark.parametrize("name", ["config.json", "modeling.py", "model.safetensors"])
def test_ranks_with_another_folder_are_rejected(pool: Pool, tmp_path: Path, large: tuple[str, str], name: str) -> None:
    folder, slabs = large
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    if name == "config.json":
        settings = json.loads((other / name).read_text())
        (other / name).write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    elif name == "modeling.py":
        (other / name).write_text("import torch")
    else:
        save_file(load_file(other / name) | {"extra": torch.ones(2)}, other / name, {"format": "pt"})
    for ((error, _),) in pool.run(2, opening_own, [[folder, str(other)]], Training(shard=2), slabs):
        assert "of rank 1 differ" in error
        assert "give all machines the same files" in error


def test_adapters_with_another_config_are_rejected(pool: Pool, tmp_path: Path, large: tuple[str, str]) -> None:
    """Their weights are copied from the first rank, but not what they are multiplied with."""
    for alpha in (8, 16):
        adapters = get_peft_model(
            tiny_models.build("llama"), LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"])
        )
        adapters.peft_config["default"].base_model_name_or_path = str(model_of(tmp_path / f"base {alpha}", "llama"))
        adapters.save_pretrained(tmp_path / str(alpha))
    cases = [[str(tmp_path / "8"), str(tmp_path / "8")], [str(tmp_path / "8"), str(tmp_path / "16")]]
    for alike, other in pool.run(2, opening_adapters, cases):
        assert alike == ""
        assert "the config of the adapters of rank 1 differs from that of rank 0" in other


def opening_adapters(rank: int, cases: list[list[str]]) -> list[str]:
    mesh, found = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")), []
    for folders in cases:
        try:
            horizon_lm.from_pretrained(folders[rank], device="cpu", device_mesh=mesh)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found
