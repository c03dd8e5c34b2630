"""TRL's trainers train adapters of a streamed model as they train those of a plain one."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import horizon_lm
from horizon_lm.integrations import references
from tests.e2e import tiny
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.trainer import rows
from tests.trainer.test_held_batches import Loads, history

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3
GENERATE = {"num_generations": 2, "max_completion_length": 5}
# The trainer, its arguments, the loads of a block in a step, and those of the reference if it is not precomputed.
# GRPO and RLOO load it once for each of 5 tokens, and for passes without gradients. KTO's KL is one more pass.
TRAINERS: dict[str, tuple[Any, Any, dict[str, Any], float, float]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, {}, 2, 0),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {}, 2, 1),
    "kto": (trl.KTOTrainer, trl.KTOConfig, {}, 3, 2),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {}, 2, 0),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, GENERATE | {"beta": 0.1}, 2 + 5 + 4, 0),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, GENERATE, 2 + 5 + 8, 0),
}


def length_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(sum(map(ord, str(each))) % 7) for each in completions]


def config(kind: str, **settings: Any) -> LoraConfig:
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    return LoraConfig(**({"task_type": task, "r": 4, "lora_alpha": 32, "target_modules": "all-linear"} | settings))


def base(kind: str, folder: Path) -> Any:
    if kind != "reward":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(3)
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)


def with_adapters(kind: str, model: Any) -> Any:
    """Return a model with adapters that are not zero."""
    torch.manual_seed(1)
    model = get_peft_model(model, config(kind))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.02)
    return model


def make(kind: str, cls: Any, model: Any, output: Path, **more: Any) -> Any:
    """Return a trainer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    _, arguments, settings, *_ = TRAINERS[kind]
    given = {
        "output_dir": str(output), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "seed": 7,
        "gradient_accumulation_steps": 4, "save_strategy": "no", "learning_rate": 1e-3, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "bf16": False,
    }  # fmt: skip
    extra = {key: more.pop(key) for key in ("callbacks", "peft_config", "compute_loss_func") if key in more}
    if kind in ("grpo", "rloo"):
        extra["reward_funcs"] = length_reward
    torch.manual_seed(0)
    return cls(
        model=model, args=arguments(**(given | settings | more)), train_dataset=datasets.Dataset.from_list(rows.of_kind(kind)),
        processing_class=tiny.build_tokenizer(), **extra,
    )  # fmt: skip


def adapters(model: Any) -> dict[str, torch.Tensor]:
    """Return the adapters that are trained."""
    return {
        name: value for name, value in copied_weights(model).items() if "lora_" in name or "modules_to_save" in name
    }


CASES = [(kind, source) for kind in TRAINERS for source in ("model", "peft_config")]
CASES += [(kind, f"{source}, reference in each step") for kind in ("dpo", "kto") for source in ("model", "peft_config")]


@pytest.mark.parametrize(("kind", "source"), CASES)
def test_equal_to_plain_peft(tmp_path: Path, kind: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the base, or the adapters that training began with, as TRL takes it."""
    cls, _, _, most_loads, of_reference = TRAINERS[kind]
    if "each" in source:  # as for rows that are not in memory
        monkeypatch.setattr(references, "prepare_reference", lambda arguments: None)
        most_loads += of_reference
    folder = tiny.save_model(tmp_path / "model")
    plain, streamed = base(kind, folder), base(kind, folder)
    more: dict[str, Any] = {}
    if "model" in source:
        plain, streamed = with_adapters(kind, plain), with_adapters(kind, streamed)
    else:
        more["peft_config"] = config(kind)
    streamed = horizon_lm.stream(streamed, precision="float32")
    trained = []
    for each, trainer, output in ((plain, cls, "plain"), (streamed, horizon_lm.trainer(cls), "streamed")):
        loads = Loads(streamed)
        trained.append(
            make(kind, trainer, each, tmp_path / output, **more, callbacks=[loads] if each is streamed else [])
        )
        trained[-1].train()
    lines = [[{k: round(v, 6) for k, v in line.items()} for line in history(each)] for each in trained]
    assert difference(*lines, 1e-5) is None
    assert difference(*[adapters(each.model) for each in trained], 1e-5) is None
    assert set(loads.counts) == {most_loads}
    assert all(line["grad_norm"] > 0 for line in lines[0] if "grad_norm" in line)


def test_switches_do_not_leak_between_losses(tmp_path: Path) -> None:
    """Each loss of a step sees its own switches, although all of them wait for each other."""
    seen: list[int] = []

    class Switching(trl.SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            first = len(seen) % 2 == 0
            seen.append(len(seen))
            before = model.active_adapter
            with torch.no_grad():
                if first:
                    model.set_adapter("other")
                    values = model(input_ids=inputs["input_ids"]).logits
                    model.set_adapter(before)
                else:
                    with model.disable_adapter():
                        values = model(input_ids=inputs["input_ids"]).logits
            assert model.active_adapter == "default"
            return super().compute_loss(model, inputs, *args, **kwargs) + values.float().pow(2).mean()

    folder = tiny.save_model(tmp_path / "model")
    trained = []
    for streams in (False, True):
        model = with_adapters("sft", base("sft", folder))
        torch.manual_seed(5)
        model.add_adapter("other", config("sft", r=2, init_lora_weights=False))
        model = horizon_lm.stream(model, precision="float32") if streams else model
        trained.append(
            make("sft", horizon_lm.trainer(Switching) if streams else Switching, model, tmp_path / str(streams))
        )
        trained[-1].train()
    assert difference(*map(history, trained), 1e-5) is None
    assert difference(*[adapters(each.model) for each in trained], 1e-5) is None
