"""TRL's trainers train a streamed model as they train a plain one, in the settings that people choose."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

import horizon_lm
from horizon_lm.errors import ConfigError, StreamingError
from tests.e2e import tiny
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support.thinned_cases import thinned
from tests.support.trainer_runs import Loads, history
from tests.support.trl_trainers import TRAINERS, make


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def streamed(folder: Path) -> Any:
    return horizon_lm.from_pretrained(folder, "cpu", "float32")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", thinned(TRAINERS, every=2))
def test_equal_to_the_plain_model(tmp_path: Path, name: str) -> None:
    folder, cls = tiny.save_model(tmp_path / "model"), TRAINERS[name][0]
    models, trained = {"plain": plain(folder), "streamed": streamed(folder)}, {}
    loads = Loads(models["streamed"])
    for kind, model in models.items():
        more: dict[str, Any] = {"callbacks": [loads]} if kind == "streamed" else {}
        if name.startswith("dpo"):
            more["ref_model"] = (plain if kind == "plain" else streamed)(folder)
        trained[kind] = make(name, cls if kind == "plain" else horizon_lm.trainer(cls), model, tmp_path / kind, **more)
        trained[kind].train()
    lines = [[{k: round(v, 6) for k, v in line.items()} for line in history(each)] for each in trained.values()]
    assert difference(*lines, 1e-5) is None
    assert difference(copied_weights(models["plain"]), copied_weights(models["streamed"]), 1e-5) is None
    if not name.startswith(("grpo", "rloo")):  # these generate in a step
        assert max(loads.counts) <= (3 if name == "kto" else 2)
    reference = getattr(trained["streamed"], "ref_model", None)
    assert reference is None or hasattr(reference, "_horizon")


@pytest.mark.filterwarnings("ignore")
def test_a_preference_trainer_computes_its_reference_before_training(tmp_path: Path) -> None:
    """TRL would load the reference onto the device."""
    model = streamed(tiny.save_model(tmp_path / "model"))
    trainer = make("dpo with a reference", horizon_lm.trainer(trl.DPOTrainer), model, tmp_path)
    assert trainer.ref_model is None
    assert "ref_chosen_logps" in trainer.train_dataset.column_names


@pytest.mark.filterwarnings("ignore")
def test_the_reference_is_the_model_with_its_present_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL precomputes the same one. By default it loads that of the model's folder, which a given reference is, too."""
    folder, trained = tiny.save_model(tmp_path / "model"), {}
    for kind in ("plain", "streamed", "plain of the folder", "streamed of the folder"):
        is_plain, of_folder = kind.startswith("plain"), kind.endswith("folder")
        model = (plain if is_plain else streamed)(folder)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        more = {"ref_model": streamed(folder)} if of_folder and not is_plain else {}
        if is_plain and not of_folder:
            more["precompute_ref_log_probs"] = True
        cls = trl.DPOTrainer if is_plain else horizon_lm.trainer(trl.DPOTrainer)
        trained[kind] = make("dpo with a reference", cls, model, tmp_path / kind, **more)
        printed = capsys.readouterr().out
        assert ("the reference is the model with its present weights" in printed) == (kind == "streamed")
        trained[kind].train()
    lines = {kind: history(each) for kind, each in trained.items()}
    assert difference(lines["plain"], lines["streamed"], 1e-5) is None
    assert difference(lines["plain of the folder"], lines["streamed of the folder"], 1e-5) is None
    assert difference(lines["streamed"], lines["streamed of the folder"], 1e-5) is not None


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_folder_has_no_reference_to_load(tmp_path: Path) -> None:
    model = horizon_lm.stream(tiny.build_model(len(tiny.build_tokenizer())), precision="float32")
    with pytest.raises(ConfigError, match=r"this model has none; write it with model\.save_pretrained\(folder\)"):
        make("grpo with a reference", horizon_lm.trainer(trl.GRPOTrainer), model, tmp_path)


