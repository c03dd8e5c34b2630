"""A trainer that is given a model by name opens it streamed, by the same arguments, and trains as one with a plain model."""

import importlib
from pathlib import Path
from typing import Any

import datasets
import pytest
from accelerate.state import AcceleratorState
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaForCausalLM, LlamaForSequenceClassification

import horizon_lm
from horizon_lm.errors import ConfigError
from tests.e2e import tiny
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support.thinned_cases import without
from tests.support.trainer_runs import history
from tests.trainer import rows

pytestmark = pytest.mark.filterwarnings("ignore")
TRAINERS = {  # the module of the trainer, its name, and its rows
    "sft": ("trl", "SFT", "sft"),
    "dpo": ("trl", "DPO", "dpo"),
    "reward": ("trl", "Reward", "reward"),
    "orpo, which loads by an Auto class": ("trl.experimental.orpo", "ORPO", "dpo"),
}


def made(name: str, folder: Path, output: Path, streamed: bool = True, **more: Any) -> Any:
    """Return a trainer that is given the model's folder. Settings that are no arguments of training go to the trainer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    module, kind, data = TRAINERS[name]
    cls, config = (getattr(importlib.import_module(module), f"{kind}{each}") for each in ("Trainer", "Config"))
    settings = {
        "output_dir": str(output), "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    given = {key: more.pop(key) for key in ("peft_config", "quantization_config") if key in more}
    return (horizon_lm.trainer(cls) if streamed else cls)(
        model=str(folder), args=config(**settings | more), processing_class=tiny.build_tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows.of_kind(data)), **given,
    )  # fmt: skip


def precision(trainer: Any) -> str:
    name: str = trainer.model._horizon.engine.store.precision.name
    return name


@pytest.mark.parametrize("name", without(TRAINERS, {"dpo"}))
def test_equal_to_a_plain_model_of_the_same_name(tmp_path: Path, name: str) -> None:
    folder = tiny.save_model(tmp_path / "model")
    plain, streamed = (made(name, folder, tmp_path / str(each), each) for each in (False, True))
    assert precision(streamed) == "float32"  # the dtype of TRL's default, and of the folder
    for each in (plain, streamed):
        each.train()
    assert difference(history(plain), history(streamed), 5e-5) is None
    assert difference(copied_weights(plain.model), copied_weights(streamed.model), 5e-5) is None
    expected = LlamaForSequenceClassification if name == "reward" else LlamaForCausalLM
    assert isinstance(streamed.model, expected)
    assert name != "reward" or streamed.model.config.num_labels == 1


def test_the_arguments_of_the_trainer_are_those_of_the_model(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    chosen = {"dtype": "bfloat16", "attn_implementation": "eager", "use_cache": False}
    trainer = made("sft", folder, tmp_path, model_init_kwargs=chosen)
    assert precision(trainer) == "fp32_master"
    assert trainer.model.config._attn_implementation == "eager"
    assert not trainer.model.config.use_cache
    assert precision(made("sft", folder, tmp_path, model_init_kwargs={"dtype": "auto"})) == "float32"
    assert precision(made("sft", folder, tmp_path, model_init_kwargs={"precision": "bf16"})) == "bf16"
    with pytest.raises(ConfigError, match=r"variant='fp16' is not supported by a streamed model"):
        made("sft", folder, tmp_path, model_init_kwargs={"variant": "fp16"})


def test_a_quantized_base_is_opened_by_the_argument_of_the_trainer(tmp_path: Path) -> None:
    trainer = made(
        "sft", tiny.save_model(tmp_path / "model"), tmp_path, peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"),
        quantization_config=BitsAndBytesConfig(load_in_4bit=True),
    )  # fmt: skip
    assert trainer.model._horizon.engine.store.codecs
    trainer.train()
