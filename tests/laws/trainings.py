"""Tiny trainings, which the laws are about: one for each optimizer, precision, kind of moments, family and kind of model.

The rows come from the registries, so that a new entry is in each law without a line here.
"""

import hashlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.optimizers import MOMENT_BYTES, OPTIMIZERS, OptimizerEntry
from horizon_lm.memory.precision import PRECISIONS
from tests.support import tiny_models
from tests.support.expert_models import EXPERTS, NAMES
from tests.support.float32_llama import float32_llama

Outcome = dict[str, str]
Folders = Callable[[str, str], Path]  # writes a folder of quantized weights once, by family and format

IN_FLOAT32 = "weights in float32"
QUANTIZED = {
    "4bit": "llama",
    "nf4": "llama",
    "nested": "qwen2",
    "mxfp4": "gpt_oss",
    "fp8": "qwen3_moe",
    "int4": "deepseek_v3",
}
"""A family for each format of quantized weights, by the names of `tests/support/quantized_folders.py`; ``4bit`` is quantized while it is read."""
TILED = tuple(NAMES)
# A CPU computes the end of all rows by another function than the rest, so experts have the width of whole vectors.
_WIDTHS = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 64)


def _family(name: str) -> Any:
    # Eight experts are three tiles of three, so that each block begins in the other slot.
    return tiny_models.build(name, **({NAMES[name]: EXPERTS} | _WIDTHS if name in TILED else {}))


def _partly_frozen(part: str) -> Any:
    model = tiny_models.build("llama")
    for name, param in model.named_parameters():
        param.requires_grad_(part not in name)
    return model


def _adapted(model: Any, **config: Any) -> Any:
    """Return a model with adapters that are not zero, the same each time."""
    peft = pytest.importorskip("peft", reason="needs the whole installation")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | config
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied embeddings
        return peft.get_peft_model(model, peft.LoraConfig(**settings))


_ATTENTION = ["q_proj", "v_proj"]
_OF_EXPERTS = {"target_modules": _ATTENTION, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "adapters": lambda: _adapted(tiny_models.build("llama")),
    "DoRA": lambda: _adapted(tiny_models.build("llama"), use_dora=True),
    "adapters of experts": lambda: _adapted(_family("qwen3_moe"), **_OF_EXPERTS),
    "an adapter of the embedding": lambda: _adapted(
        tiny_models.build("llama", tie_word_embeddings=True), target_modules=[*_ATTENTION, "embed_tokens", "lm_head"]
    ),
    "a copy of the embedding": lambda: _adapted(
        tiny_models.build("llama"), target_modules=_ATTENTION, modules_to_save=["embed_tokens"]
    ),
    "trained tokens": lambda: _adapted(
        tiny_models.build("llama"), target_modules=_ATTENTION, trainable_token_indices=[40, 1, 7, 22]
    ),
}
MODELS: dict[str, Callable[[], Any]] = {
    **{family: partial(_family, family) for family in tiny_models.FAMILIES},
    "tied": lambda: tiny_models.build("llama", tie_word_embeddings=True),
    "a frozen block": lambda: _partly_frozen("layers.1."),
    "a frozen embedding": lambda: _partly_frozen("embed_tokens"),
    IN_FLOAT32: lambda: tiny_models.build("llama"),
    **ADAPTERS,
}


@dataclass(frozen=True)
class Training:
    """All that decides on the numbers of a training.

    Attributes:
        model: a name in `MODELS`, or a format in `QUANTIZED`, whose model has adapters.
        entry: the optimizer.
        precision, moments: of weights and of the optimizer's moments.
        settings: further settings of `stream` that change the rounding.
        clips: gradients are clipped.
        calls: backward passes of a step.
    """

    model: str = "llama"
    entry: OptimizerEntry = OPTIMIZERS["adamw"]
    precision: str = "float32"
    moments: str = "float32"
    settings: Mapping[str, Any] = field(default_factory=dict)
    clips: bool = False
    calls: int = 1

    def __str__(self) -> str:
        return ", ".join(
            [self.model, self.entry.name, self.precision, f"{self.moments} moments", *["clips"] * self.clips]
        )

    @property
    def is_adapted(self) -> bool:
        """Adapters alone are trained."""
        return self.model in ADAPTERS or self.model in QUANTIZED

    @property
    def can_be_cut(self) -> bool:
        """Experts can be streamed in tiles."""
        family = QUANTIZED.get(self.model, self.model)
        return family in (*TILED, "adapters of experts") and not self.entry.orthogonalizes

    @property
    def can_update_in_backward(self) -> bool:
        return self.entry.updates_in_backward and not self.clips and self.calls == 1