def with_adapters(model: Any) -> Any:
    """Return a model with adapters that are not zero."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear"))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.02)
    return model


@pytest.mark.filterwarnings("ignore")
def test_adapters(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    models = {
        "plain": with_adapters(plain(folder)),
        "streamed": horizon_lm.stream(with_adapters(plain(folder)), precision="float32"),
    }
    loads, trained = Loads(models["streamed"]), {}
    for kind, model in models.items():
        cls = trl.SFTTrainer if kind == "plain" else horizon_lm.trainer(trl.SFTTrainer)
        callbacks = [] if kind == "plain" else [loads]
        trained[kind] = make("sft packed", cls, model, tmp_path / kind, callbacks=callbacks)
        trained[kind].train()
    assert difference(*map(history, trained.values()), 1e-5) is None
    assert difference(*map(copied_weights, models.values()), 1e-5) is None
    assert max(loads.counts) <= 2


@pytest.mark.filterwarnings("ignore")
def test_the_default_precision_follows_autocast(tmp_path: Path) -> None:
    """Weights are rounded to bfloat16 before a forward pass, where autocast rounds them in each product."""
    folder = tiny.save_model(tmp_path / "model")
    settings = {"bf16": True, "max_steps": 12}
    expected = make("sft assistant only", trl.SFTTrainer, plain(folder), tmp_path / "plain", **settings)
    model = horizon_lm.from_pretrained(folder, "cpu")
    assert model._horizon.engine.store.precision.name == "fp32_master"
    got = make("sft assistant only", horizon_lm.trainer(trl.SFTTrainer), model, tmp_path / "streamed", **settings)
    for trainer in (expected, got):
        trainer.train()
    assert difference(history(expected), history(got), 2e-2) is None
    assert history(got)[-2]["loss"] < history(got)[0]["loss"]


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_without_the_second_line_says_what_is_missing(tmp_path: Path) -> None:
    trainer = make("sft packed", trl.SFTTrainer, streamed(tiny.save_model(tmp_path / "model")), tmp_path)
    with pytest.raises(StreamingError, match=r"horizon_lm\.trainer\(SFTTrainer\)"):
        trainer.train()
    with pytest.raises(StreamingError, match=r"horizon_lm\.trainer\(SFTTrainer\)"):
        trainer.evaluate(trainer.train_dataset)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel=True is not supported"),
        ({"torch_compile": True}, "compile=True"),
        ({"auto_find_batch_size": True}, "the plan knows"),
        ({"debug": "underflow_overflow"}, "its hooks read weights"),
        ({"deepspeed": {}}, "needs no ZeRO"),
        ({"fsdp": "full_shard"}, "several processes share a streamed model without it"),
        ({"fp16": True}, "use bf16"),
        ({"fp16_full_eval": True}, r"choose the precision in horizon_lm\.stream"),
        ({"bf16_full_eval": True}, r"choose the precision in horizon_lm\.stream"),
        ({"use_vllm": True}, "leave it out, and the streamed model generates"),
    ],
    ids=str,
)
def test_settings_that_a_streamed_model_does_not_support(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    model = streamed(tiny.save_model(tmp_path / "model"))
    config = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    for name, value in settings.items():  # no argument of its class, which may check the machine
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=message) as error:
        horizon_lm.trainer(trl.SFTTrainer)(model=model, args=config)
    assert f"SFTConfig: {next(iter(settings))}=" in str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("watched", ["all", "gradients", "parameters", "false"])
def test_gradients_are_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: str) -> None:
    class WandbCallback(TrainerCallback):
        """Stands in for the callback of transformers, which registers hooks in the first step."""

    monkeypatch.setenv("WANDB_WATCH", watched)
    model = streamed(tiny.save_model(tmp_path / "model"))
    expected = pytest.raises(
        ConfigError, match=f"WANDB_WATCH={watched} is not supported .* set WANDB_WATCH=parameters, or false"
    )
    with expected if watched in ("all", "gradients") else nullcontext():
        make("sft packed", horizon_lm.trainer(trl.SFTTrainer), model, tmp_path, callbacks=[WandbCallback()])


@pytest.mark.filterwarnings("ignore")
def test_models_and_classes_that_cannot_be_trained(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    with pytest.raises(StreamingError, match="from_pretrained"):
        make("sft packed", horizon_lm.trainer(trl.SFTTrainer), plain(folder), tmp_path)
    with pytest.raises(ConfigError, match="subclass of transformers"):
        horizon_lm.trainer(dict)
