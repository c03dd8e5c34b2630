"""Reward models and other classifiers of rows compute what plain autograd computes."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForSequenceClassification,
)

import horizon_lm
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.errors import CheckpointWarning, ConfigError, ModelNotSupportedError, StreamingError
from horizon_lm.model.units import find_parts
from horizon_lm.planning.measure.head_probe import head_peak
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu

CLASSIFIERS = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "mixtral", "qwen3_moe", "falcon",
)  # fmt: skip
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def build(family: str = "llama", **overrides: Any) -> Any:
    """Return a plain classifier with three labels, without dropout."""
    settings = {"num_labels": 3} | overrides
    return tiny_models.build(family, model_class=AutoModelForSequenceClassification, **settings).eval()


def batch(labels: Any = (0, 2, 1), pads: bool = True, **options: Any) -> dict[str, torch.Tensor]:
    """Return a batch with a label for each row. Without ``pads``, other tokens than the padding token are masked."""
    made = tiny_models.batch(**options)
    ids = made["input_ids"].masked_fill(made["attention_mask"] == 0, 0) if pads else made["input_ids"]
    return made | {"input_ids": ids, "labels": torch.tensor(labels)}


def stream(model: Any, **options: Any) -> Any:
    return horizon_lm.stream(copy.deepcopy(model), device="cpu", **{"precision": "float32"} | options)


def step(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Run a forward and a backward pass; return the output and all gradients."""
    output = model(**inputs, use_cache=False)
    output.loss.backward()
    return output, {name: param.grad.clone() for name, param in model.named_parameters()}


