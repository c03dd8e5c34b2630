"""TRL's trainers train adapters of a streamed model as they train those of a plain one."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.integrations import evaluated_models
from tests.e2e import tiny
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support import tiny_models
from tests.support.gradients import losses_together
from tests.support.thinned_cases import covering, thinned
from tests.support.trainer_runs import Loads, history, masters, require_resumes
from tests.trainer import rows

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
    given: dict[str, Any] = {
        "output_dir": str(output), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "seed": 7,
        "gradient_accumulation_steps": 4, "save_strategy": "no", "learning_rate": 1e-3, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "bf16": False,
    } | settings | more  # fmt: skip
    extra = {key: given.pop(key) for key in ("callbacks", "peft_config") if key in given}
    if kind in ("grpo", "rloo"):
        extra["reward_funcs"] = length_reward
    if "eval_strategy" in given:
        extra["eval_dataset"] = datasets.Dataset.from_list(rows.of_kind(kind, 4))
    torch.manual_seed(0)
    return cls(
        model=model, args=arguments(**given), train_dataset=datasets.Dataset.from_list(rows.of_kind(kind)),
        processing_class=tiny.build_tokenizer(), **extra,
    )  # fmt: skip


def adapters(model: Any) -> dict[str, torch.Tensor]:
    """Return the adapters that are trained."""
    return {
        name: value for name, value in copied_weights(model).items() if "lora_" in name or "modules_to_save" in name
    }


CASES = [(kind, source) for kind in TRAINERS for source in ("model", "peft_config")]
CASES += [(kind, f"{source}, reference in each step") for kind in ("dpo", "kto") for source in ("model", "peft_config")]


@pytest.mark.parametrize(("kind", "source"), thinned(CASES, every=5, keep=[("sft", "model"), ("dpo", "peft_config")]))
def test_equal_to_plain_peft(tmp_path: Path, kind: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the base, or the adapters that training began with, as TRL takes it."""
    cls, _, _, most_loads, of_reference = TRAINERS[kind]
    if "each" in source:  # as for rows that are not in memory
        monkeypatch.setattr(evaluated_models, "prepare_reference", lambda arguments: None)
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


@pytest.mark.parametrize("source", ["peft_config", "before", "after"])
def test_prompts_train_as_plain_ones(tmp_path: Path, source: str) -> None:
    """TRL trains the first token of a row, too, which follows the prompt."""
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    folder, trained = tiny.save_model(tmp_path / "model"), []
    for streams in (False, True):
        model, more = base("sft", folder), {}
        if streams and source != "before":
            model = horizon_lm.stream(model, precision="float32")
        torch.manual_seed(1)
        if source == "peft_config":
            more = {"peft_config": prompt}
        else:
            model = get_peft_model(model, prompt)
        if streams and source == "before":
            model = horizon_lm.stream(model, precision="float32")
        cls = horizon_lm.trainer(trl.SFTTrainer) if streams else trl.SFTTrainer
        trainer = make("sft", cls, model, tmp_path / str(streams), learning_rate=1e-2, **more)
        trainer.train()
        trained.append((history(trainer), trainer.model.prompt_encoder["default"].embedding.weight.detach().clone()))
    assert difference(*trained, 1e-5) is None


@pytest.mark.parametrize("precision", ["float32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_head_in_float32(tmp_path: Path, precision: str) -> None:
    """GRPO's cast changes nothing if all is computed in float32, and is rejected if it is not."""
    folder, trained = tiny.save_model(tmp_path / "model"), []
    for cast in (False, True):
        model = horizon_lm.stream(base("grpo", folder), precision=precision)
        trainer = make(
            "grpo", horizon_lm.trainer(trl.GRPOTrainer), model, tmp_path / str(cast), cast_lm_head_to_fp32=cast
        )
        trainer.train()
        trained.append((history(trainer), copied_weights(trainer.model)))
    assert difference(*trained, 0.0) is None
    half = horizon_lm.stream(base("grpo", folder), precision=precision, compute_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"cast_lm_head_to_fp32=True .* compute_dtype=torch.float32"):
        make("grpo", horizon_lm.trainer(trl.GRPOTrainer), half, tmp_path / "half", cast_lm_head_to_fp32=True)


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


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}  # an epoch has three steps


def run(kind: str, source: str, precision: str, folder: Path, output: Path, resume: bool = False, **more: Any) -> Any:
    """Train, and return the trainer."""
    model = base(kind, folder)
    if source == "model":
        model = with_adapters(kind, model)
    else:
        more["peft_config"] = config(kind, lora_dropout=0.1)
    cls = horizon_lm.trainer(TRAINERS[kind][0])
    trainer = make(kind, cls, horizon_lm.stream(model, precision=precision), output, **(SAVING | more))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("kind", "source", "precision"),
    thinned(
        [("sft", "peft_config", "fp32_master"), ("reward", "peft_config", "bf16"), ("dpo", "model", "float32")], every=3
    ),
)
def test_resume_in_mid_epoch_is_bit_exact(tmp_path: Path, kind: str, source: str, precision: str) -> None:
    folder = tiny.save_model(tmp_path / "model")
    require_resumes(lambda name, **more: run(kind, source, precision, folder, tmp_path / name, **more))


