"""Law: a run that is interrupted and resumed ends in the same bits, the same metrics and the same output.

The rows are the optimizers, objectives and packing strategies of the registries, and features of runs with each precision and kind of
moments.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from horizon_lm.common.optimizers import MOMENT_BYTES, OPTIMIZERS
from horizon_lm.memory.precision import PRECISIONS
from horizon_lm.runs.config import SCHEMAS, SftConfig
from tests.e2e import tiny
from tests.e2e.resuming import LogTheFifth, Runs, as_dpo, assert_resumes

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT saves embeddings whose adapters are trained
IN_BACKWARD = {"update_in_backward": True, "max_grad_norm": 0}
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
QLORA = LORA | {"lora_target_modules": ["q_proj", "up_proj"], "load_in_4bit": True}
FEATURES: dict[str, dict[str, Any]] = {
    "packing, weight decay": {"packing": True, "max_length": 48, "weight_decay": 0.1},
    "adapters": LORA,
    "in backward": IN_BACKWARD,
    "some weights, small batches": {
        "trainable": "model.layers.1", "gradient_accumulation_steps": 2, "device_micro_batch_size": 2,
    },
    "epochs": {"max_steps": -1, "num_train_epochs": 2.0, "lr_scheduler_type": "linear", "non_finite": "skip"},
    "a mixture of rows": {"mixture": True, "lr_scheduler_type": "constant_with_warmup"},
    "callbacks": {"callback": True, "lr_scheduler_type": "polynomial", "warmup_steps": 3},
    "a 4-bit base": QLORA | {"use_bnb_nested_quant": True},
    "noise on embeddings": {"neftune_noise_alpha": 5.0},
    "DoRA": LORA | {"use_dora": True},
    "a copy of the embedding": LORA | {"lora_modules_to_save": ["embed_tokens", "lm_head"]},
    "an adapter of the embedding": LORA | IN_BACKWARD | {"lora_target_modules": ["q_proj", "embed_tokens"]},
    "adapters, small batches": LORA | {"gradient_accumulation_steps": 2, "device_micro_batch_size": 2},
    "a plain 4-bit base": QLORA,
    "whole head": {"head": "whole", "packing": True},
}  # fmt: skip
SLOW = ("DoRA", "a copy of the embedding", "adapters, small batches", "a plain 4-bit base", "whole head", "sft")
MODES = [{"precision": precision, "moments": moments} for precision in PRECISIONS for moments in MOMENT_BYTES]


def rows() -> dict[str, dict[str, Any]]:
    """Return the settings of a run by name; precisions and kinds of moments in turn."""
    packing = SftConfig.model_fields["packing_strategy"]
    settings = {f"optim: {name}": {"optim": name} for name in OPTIMIZERS}
    settings |= {objective: {"objective": objective} for objective in SCHEMAS}
    settings |= {
        f"packing: {each}": {"packing": True, "packing_strategy": each} for each in get_args(packing.annotation)
    }
    settings |= FEATURES
    return {name: MODES[number % len(MODES)] | each for number, (name, each) in enumerate(settings.items())}


ROWS = rows()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ROWS])
def test_a_resumed_run_is_exact(
    runs: Runs, base: dict[str, Any], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen = base | ROWS[name]
    if chosen["objective"] == "dpo":
        chosen = as_dpo(chosen, tmp_path)
    if chosen["objective"] == "pretrain":
        chosen |= {"datasets": str(tiny.write_jsonl(tmp_path / "texts.jsonl", texts(14)))}
        del chosen["sample_prompts"], chosen["sample_steps"], chosen["sample_max_new_tokens"]
    if chosen.pop("mixture", False):
        more = tiny.write_jsonl(tmp_path / "more.jsonl", texts(7))
        chosen |= {"datasets": [*base["datasets"], {"path": str(more), "weight": 0.5}], "train_on": "all"}
    make: Callable[[], dict[str, Any]] = dict
    if chosen.pop("callback", False):
        make = lambda: {"callbacks": [LogTheFifth()]}  # noqa: E731
    assert_resumes(runs, chosen, tmp_path, (1, 4), make)


def texts(count: int) -> list[dict[str, str]]:
    return [{"text": f"The rain comes on night {number}."} for number in range(count)]


def test_each_precision_is_resumed_with_each_kind_of_moments() -> None:
    found = {(row["precision"], row["moments"]) for name, row in ROWS.items() if name not in SLOW}
    assert found == {(precision, moments) for precision in PRECISIONS for moments in MOMENT_BYTES}
