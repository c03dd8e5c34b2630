"""Models that a trainer evaluates beside the trained one are streamed, too, with the values of plain ones."""

import importlib
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
)

import horizon_lm
from horizon_lm.errors import DoesNotFitError
from horizon_lm.integrations.evaluated_models import stream_beside
from tests.e2e import tiny
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support import tiny_models
from tests.support.limited_device import LimitedDevice
from tests.support.thinned_cases import without
from tests.support.trainer_runs import history, train
from tests.support.trl_trainers import length_reward
from tests.trainer import rows

pytestmark = pytest.mark.filterwarnings("ignore")
ONLINE = {"max_completion_length": 4}
GROUPS = ONLINE | {"num_generations": 2}
SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1}
DISTILLED = "completion"  # rows: a prompt and its completion
# The module of the trainer, its name, its settings, the models that it is given or loads by name, and its rows.
TRAINERS: dict[str, tuple[str, str, dict[str, Any], dict[str, str], str]] = {
    "dpo": ("trl", "DPO", {}, {"ref_model": "model"}, "dpo"),
    "kto": ("trl", "KTO", {}, {"ref_model": "model"}, "kto"),
    "kto, a reference that follows": ("trl", "KTO", SYNC, {}, "kto"),
    "dpo of a callback": ("trl.experimental.bema_for_ref_model.dpo_trainer", "DPO", {}, {"ref_model": "model"}, "dpo"),
    "grpo, a reward model": ("trl", "GRPO", GROUPS, {"reward_funcs": "reward"}, "grpo"),
    "grpo, its name": ("trl", "GRPO", GROUPS, {"reward_funcs": "name of reward"}, "grpo"),
    "rloo": ("trl", "RLOO", GROUPS | {"beta": 0.1}, {"reward_funcs": "reward"}, "rloo"),
    "distillation": ("trl", "Distillation", ONLINE, {"teacher_model": "teacher"}, DISTILLED),
    "distillation, its name": ("trl", "Distillation", ONLINE | {"beta": 0.0}, {"teacher_model": "name of teacher"}, DISTILLED),
    "distillation, mixed": ("trl", "Distillation", ONLINE | {"beta": 0.3, "temperature": 0.7}, {"teacher_model": "teacher"}, DISTILLED),
    "distillation, adapters": ("trl", "Distillation", ONLINE, {"teacher_model": "teacher", "peft_config": "adapters"}, DISTILLED),
    "gkd": ("trl.experimental.gkd", "GKD", {"max_new_tokens": 4}, {"teacher_model": "teacher"}, "sft"),
    "gkd, its name": ("trl.experimental.gkd", "GKD", {"max_new_tokens": 4}, {"teacher_model": "name of teacher"}, "sft"),
    "online dpo": ("trl.experimental.online_dpo", "OnlineDPO", {"max_new_tokens": 4}, {"reward_funcs": "reward"}, "grpo"),
    "a2po": ("trl.experimental.a2po.a2po_trainer", "A2PO", ONLINE, {"reward_funcs": "function"}, "grpo"),
    "sdft": ("trl.experimental.sdft", "SDFT", ONLINE | {"num_generations": 1}, {}, "sdft"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, a teacher and a reward model, which share a tokenizer."""
    made = tmp_path_factory.mktemp("models")
    tiny.save_model(made / "model")
    tokenizer = tiny.build_tokenizer()
    for name, auto in (("teacher", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        config = tiny.build_model(len(tokenizer)).config
        config.num_labels = 1
        torch.manual_seed(3)
        auto.from_config(config).save_pretrained(made / name)
        tokenizer.save_pretrained(made / name)
    return made


def rows_of(kind: str) -> list[dict[str, Any]]:
    if kind == DISTILLED:
        return [{"prompt": rows.question(n), "completion": rows.answer("It waits. ", n)} for n in range(12)]
    if kind == "sdft":
        return [{"prompt": rows.question(n), "privileged_context": f"Keeper {n}"} for n in range(12)]
    return rows.of_kind(kind, 12)


def given_models(folder: Path, models: dict[str, str]) -> dict[str, Any]:
    """Return arguments of a trainer: plain models, or their names."""
    made: dict[str, Any] = {}
    for argument, name in models.items():
        if name.startswith("name of"):
            made[argument] = str(folder / name.removeprefix("name of "))
        elif name == "adapters":
            made[argument] = LoraConfig(r=4, task_type="CAUSAL_LM")
        elif name == "function":
            made[argument] = length_reward
        else:
            auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
            made[argument] = auto.from_pretrained(folder / name, dtype=torch.float32)
    if models.get("reward_funcs") == "reward":
        made["reward_processing_classes"] = tiny.build_tokenizer()
    return made


def trained(name: str, folder: Path, output: Path, streamed: bool) -> Any:
    """Train with one of `TRAINERS`, and return the trainer."""
    module, kind, settings, models, data = TRAINERS[name]
    cls = getattr(importlib.import_module(module), f"{kind}Trainer")
    config = getattr(
        importlib.import_module("trl" if "bema" in module else module.replace("_trainer", "_config")), f"{kind}Config"
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    given = {
        "output_dir": str(output), "max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if streamed:
        model, cls = horizon_lm.stream(model, "cpu", "float32"), horizon_lm.trainer(cls)
    trainer = cls(
        model=model, args=config(**given | settings), processing_class=tiny.build_tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows_of(data)), **given_models(folder, models),
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.train()
    return trainer


SLOW = set(TRAINERS) - {"kto, a reference that follows", "dpo", "gkd, its name", "online dpo", "distillation, mixed"}


@pytest.mark.parametrize("name", without(TRAINERS, SLOW))
def test_equal_to_plain_models(folder: Path, tmp_path: Path, name: str) -> None:
    plain, streamed = (trained(name, folder, tmp_path / str(each), each) for each in (False, True))
    assert difference(history(plain), history(streamed), 5e-5) is None
    assert difference(copied_weights(plain.model), copied_weights(streamed.model), 5e-5) is None
    lists = [value if isinstance(value, list) else [value] for value in vars(streamed).values()]
    modules = [each for values in lists for each in values if isinstance(each, nn.Module)]
    assert len({id(each) for each in modules}) == 2 + (name in ("rloo", "online dpo"))  # these have a reference, too
    assert all(hasattr(each, "_horizon") for each in modules)


def encoder() -> Any:
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    return BertForSequenceClassification(config)


def test_a_model_that_cannot_be_streamed_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    trained, model = horizon_lm.stream(tiny_models.build("llama"), "cpu", "float32"), encoder()
    stream_beside(model, trained)
    printed = capsys.readouterr().out
    assert "BertForSequenceClassification is evaluated in the training as a whole on the device, " in printed
    assert "it is not streamed: BertForSequenceClassification has neither" in printed
    assert not hasattr(model, "_horizon")
    short = horizon_lm.stream(tiny_models.build("llama"), LimitedDevice(10_000), "float32")
    with pytest.raises(DoesNotFitError, match=r"on the device, which has .* left; it is not streamed: Bert"):
        stream_beside(model, short)


@pytest.mark.parametrize(
    ("policy", "dtype", "kept"),
    [
        ("float32", torch.float32, "float32"),
        ("float32", torch.bfloat16, "bf16"),
        ("fp32_master", torch.float32, "bf16"),
    ],
)
def test_no_bits_are_kept_that_the_policy_would_round(policy: str, dtype: torch.dtype, kept: str) -> None:
    trained, model = horizon_lm.stream(tiny_models.build("llama"), "cpu", policy), tiny_models.build("llama").to(dtype)
    stream_beside(model, trained)
    assert model._horizon.engine.store.precision.name == kept
    assert not any(param.requires_grad for param in model.parameters())


@pytest.mark.parametrize("evaluates", [True, False])
def test_evaluated_models_take_their_buffers_before_others_are_planned(tmp_path: Path, evaluates: bool) -> None:
    """Otherwise resident blocks of the trained model would take all memory of the device."""
    device = LimitedDevice(2**20)
    trained, evaluated = (horizon_lm.stream(tiny_models.build("llama"), device, "float32") for _ in range(2))
    taken: list[int] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            taken.append(device.counters.allocated_total)

    class Distilled(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if evaluates:
                self.teacher = self.accelerator.prepare_model(evaluated, evaluation_mode=True)

    train(horizon_lm.trainer(Distilled), trained, tmp_path, callbacks=[Watch()], max_steps=1, eval_strategy="no")
    assert [num_bytes > 0 for num_bytes in taken] == [evaluates]