def of_optimizers(keep: Iterable[str] = ("float32", "fp32_master", "bf16")) -> list[Any]:
    """Return a training with each optimizer in each precision, and with each kind of moments; other pairs of both are slow."""
    rows = []
    for shift, entry in enumerate(OPTIMIZERS.values()):
        for (at, precision), (place, moments) in itertools.product(enumerate(PRECISIONS), enumerate(MOMENT_BYTES)):
            training = Training("llama", entry, precision, moments, clips=at == 1)
            runs = precision in keep and (at + shift) % len(MOMENT_BYTES) == place
            rows.append(pytest.param(training, id=str(training), marks=[] if runs else pytest.mark.slow))
    return rows


_LIKE_LLAMA = tiny_models.FAMILIES.keys() - {*TILED, "gpt2", "gemma2"}  # nothing but their blocks differs


def of_models() -> list[Any]:
    """Return a training of each model, with precisions and kinds of moments in turn; families that are much like Llama are slow."""
    names = [name for name in (*MODELS, *QUANTIZED) if name != "llama"]  # which is a row of each optimizer
    modes = itertools.cycle(itertools.product(PRECISIONS, MOMENT_BYTES))
    trainings = [Training(name, OPTIMIZERS["adamw"], *mode) for name, mode in zip(names, modes, strict=False)]
    return [
        pytest.param(training, id=str(training), marks=[pytest.mark.slow] * (training.model in _LIKE_LLAMA))
        for training in trainings
    ]


def drawn(seed: int) -> Training:
    """Return a training with random settings."""
    r = random.Random(seed)
    entry = r.choice(list(OPTIMIZERS.values()))
    return Training(
        model=r.choice(
            [*MODELS, *TILED] if entry.updates_in_backward else [name for name in MODELS if name not in ADAPTERS]
        ),
        entry=entry,
        precision=r.choice(list(PRECISIONS)),
        moments=r.choice(list(MOMENT_BYTES)),
        settings={
            "head": r.choice(["whole", "chunked"]),
            "grad_dtype": r.choice([None, torch.float32, torch.bfloat16]),
            "device_micro_batch_size": r.choice([None, 1, 2]),
        },
        clips=r.random() < 0.3,
        calls=r.choice([1, 1, 2, 3]),
    )


def open_training(
    training: Training, folders: Folders, device: Any = "cpu", in_backward: bool = False, **placement: Any
) -> tuple[Any, Any]:
    """Return the streamed model and the optimizer of a training. ``placement``: settings of `stream` that change no bit."""
    options = {"device": device, "precision": training.precision, **training.settings, **placement}
    if training.model in QUANTIZED:
        model = adapted_base(training.model, folders, **options)
    else:
        with float32_llama() if training.model == IN_FLOAT32 else nullcontext():
            model = horizon_lm.stream(MODELS[training.model](), **options)
    hyper: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "moments": training.moments}
    hyper |= {"max_grad_norm": 0.5} if training.clips else {}
    hyper |= {"update_in_backward": True} if in_backward else {}
    return model.train(), getattr(horizon_lm, training.entry.name)(model, **hyper)


def adapted_base(kind: str, folders: Folders, **options: Any) -> Any:
    """Return a streamed model whose base has a format of quantized weights, with adapters."""
    options |= {"load_in_4bit": True} if kind == "4bit" else {}
    model = horizon_lm.from_pretrained(folders(QUANTIZED[kind], kind), **options)
    return _adapted(model, target_modules=["o_proj"])


def train(training: Training, model: Any, optimizer: Any, steps: Iterable[int]) -> list[float]:
    """Run steps, with an evaluation between the passes of each. Return all losses."""
    losses = []
    for number in steps:
        torch.manual_seed(number)
        for call in range(training.calls):
            batch = tiny_models.batch(
                rows=3 + call, padding=("right", "none", "left")[number % 3], seed=number + 20 * call
            )
            loss = model(**batch).loss
            with torch.no_grad():
                losses.append(model(**tiny_models.batch(rows=2, length=7, seed=50 + number)).loss.item())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def engine_of(model: Any) -> Any:
    return model._horizon.engine


def state_of(model: Any, optimizer: Any) -> Outcome:
    """Return hashes of all that a training changes: masters, moments with their scales and counts, and buffers."""
    horizon_lm.synchronize(model)
    store = engine_of(model).store
    found = {name: store.master(name) for name in store.unit_of if name not in store.codecs}
    found |= dict(model.named_buffers())
    for param, state in optimizer.state_dict()["state"].items():
        found |= {f"{param}.{key}": value for key, value in state.items()}
    return {name: hash_of(value) for name, value in found.items()} | {"steps": str(optimizer.num_steps)}


def hash_of(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()
