"""A damaged checkpoint is rejected by name, before a weight or a random generator has changed."""

import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("xxhash", reason="needs the whole installation")

from horizon_lm.errors import ConfigError
from horizon_lm.runs.checkpoints import manifest
from horizon_lm.runs.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from horizon_lm.runs.checkpoints.export import export_checkpoint
from horizon_lm.runs.checkpoints.plain_state import random_state
from horizon_lm.runs.checkpoints.unit_file import hash_file
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.training import resume, run_state
from tests.e2e.command import run
from tests.support.checkpointed_training import BUFFERED, digest, opened
from tests.support.training_steps import step

STATE: dict[str, Any] = {**{name: kinds[0]() for name, kinds in run_state.FORMAT.items()}, "num_steps": 9}
OPTIONS: dict[str, Any] = {"precision": "fp32_master", "moments": "8bit", "family": BUFFERED}
UNIT = "units/block1.safetensors"
FILES = (
    "manifest.json", "training_state.json", UNIT, "units/block2.safetensors", "units/embed.safetensors", "units/head.safetensors",
    "units/outer.safetensors", "arrays.safetensors", "buffers.safetensors", "config.json", "tokenizer.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("run")
    model, optimizer = opened(**OPTIONS)
    for number in (1, 2):
        step(model, optimizer, number)
        save_checkpoint(
            folder / f"checkpoint-{number}", model, optimizer, state={**STATE, "step": number},
            arrays={"kept": torch.full((2,), number)}, add_files=lambda part: (part / "tokenizer.json").write_text(part.name),
        )  # fmt: skip
    return folder


@dataclass
class Damage:
    """A change of one file, and what the error must name."""

    name: str
    file: str
    change: Callable[[Path], object]
    tensor: str = ""


def flipped(position: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return change


def replaced(other: Path) -> Callable[[Path], object]:
    return lambda path: shutil.copyfile(other, path)


def damages(saved: Path) -> Iterator[Damage]:
    """Yield all damages of the second checkpoint."""
    good = saved / "checkpoint-2"
    for number, file in enumerate(FILES):
        size = (good / file).stat().st_size
        yield Damage("flipped", file, flipped(size // 2))
        yield Damage("cut off", file, lambda path, size=size: path.write_bytes(path.read_bytes()[: size - 9]))
        yield Damage("empty", file, lambda path: path.write_bytes(b""))
        yield Damage("deleted", file, Path.unlink)
        yield Damage("swapped", file, replaced(good / FILES[(number + 1) % len(FILES)]))
        before = saved / "checkpoint-1" / file
        if before.read_bytes() != (good / file).read_bytes():
            yield Damage("of another step", "" if file == "manifest.json" else file, replaced(before))
    content = (good / UNIT).read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")  # of the header: the length of its JSON, and the JSON
    for position in (0, 7, 8, size // 4, size - 1):
        yield Damage(f"header {position}", UNIT, flipped(position))
    suffixes = set()
    for name, entry in json.loads(content[8:size]).items():
        first, end = (size + offset for offset in entry["data_offsets"])
        suffix = "" if name.startswith(".padding") else name[name.index("weight") + 6 if "weight" in name else 0 :]
        if suffix not in suffixes or name.startswith(".padding"):
            suffixes.add(suffix)
            tensor = "" if name.startswith(".padding") else f" at {name}:"
            yield Damage(f"{name} first", UNIT, flipped(first), tensor)
            yield Damage(f"{name} last", UNIT, flipped(end - 1), tensor)
    assert suffixes >= {"", ".low", ".exp_avg", ".exp_avg_sq", ".exp_avg_scale", ".exp_avg_sq_scale"}


def resumed_step(folder: Path) -> int:
    """Return the step from which a run with this path as ``resume_from_checkpoint`` goes on."""
    config = {"model_name_or_path": "m", "datasets": "d", "output_dir": "o", "resume_from_checkpoint": str(folder)}
    point, _ = resume.find_resume_point(as_config(config))
    assert point is not None
    return point.step


def messages(folder: Path, model: Any, optimizer: Any) -> list[str]:
    """Return the errors of all readers of a damaged checkpoint."""
    found = []
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(folder, model, optimizer)
    found.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        resumed_step(folder)
    found.append(str(caught.value))
    listed = run("checkpoints", folder.parent)
    assert listed.exit_code == 2
    assert "1 of 2 checkpoints" in listed.stderr
    good, damaged = listed.stdout.splitlines()
    assert good.startswith("checkpoint-1  step 1")
    assert good.endswith("verified")
    assert damaged.startswith("checkpoint-2  DAMAGED: ")
    return [*found, damaged]


def test_every_damage_is_rejected_by_name(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(saved, copy)
    model, optimizer = opened(**OPTIONS, seed=1)
    step(model, optimizer, 7)
    before, generators = digest(model, optimizer), random_state()
    all_damages = list(damages(saved))
    assert len(all_damages) > 80
    for damage in all_damages:
        path = copy / "checkpoint-2" / (damage.file or "manifest.json")
        damage.change(path)
        for message in messages(copy / "checkpoint-2", model, optimizer):
            assert damage.file in message, f"{damage.name}: {message}"
            assert damage.tensor in message, f"{damage.name}: {message}"
        shutil.copyfile(saved / path.relative_to(copy), path)
        assert digest(model, optimizer) == before, damage
        assert random_state() == generators, damage
    assert resumed_step(copy / "checkpoint-2") == 2
    load_checkpoint(copy / "checkpoint-2", model, optimizer)  # the control: undamaged, it is loaded
    assert digest(model, optimizer) != before


def test_an_export_without_all_of_a_weight_is_rejected(saved: Path, tmp_path: Path) -> None:
    """The manifest has the right checksum, but a weight in it lacks its last element."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(saved / "checkpoint-1", copy)
    content = manifest.read_manifest(copy)
    weight = next(each for each in content.tensors if each.tensor in content.dtypes)
    tensors = [replace(each, length=each.length - (each is weight)) for each in content.tensors]
    (copy / "manifest.json").write_bytes(replace(content, tensors=tensors).to_json())
    with pytest.raises(ConfigError, match=f"lacks a part of {re.escape(weight.tensor)}"):
        export_checkpoint(copy, tmp_path / "out")


def test_a_file_that_cannot_be_read_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector, say."""

    def fail(path: Path) -> str:
        if path.name == "block1.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return hash_file(path)

    monkeypatch.setattr(manifest, "hash_file", fail)
    with pytest.raises(ConfigError, match=r"units/block1\.safetensors cannot be read \(Input/output error\)"):
        load_checkpoint(saved / "checkpoint-1", opened(**OPTIONS)[0])
