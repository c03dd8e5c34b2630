"""TRL's trainers go on from their checkpoints as if they had not been interrupted."""

from pathlib import Path
from typing import Any

import pytest

import horizon_lm
from tests.e2e import tiny
from tests.support.thinned_cases import thinned
from tests.support.trainer_runs import require_resumes
from tests.support.trl_trainers import TRAINERS, make

NAMES = ["sft packed", "sft neftune", "dpo with a reference", "rloo", "kto", "grpo with a reference"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", thinned(NAMES, every=4, keep=["grpo with a reference"]))
def test_resume_in_mid_epoch_is_bit_exact(tmp_path: Path, name: str) -> None:
    """After two of four steps; an epoch has three. Noise and generated tokens are those of the whole run, too."""
    folder, cls = tiny.save_model(tmp_path / "model"), horizon_lm.trainer(TRAINERS[name][0])

    def run(output: str, resume: bool = False, **more: Any) -> Any:
        model = horizon_lm.from_pretrained(folder, "cpu", "fp32_master")
        trainer = make(name, cls, model, tmp_path / output, save_strategy="steps", save_steps=2, max_steps=4, **more)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    require_resumes(run)