def assert_same_step(plain: Any, streamed: Any, inputs: dict[str, torch.Tensor]) -> None:
    (expected, grads), (got, our_grads) = step(plain, inputs), step(streamed, inputs)
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(got.logits, expected.logits)
    assert our_grads.keys() == grads.keys()
    assert not [name for name, grad in grads.items() if not torch.equal(our_grads[name], grad)]
    assert grads["score.weight"].any()


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_step_is_that_of_plain_autograd(family: str) -> None:
    plain = build(family)
    assert_same_step(plain, stream(plain, check_recompute=True), batch())


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_rows_padded_on_the_left(family: str) -> None:
    plain = build(family)
    assert_same_step(plain, stream(plain), batch(padding="left"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_classifier_has_no_head_to_tie(tied: bool) -> None:
    plain = build(tie_word_embeddings=tied)
    assert_same_step(plain, stream(plain, head="whole"), batch())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("num_labels", "labels", "problem"),
    [
        (1, (0.5, -1.0, 2.0), "regression"),
        (3, (0, 2, 1), "single_label_classification"),
        (3, ((1.0, 0.0, 1.0), (0.0, 0.0, 0.0), (0.0, 1.0, 1.0)), "multi_label_classification"),
    ],
)
def test_problem_types(family: str, num_labels: int, labels: Any, problem: str) -> None:
    plain = build(family, num_labels=num_labels)
    model = stream(plain)
    assert_same_step(plain, model, batch(labels))
    assert model.config.problem_type == problem  # transformers' loss chooses it in the first forward pass
    assert_same_step(plain, model, batch(labels, seed=2))


def test_a_loss_of_pairs_from_the_logits() -> None:
    """Compare the loss of a reward model, which the caller computes."""
    plain = build(num_labels=1)
    model, inputs = stream(plain), tiny_models.batch(rows=4)
    del inputs["labels"]
    for each in (plain, model):
        chosen, rejected = each(**inputs).logits.squeeze(-1).chunk(2)
        (-torch.nn.functional.logsigmoid(chosen - rejected).mean()).backward()
    grads = {name: param.grad for name, param in plain.named_parameters()}
    assert all(torch.equal(param.grad, grads[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize(
    "options", [{"device_micro_batch_size": 1}, {"device_memory": 1 << 26}, {"device": "simulated"}]
)
def test_other_settings(options: dict[str, Any]) -> None:
    plain = build("qwen2")
    model = horizon_lm.stream(copy.deepcopy(plain), precision="float32", **{"device": "cpu"} | options)
    (expected, grads), (got, our_grads) = step(plain, batch()), step(model, batch())
    torch.testing.assert_close(got.logits, expected.logits)
    for name, grad in grads.items():
        torch.testing.assert_close(our_grads[name], grad, msg=name)


@pytest.mark.filterwarnings("ignore::horizon_lm.errors.PageLockWarning")
@pytest.mark.parametrize("pads", [True, False])
def test_an_emulated_gpu(pads: bool) -> None:
    """Compare a step, also with rows whose score is that of a masked token, which `varlen` would not compute."""
    plain = build()
    with emulated_gpu():
        model = horizon_lm.stream(copy.deepcopy(plain), CudaDevice(), "float32", compile=False)
        got, our_grads = step(model, batch(pads=pads))
        logits = got.logits.detach().cpu()
    expected, grads = step(plain, batch(pads=pads))
    torch.testing.assert_close(logits, expected.logits)
    for name, grad in grads.items():
        torch.testing.assert_close(our_grads[name], grad, msg=name)


def test_the_memory_of_a_score_does_not_depend_on_the_vocabulary() -> None:
    models = [find_parts(build(vocab_size=size)) for size in (97, 9700)]
    one, other = (head_peak(parts, parts.trunks()[-1], torch.float32, chunked=False) for parts in models)
    assert one == other


@pytest.mark.parametrize(("family", "in_backward"), [("llama", False), ("gpt2", False), ("llama", True)])
def test_five_steps_of_adamw(family: str, in_backward: bool) -> None:
    plain = build(family)
    model = stream(plain)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True, **HYPER)
    ours = horizon_lm.AdamW(model, update_in_backward=in_backward, **HYPER)
    for seed in range(5):
        for each, optimizer in ((plain, theirs), (model, ours)):
            each(**batch(seed=seed), use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = plain.state_dict()
    assert not [name for name, weight in model.state_dict().items() if not torch.equal(weight, weights[name])]


def test_evaluation() -> None:
    plain = build()
    model = stream(plain)
    with torch.no_grad():
        expected, got = plain(**batch()), model(**batch())
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(got.logits, expected.logits)
    assert got.logits.shape == (3, 3)


# Loading and saving


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_saved_folders_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    plain = build(family)
    plain.save_pretrained(tmp_path / "plain")
    model = horizon_lm.from_pretrained(
        tmp_path / "plain", device="cpu", dtype=torch.float32, model_class=AutoModelForSequenceClassification
    )
    assert_same_step(plain, model, batch())
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert type(again) is type(plain)
    assert again.config.num_labels == 3
    expected = plain.state_dict()
    for state in (again.state_dict(), model.state_dict()):
        assert state.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.parametrize(
    ("family", "tied", "saved"),
    [
        ("llama", False, torch.float32), ("llama", False, torch.bfloat16), ("llama", True, torch.float32),
        ("gpt2", True, torch.float32),
    ],
)  # fmt: skip
def test_a_causal_language_model_gets_a_new_score(family: str, tied: bool, saved: torch.dtype, tmp_path: Path) -> None:
    """Compare a score drawn for a causal language model with that of transformers, from the same seed."""
    tiny_models.build(family, tie_word_embeddings=tied).to(saved).save_pretrained(tmp_path)
    torch.manual_seed(3)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1, dtype=torch.float32)
    torch.manual_seed(3)
    with pytest.warns(CheckpointWarning) as said:
        model = horizon_lm.from_pretrained(
            tmp_path, device="cpu", dtype=torch.float32, num_labels=1, model_class=AutoModelForSequenceClassification
        )
    assert any("has no score.weight, which will be newly initialised" in str(each.message) for each in said)
    assert model.score.weight.shape == (1, 32)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert_same_step(plain, model, batch((0.5, -1.0, 2.0)))


def test_a_new_score_is_saved_in_the_dtype_of_the_others(tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path / "base")
    with pytest.warns(CheckpointWarning):
        model = horizon_lm.from_pretrained(
            tmp_path / "base", device="cpu", num_labels=1, model_class=AutoModelForSequenceClassification
        )  # fp32_master, from float32
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert {param.dtype for param in again.parameters()} == {torch.float32}


def test_only_the_score_may_be_missing(tmp_path: Path) -> None:
    AutoModel.from_config(build().config).save_pretrained(tmp_path)  # nothing but the decoder
    with pytest.warns(CheckpointWarning, match="score"):
        horizon_lm.from_pretrained(tmp_path, device="cpu", model_class=AutoModelForSequenceClassification)
    with pytest.raises(ConfigError, match=r"lacks 1 of .*lm_head"):
        horizon_lm.from_pretrained(tmp_path, device="cpu", tie_word_embeddings=False)


def test_random_weights() -> None:
    model = horizon_lm.from_config(build().config, device="cpu", model_class=AutoModelForSequenceClassification)
    assert 0 < float(model.score.weight.detach().float().std()) < 0.1
    model(**batch()).loss.backward()


def test_checkpoints_are_resumed_and_exported(tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="needs the whole installation")
    model = stream(build())
    optimizer = horizon_lm.AdamW(model, **HYPER)
    model(**batch()).loss.backward()
    optimizer.step()
    horizon_lm.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    other = stream(build(seed=1))
    horizon_lm.load_checkpoint(tmp_path / "checkpoint", other, horizon_lm.AdamW(other, **HYPER))
    horizon_lm.export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for state in (other.state_dict(), exported.state_dict()):
        assert all(torch.equal(value, saved[name]) for name, value in state.items())


# Rejections


def test_encoders_are_rejected_by_name(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = BertForSequenceClassification(config)
    with pytest.raises(ModelNotSupportedError, match="BertForSequenceClassification has neither the output embeddings"):
        horizon_lm.stream(model, device="cpu")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupportedError, match="BertForSequenceClassification"):
        horizon_lm.from_pretrained(tmp_path, device="cpu", model_class=AutoModelForSequenceClassification)


def test_classifiers_of_tokens_are_rejected_by_name() -> None:
    model = tiny_models.build("llama", model_class=AutoModelForTokenClassification)
    with pytest.raises(ModelNotSupportedError, match="LlamaForTokenClassification of type 'llama' is not in the table"):
        horizon_lm.stream(model, device="cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_a_classifier_is_not_read_as_a_language_model(tied: bool, tmp_path: Path) -> None:
    build(tie_word_embeddings=tied).save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupportedError, match=r"holds a LlamaForSequenceClassification.*model_class="):
        horizon_lm.from_pretrained(tmp_path, device="cpu")


def test_types_without_a_classifier_are_rejected(tmp_path: Path) -> None:
    tiny_models.build("olmo2").save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(re.sub(r'"model_type": "\w+"', '"model_type": "granite"', text))
    with pytest.raises(ModelNotSupportedError, match="'granite' has no sequence classification model in transformers"):
        horizon_lm.from_pretrained(tmp_path, device="cpu", model_class=AutoModelForSequenceClassification)


def test_other_classes_are_rejected(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="model_class is AutoModel; use AutoModelForCausalLM, AutoModelForImageTextToText or"
    ):
        horizon_lm.from_pretrained(tmp_path, device="cpu", model_class=AutoModel)
    with pytest.raises(ConfigError, match=r"model_class is AutoModel;.*stream\(\) it"):
        horizon_lm.from_pretrained(tmp_path, device="cpu", model_class=AutoModel, config=build().config)


def test_a_classifier_has_no_log_probabilities_of_tokens() -> None:
    model = stream(build())
    with pytest.raises(StreamingError, match="LlamaForSequenceClassification gives scores of rows"):
        horizon_lm.token_logprobs(model, **tiny_models.batch())


# TRL


@pytest.mark.filterwarnings("ignore")  # warnings of TRL, accelerate and transformers about each other
def test_the_reward_trainer(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the whole installation")
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    from tests.e2e import tiny

    tokenizer = tiny.build_tokenizer()
    tiny.save_model(tmp_path / "base")
    pairs = [{"chosen": f"The keeper counts {n} stars.", "rejected": "The rain. " * (1 + n % 3)} for n in range(8)]

    def train(model: Any, name: str) -> list[dict[str, float]]:
        settings = RewardConfig(
            output_dir=str(tmp_path / name), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, seed=7,
        )  # fmt: skip
        rows = Dataset.from_list(pairs)
        trainer = RewardTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        return [line for line in trainer.state.log_history if "loss" in line]

    torch.manual_seed(3)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1, dtype=torch.float32)
    torch.manual_seed(3)
    model = horizon_lm.from_pretrained(
        tmp_path / "base",
        device="cpu",
        dtype=torch.float32,
        num_labels=1,
        model_class=AutoModelForSequenceClassification,
    )
    expected, got = train(plain, "plain"), train(model, "streamed")
    assert len(got) == 3
    for name in ("loss", "grad_norm", "accuracy", "margin", "mean_reward"):
        assert [line[name] for line in got] == pytest.approx([line[name] for line in expected], rel=1e-4, abs=1e-6)
    weights = plain.state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-6, msg=name)


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 2, "target_modules": ["q_proj", "score"], "init_lora_weights": False}),
    "dora": ("LoraConfig", {"r": 2, "target_modules": ["score"], "init_lora_weights": False, "use_dora": True}),
    "ia3": ("IA3Config", {"target_modules": ["score"], "feedforward_modules": [], "init_ia3_weights": False}),
    "copy": (
        "LoraConfig",
        {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, "modules_to_save": ["score"]},
    ),
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_an_adapter_of_the_score(kind: str, late: bool) -> None:
    """Compare a step, and the scores after a merge, with those of plain PEFT."""
    peft = pytest.importorskip("peft", reason="needs the whole installation")
    config_class, settings = ADAPTERS[kind]
    config = getattr(peft, config_class)(**settings)
    plain, inputs = build(), batch()
    model = stream(plain) if late else copy.deepcopy(plain)
    torch.manual_seed(1)
    plain = peft.get_peft_model(plain, copy.deepcopy(config))
    torch.manual_seed(1)
    model = peft.get_peft_model(model, copy.deepcopy(config))
    model = model if late else stream(model)
    for each in (plain, model):
        each(**inputs).loss.backward()
    ours = dict(model.named_parameters())
    grads = {name: param.grad for name, param in plain.named_parameters() if param.requires_grad}
    assert grads.keys() == {name for name, param in ours.items() if param.requires_grad}
    assert [name for name in grads if "score" in name]
    assert not [name for name, grad in grads.items() if not torch.equal(ours[name].grad, grad)]
    model.zero_grad()
    assert torch.equal(model.merge_and_unload()(**inputs).logits, plain.merge_and_unload()(**inputs).logits)