def test_the_folder_is_that_of_peft(tmp_path: Path) -> None:
    """It has the adapters with all their bits, and nothing of the base; plain PEFT opens it."""
    folder = tiny.save_model(tmp_path / "model")
    trainer = run("sft", "peft_config", "fp32_master", folder, tmp_path / "run")
    last = tmp_path / "run" / "checkpoint-5"
    files = {str(path.relative_to(last)) for path in last.rglob("*.safetensors")}
    assert files == {"adapter_model.safetensors", "horizon/units/outer.safetensors"}
    saved, store = load_file(last / "adapter_model.safetensors"), trainer.model._horizon.engine.store
    for name, value in saved.items():
        own = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(value, store.master(own)), name
    assert len(saved) == len(trainer.model._horizon.engine.parts.adapter_names)
    plain = PeftModel.from_pretrained(base("sft", folder), last).eval()
    opened = horizon_lm.stream(PeftModel.from_pretrained(base("sft", folder), last), precision="float32").eval()
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, opened(input_ids=ids).logits)


@pytest.mark.parametrize("more", thinned([{}, {"save_only_model": True}], every=2), ids=str)
def test_best_model(tmp_path: Path, more: dict[str, Any]) -> None:
    """The best checkpoint's adapters are loaded in the end, in their places."""
    settings = more | {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 4}
    settings |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # so it is the first one
    kept: dict[int, Any] = {}

    class Keep(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            kept[state.global_step] = masters(model)

    folder = tiny.save_model(tmp_path / "model")
    trainer = run("sft", "model", "fp32_master", folder, tmp_path / "run", callbacks=[Keep()], **settings)
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert difference(masters(trainer.model), kept[4], 0.0) is not None
    assert difference(masters(trainer.model), kept[2], 0.0) is None


@pytest.mark.parametrize(("late", "precision"), covering((False, True), ("float32", "fp32_master")))
def test_the_plan_counts_the_bytes_of_a_step(tmp_path: Path, precision: str, late: bool) -> None:
    """16 bytes for each parameter of the adapters, and 2 or 4 for the base; other adapters, too."""
    model = base("sft", tiny.save_model(tmp_path / "model"))
    options: dict[str, Any] = {"precision": precision, "activation_checkpoints": "host", "device_micro_batch_size": 2}
    if late:
        model = with_adapters("sft", horizon_lm.stream(model.bfloat16(), **options))
        model.add_adapter("other", config("sft", r=2, target_modules=["q_proj"]))
    else:
        model = horizon_lm.stream(with_adapters("sft", model), **options)
    args = trl.SFTConfig(str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True)
    planned = horizon_lm.plan(model, args, length=16)
    assert planned.fits
    assert planned.step.outline.base_is_frozen
    optimizer = horizon_lm.AdamW(model)
    losses_together(model, [tiny_models.batch(rows=2, length=16)] * 2)
    optimizer.step()
    measured = horizon_lm.stats(model)["host_bytes_by_kind"]
    counted = {item.name: item.bytes for item in planned.host.items}
    own = {name: size for name, size in counted.items() if not name.startswith(("process", "activations", "device"))}
    assert sum(measured.values()) == sum(own.values()), (measured, own)


def test_the_plan_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("reward", "peft_config", "float32", tiny.save_model(tmp_path / "model"), tmp_path / "run", max_steps=1)
    out = capsys.readouterr().out
    assert "plan: host memory: " in out
    assert "no plan was made" not in out


def test_a_quantized_base(tmp_path: Path) -> None:
    """TRL adds adapters to weights of 4 bits, in bfloat16: equal to its plain script on the decoded ones, with the updates of adapters
    in the model's precision, and planned to the byte.
    """
    folder = tiny.save_model(tmp_path / "model")
    streamed = horizon_lm.from_pretrained(folder, "cpu", "float32", load_in_4bit=True)
    plain = base("sft", folder)
    for name, param in streamed.named_parameters():
        plain.get_parameter(name).data.copy_(param.decode() if hasattr(param, "decode") else param)
    plain.is_loaded_in_4bit = True
    loads, trained = Loads(streamed), {}
    for kind, model in (("plain", plain), ("streamed", streamed)):
        cls = trl.SFTTrainer if kind == "plain" else horizon_lm.trainer(trl.SFTTrainer)
        callbacks = [] if kind == "plain" else [loads]
        torch.manual_seed(5)
        trained[kind] = make("sft", cls, model, tmp_path / kind, callbacks=callbacks, peft_config=config("sft"))
        if kind == "plain":
            adapters_of = [param for param in plain.parameters() if param.requires_grad]
            assert {param.dtype for param in adapters_of} == {torch.bfloat16}
            for param in adapters_of:
                param.data = param.data.float()
        trained[kind].train()
    assert difference(*map(history, trained.values()), 1e-5) is None
    adapters = [{n: p.detach() for n, p in t.model.named_parameters() if p.requires_grad} for t in trained.values()]
    assert difference(*adapters, 1e-5) is None
    planned = horizon_lm.plan(streamed, trl.SFTConfig(str(tmp_path), use_cpu=True), length=16)
    counted = {item.name: item.bytes for item in planned.host.items}
    measured = horizon_lm.stats(streamed)["host_bytes_by_kind"]
    assert counted["quantized weights"] == measured["packed_weights"] > 0
    assert counted["weights"] == measured["weights"]
