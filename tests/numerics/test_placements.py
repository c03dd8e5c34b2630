"""The bits of a training do not depend on what lies where, and when it moves: random settings, devices and resumes of one training."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import horizon_lm
from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.device.simulated import SimulatedDevice
from tests.support.planned_bytes import ELEMENTWISE
from tests.support.threaded_device import ThreadedDevice
from tests.support.tiny_models import FAMILIES, MOE_WITH_AUXILIARY_LOSS, batch, build

CASES = 5
# A CPU computes the end of all rows by another function than the rest, so experts have the width of whole vectors.
WIDTH = 64
MIXTURES = [*MOE_WITH_AUXILIARY_LOSS, "deepseek_v3"]


@dataclass(frozen=True)
class Training:
    """All that decides on the numbers of a training.

    Attributes:
        family: the model.
        is_adapted: it has LoRA's adapters, which alone are trained.
        frozen: part of the names of its parameters that are frozen; None for none of them.
        streaming: settings of `stream`.
        optimizer: name of the optimizer.
        hyperparameters: its settings.
        batches: the batches of each step.
    """

    family: str
    is_adapted: bool
    frozen: str | None
    streaming: dict[str, Any]
    optimizer: str
    hyperparameters: dict[str, Any]
    batches: list[list[dict[str, torch.Tensor]]]

    @property
    def can_be_cut(self) -> bool:
        """Experts can be streamed in tiles."""
        return self.family in MIXTURES and self.optimizer != "Muon"

    @property
    def can_update_in_backward(self) -> bool:
        """Gradients need not be kept."""
        clips = "max_grad_norm" in self.hyperparameters
        return self.optimizer != "Muon" and not clips and all(len(each) == 1 for each in self.batches)


def draw_training(r: random.Random) -> Training:
    hyperparameters: dict[str, Any] = {
        "lr": 1e-2,
        "weight_decay": r.choice([0.0, 0.1]),
        "moments": r.choice(["float32", "bfloat16", "8bit"]),
    }
    if r.random() < 0.3:
        hyperparameters["max_grad_norm"] = 0.5
    is_adapted = r.random() < 0.25
    calls = r.choice([1, 1, 2, 3])
    steps = range(r.choice([2, 3]))
    return Training(
        family=r.choice([*FAMILIES, *MIXTURES]),
        is_adapted=is_adapted,
        frozen=None if is_adapted else r.choice([None, None, "layers.0", "norm", "embed"]),
        streaming={
            "precision": r.choice(["float32", "fp32_master", "bf16"]),
            "head": r.choice(["whole", "chunked"]),
            "grad_dtype": r.choice([None, torch.float32, torch.bfloat16]),
            "device_micro_batch_size": r.choice([None, 1, 2]),
        },
        optimizer=r.choice(ELEMENTWISE if is_adapted else ["AdamW", *(each.name for each in OPTIMIZERS.values())]),
        hyperparameters=hyperparameters,
        batches=[[draw_batch(r) for _ in range(calls)] for _ in steps],
    )


def draw_batch(r: random.Random) -> dict[str, torch.Tensor]:
    rows, length = r.choice([1, 2, 4]), r.choice([2, 5, 11])
    return batch(rows, length, r.choice(["left", "right", "none"]) if length > 5 else "none", seed=r.randrange(10**6))


def draw_placement(r: random.Random, training: Training) -> dict[str, Any]:
    """Return settings of `stream` that do not change a number."""
    placement: dict[str, Any] = {
        "device": r.choice(
            [
                "cpu",
                SimulatedDevice(r.randrange(99), eagerness=r.choice([None, 0.0, 0.9]), pieces=r.choice([1, 3])),
                ThreadedDevice(delay=0.0),
            ]
        ),
        "activation_checkpoints": r.choice(["device", "host", 1]),
    }
    if r.random() < 0.5:
        placement |= {"resident_blocks": r.choice([1, 2, 3]), "resident_graphs": r.choice([0, 1])}
    if training.can_be_cut:
        placement["expert_tile"] = r.choice([None, 1, 2, 3])
    return placement


def open_model(training: Training, placement: dict[str, Any], in_backward: bool) -> tuple[Any, Any]:
    widths = {"intermediate_size": WIDTH, "moe_intermediate_size": WIDTH} if training.family in MIXTURES else {}
    model = build(training.family, **widths)
    if training.is_adapted:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules="all-linear")
        model = peft.get_peft_model(model, lora)
    if training.frozen is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(training.frozen not in name)
    model = horizon_lm.stream(model.train(), **training.streaming, **placement)
    optimizer = getattr(horizon_lm, training.optimizer)
    return model, optimizer(model, **training.hyperparameters, **({"update_in_backward": True} if in_backward else {}))


def train(training: Training, r: random.Random | None, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of a training, and all that a checkpoint of its end has, with random placements unless ``r`` is None."""

    def placement() -> dict[str, Any]:
        return {"device": "cpu"} if r is None else draw_placement(r, training)

    in_backward = r is not None and training.can_update_in_backward and r.random() < 0.5
    model, optimizer = open_model(training, placement(), in_backward)
    torch.manual_seed(1)
    losses = []
    for batches in training.batches:
        for each in batches:
            loss = model(**each).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if r is not None and r.random() < 0.3:
            horizon_lm.save_checkpoint(folder / "checkpoint", model, optimizer)
            model, optimizer = open_model(training, placement(), in_backward)
            horizon_lm.load_checkpoint(folder / "checkpoint", model, optimizer)
    horizon_lm.save_checkpoint(folder / "end", model, optimizer)
    files = (folder / "end").rglob("*.safetensors")
    return losses, {f"{file.name} {name}": value for file in files for name, value in load_file(file).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


# PEFT warns of its own settings for some models.
@pytest.mark.filterwarnings("ignore:(The following|fan_in_fan_out):Warning")
@pytest.mark.parametrize(
    "seed", [*range(CASES), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(CASES, 300))]
)
def test_bits_do_not_depend_on_placement(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="needs the whole installation")
    r = random.Random(seed)
    training = draw_training(r)
    losses, expected = train(training, None, tmp_path / "plain")
    other_losses, other = train(training, r, tmp_path / "placed")
    assert other_losses == losses
    assert expected
    assert other.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(bits(other[name]), bits(value))]
    assert not different
