"""TRL's trainers, with and without the class that `horizon_lm.trainer` makes of them."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import horizon_lm
from tests.e2e import tiny
from tests.seams.seam import REJECTED, Case, row
from tests.seams.use import copied_weights

SECTION = "Trainers"


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of a tiny model, from which TRL opens a reference."""
    made = tempfile.TemporaryDirectory()
    tiny.save_model(Path(made.name))
    return made


CASE = {"": Case(build=lambda: AutoModelForCausalLM.from_pretrained(folder().name, dtype=torch.float32))}


def trained(model: Any, name: str, *, second_line: bool = True) -> list[Any]:
    """Train with a trainer of `tests.trainer.test_trainers`, and return the logged figures and the weights."""
    from tests.support.trainer_runs import history
    from tests.support.trl_trainers import TRAINERS, make

    cls = TRAINERS[name][0]
    if hasattr(model, "_horizon") and second_line:
        cls = horizon_lm.trainer(cls)
    with tempfile.TemporaryDirectory() as output:
        trainer = make(name, cls, model, Path(output), max_steps=3)
        trainer.train()
    figures = [{key: round(value, 6) for key, value in line.items()} for line in history(trainer)]
    return [figures, copied_weights(model)]


@row("trl.sft", SECTION, "`horizon_lm.trainer(SFTTrainer)`, packed", cases=CASE)
def sft(model: Any) -> Any:
    return trained(model, "sft packed")


@row("trl.dpo", SECTION, "`horizon_lm.trainer(DPOTrainer)`", cases=CASE)
def dpo(model: Any) -> Any:
    return trained(model, "dpo with a reference")


@row("trl.kto", SECTION, "`horizon_lm.trainer(KTOTrainer)`", cases=CASE)
def kto(model: Any) -> Any:
    return trained(model, "kto")


@row("trl.grpo", SECTION, "`horizon_lm.trainer(GRPOTrainer)`, with a reference", cases=CASE)
def grpo(model: Any) -> Any:
    return trained(model, "grpo with a reference")


@row("trl.rloo", SECTION, "`horizon_lm.trainer(RLOOTrainer)`", cases=CASE)
def rloo(model: Any) -> Any:
    return trained(model, "rloo")


@row(
    "trl.without-the-second-line",
    SECTION,
    "`SFTTrainer(model)` without `horizon_lm.trainer`",
    REJECTED,
    cases=CASE,
    survives=False,
)
def sft_without_the_second_line(model: Any) -> Any:
    return trained(model, "sft packed", second_line=False)
