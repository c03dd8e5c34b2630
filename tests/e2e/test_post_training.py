"""Evaluation, checkpoints, sample answers, callbacks, frozen weights and objectives of a run."""

import copy
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback

import horizon_lm
from horizon_lm.errors import ConfigError, NonFiniteError
from horizon_lm.runs.admission.inputs import RowShape, fetch_source, open_source
from horizon_lm.runs.admission.run_plan import make_request
from horizon_lm.runs.checkpoints.checkpoint import save_checkpoint
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.config.run import TRACKERS
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.objective import sft
from horizon_lm.runs.objective.base import Loss
from horizon_lm.runs.training import callbacks as run_callbacks
from horizon_lm.runs.training import metrics, trackers, train
from horizon_lm.runs.training.evaluation import Evaluation
from horizon_lm.runs.training.keeping import Keeper
from horizon_lm.runs.training.metrics import StepResult
from horizon_lm.runs.training.rows import load_data
from horizon_lm.runs.training.run_dir import RunDir
from horizon_lm.runs.training.samples import SamplePrompts
from horizon_lm.runs.training.setup import load_tokenizer
from tests.e2e import tiny
from tests.e2e.command import run
from tests.support import tiny_models
from tests.support.thinned_cases import thinned

QUIET: dict[str, Any] = {"print_fn": lambda text: None}


@pytest.fixture
def base(tmp_path: Path, model: Path) -> dict[str, Any]:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(12))
    return {
        "model_name_or_path": str(model), "datasets": str(rows), "output_dir": str(tmp_path / "run"), "device": "cpu",
        "precision": "float32", "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 2,
    }  # fmt: skip


def lines(base: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(base["output_dir"]) / "metrics.jsonl").read_text().splitlines()]


def test_evaluates_and_saves_during_training(tmp_path: Path, base: dict[str, Any]) -> None:
    texts = tiny.write_jsonl(tmp_path / "texts.jsonl", [{"text": "The keeper counts the stars."}] * 3)
    held_out = tiny.write_jsonl(tmp_path / "held_out.jsonl", tiny.alpaca_rows(3))
    horizon_lm.train(
        {
            **base, "eval_datasets": [str(held_out), str(texts)], "eval_strategy": "steps", "eval_steps": 4,
            "save_strategy": "epoch", "save_total_limit": 1,
        },
        **QUIET,
    )  # fmt: skip
    evaluations = [line for line in lines(base) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 4, 8, 9]
    for line in evaluations:
        assert line["eval_perplexity"] == pytest.approx(torch.tensor(line["eval_loss"]).exp().item(), rel=1e-5)
        total = sum(line[f"eval_{name}_loss"] * line[f"eval_{name}_tokens"] for name in ("held_out", "texts"))
        assert line["eval_loss"] == pytest.approx(total / line["eval_tokens"])
    assert evaluations[-1]["eval_held_out_loss"] < evaluations[0]["eval_held_out_loss"]
    kept = sorted(path.name for path in Path(base["output_dir"]).iterdir() if path.is_dir())
    assert kept == ["checkpoint-6", "model"]  # checkpoint-3 was deleted; step 9 is the model
    assert (Path(base["output_dir"]) / "checkpoint-6" / "tokenizer.json").is_file()


def test_foreign_checkpoints_are_kept(base: dict[str, Any]) -> None:
    foreign = Path(base["output_dir"]) / "checkpoint-500" / "optimizer.pt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("foreign")
    with pytest.raises(ConfigError, match="holds checkpoint-500 of another run"):
        horizon_lm.train({**base, "max_steps": 1}, **QUIET)
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "overwrite_output_dir": True}
    horizon_lm.train({**base, **settings, "max_steps": 3}, **QUIET)
    assert foreign.read_text() == "foreign"
    kept = sorted(path.name for path in foreign.parents[1].iterdir() if path.is_dir())
    assert kept == ["checkpoint-2", "checkpoint-500", "model"]


def test_foreign_checkpoint_is_renamed(base: dict[str, Any]) -> None:
    foreign = Path(base["output_dir"]) / "checkpoint-1"
    foreign.mkdir(parents=True)
    (foreign / "optimizer.pt").write_text("foreign")
    settings = {"save_strategy": "steps", "save_steps": 1, "overwrite_output_dir": True}
    for _ in range(2):
        horizon_lm.train({**base, **settings, "max_steps": 2}, **QUIET)
        assert (foreign / "config.json").is_file()
    (renamed,) = foreign.parent.glob("checkpoint-1.*")
    assert (renamed / "optimizer.pt").read_text() == "foreign"


def test_export_in_float32_keeps_every_digit(base: dict[str, Any], model: Path) -> None:
    """The learning rate is so small that bf16 shows no change."""
    settings = {"precision": "fp32_master", "learning_rate": 1e-6, "max_steps": 2}
    changed = {}
    for dtype in ("bfloat16", "float32"):
        output = f"{base['output_dir']}-{dtype}"
        horizon_lm.train({**base, **settings, "export_dtype": dtype, "output_dir": output}, **QUIET)
        before, after = (load_file(folder / "model.safetensors") for folder in (model, Path(output) / "model"))
        assert {str(tensor.dtype) for tensor in after.values()} == {f"torch.{dtype}"}
        changed[dtype] = sum(int((before[name].to(tensor.dtype) != tensor).sum()) for name, tensor in after.items())
        plan = json.loads((Path(output) / "plan.json").read_text())
        exported = next(item for item in plan["disk"]["items"] if item["name"] == "exported model")
        assert exported["bytes"] == sum(path.stat().st_size for path in (Path(output) / "model").iterdir())
    assert changed["float32"] > 10 * changed["bfloat16"]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    thinned([("float32", "float32"), ("bf16", "bfloat16"), ("fp32_master", "bfloat16")], every=2),
)
def test_default_export_dtype(base: dict[str, Any], model: Path, tmp_path: Path, precision: str, dtype: str) -> None:
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(tmp_path / "published")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "published")
    published = str(tmp_path / "published")
    result = horizon_lm.train(
        {**base, "model_name_or_path": published, "precision": precision, "max_steps": 1}, **QUIET
    )
    exported = load_file(result.model_dir / "model.safetensors")
    assert {str(tensor.dtype) for tensor in exported.values()} == {f"torch.{dtype}"}


def test_message_of_an_interrupt(base: dict[str, Any]) -> None:
    config = as_config(base)
    keeper = Keeper(config, RunDir(config), None, None, save_checkpoint, print, requested=lambda: "")
    assert "There is no checkpoint yet; run the same command again to start over" in keeper.kept_artifacts()
    keeper.exports.add(keeper.exports.path(3))  # with save_only_model
    assert "checkpoint-3. With save_only_model a run cannot be resumed" in keeper.kept_artifacts()
    assert "--overwrite_output_dir true" in keeper.kept_artifacts()
    keeper.checkpoints.add(keeper.checkpoints.path(3))
    assert "Run the same command again to go on from there" in keeper.kept_artifacts()


def test_split_of_an_eval_set(base: dict[str, Any]) -> None:
    horizon_lm.train({**base, "test_split_size": 0.25, "max_steps": 2}, **QUIET)
    assert {line["step"] for line in lines(base) if "eval_loss" in line} == {0, 2}
    assert lines(base)[-2]["rows_seen"] == 8


def test_answers_sample_prompts(base: dict[str, Any]) -> None:
    settings = {"sample_prompts": ["What does the keeper do?", "Why?"], "sample_steps": 2, "sample_max_new_tokens": 5}
    horizon_lm.train({**base, **settings, "max_steps": 3}, **QUIET)
    samples = [json.loads(line) for line in (Path(base["output_dir"]) / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples] == [2, 3]
    assert [each["prompt"] for each in samples[0]["samples"]] == settings["sample_prompts"]
    assert all(isinstance(each["answer"], str) for line in samples for each in line["samples"])


@pytest.mark.parametrize("system", [None, "You only say stars."])
def test_system_prompt_of_sample_prompts(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    seen: list[str] = []
    answer = SamplePrompts.answer

    def record(prompts: SamplePrompts, model: Any, step: int) -> dict[str, Any]:
        seen.extend(prompts._tokenizer.decode(inputs["input_ids"][0]) for inputs in prompts._inputs)
        return answer(prompts, model, step)

    monkeypatch.setattr(SamplePrompts, "answer", record)
    settings = {"sample_prompts": ["Why?"], "sample_max_new_tokens": 2, "sample_system_prompt": system}
    horizon_lm.train({**base, **settings, "max_steps": 1}, **QUIET)
    start = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    assert seen == [f"{start}<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"]


def test_trainable_patterns(base: dict[str, Any], model: Path) -> None:
    horizon_lm.train({**base, "trainable": "layers.1.* | lm_head", "max_steps": 2}, **QUIET)
    before, after = (
        load_file(model / "model.safetensors"),
        load_file(Path(base["output_dir"]) / "model" / "model.safetensors"),
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".layers.1." in name or name.startswith("lm_head")}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.1", None),
        ("layer.*", r"did you mean layers\.\*\?"),
        ("heads", r"'heads' fits no weight of the model; did you mean lm_head\?"),
        ("model.layerz.*.q_prok", r"did you mean model\.layers\.\*\.q_proj\?"),
        ("model.layers.99", "names are like model"),
        ("model.zebra.*", "names are like model"),
    ],
)
def test_trainable_patterns_without_a_match(base: dict[str, Any], pattern: str, message: str | None) -> None:
    if message is None:
        horizon_lm.train({**base, "trainable": pattern, "max_steps": 1}, **QUIET)
        return
    with pytest.raises(ConfigError, match=message):
        horizon_lm.train({**base, "trainable": pattern}, **QUIET)


class Listener(TrainerCallback):
    """A callback that records events and stops after step 4."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def record(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.events.append(f"{name} {state.global_step}")
            if name == "on_log" and "loss" in kwargs["logs"]:
                assert {"loss", "grad_norm", "learning_rate", "epoch"} <= set(kwargs["logs"])
            if name == "on_step_end":
                control.should_save = state.global_step == 1
                control.should_training_stop = state.global_step == 4
            return control

        return record


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_transformers_callbacks(base: dict[str, Any]) -> None:
    listener = Listener()
    result = horizon_lm.train({**base, "save_strategy": "no"}, callbacks=[listener], **QUIET)
    assert result.num_steps == 4
    assert listener.events[:3] == ["on_init_end 0", "on_train_begin 0", "on_epoch_begin 0"]
    assert listener.events[-1] == "on_train_end 4"
    assert listener.events.count("on_save 1") == 1
    assert [event for event in listener.events if event.startswith("on_log")] == ["on_log 1", "on_log 2", "on_log 4"]
    assert [event for event in listener.events if event.startswith("on_epoch")] == [
        "on_epoch_begin 0", "on_epoch_end 3", "on_epoch_begin 3", "on_epoch_end 4",
    ]  # fmt: skip
    assert (Path(base["output_dir"]) / "checkpoint-1").is_dir()


@pytest.mark.parametrize(
    ("settings", "name"),
    [({}, "adamw_torch"), ({"moments": "8bit"}, "adamw_8bit"), ({"optim": "lion", "adam_beta2": 0.99}, "lion_32bit")],
    ids=str,
)
def test_callbacks_see_transformers_name_of_the_optimizer(
    base: dict[str, Any], settings: dict[str, Any], name: str
) -> None:
    seen = []

    class Noting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(args.optim.value)

    horizon_lm.train({**base, **settings, "max_steps": 1, "save_strategy": "no"}, callbacks=[Noting()], **QUIET)
    assert seen == [name]


class Requester(TrainerCallback):
    """A callback that requests the next action at each event."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = state.global_step == 3

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = state.global_step == 3

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == 3

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_callbacks_may_request_at_any_event(base: dict[str, Any]) -> None:
    settings = {"logging_steps": 100, "test_split_size": 2, "max_steps": 6}
    result = horizon_lm.train({**base, **settings}, callbacks=[Requester()], **QUIET)
    assert result.num_steps == 3
    assert (Path(base["output_dir"]) / "checkpoint-3").is_dir()
    lines = [json.loads(line) for line in (Path(base["output_dir"]) / "metrics.jsonl").read_text().splitlines()]
    kinds = [(line["step"], "eval_loss" in line) for line in lines]
    assert kinds == [(0, True), (1, False), (3, False), (3, True)]  # one evaluation per step


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_early_stopping(base: dict[str, Any]) -> None:
    settings = {
        "test_split_size": 2,
        "max_steps": 12,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 1e-12,
    }
    early = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=1e-3)
    said: list[str] = []
    result = horizon_lm.train({**base, **settings}, callbacks=[early], print_fn=said.append)
    assert said[-1].startswith("stopped by a callback after step 6 of 12\n")
    assert result.num_steps == 6  # the first of three evaluations during training is the best
    with pytest.raises(ConfigError, match="callbacks: EarlyStoppingCallback requires"):
        horizon_lm.train({**base, "output_dir": f"{base['output_dir']}-2"}, callbacks=[early], **QUIET)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("greater_is_better", [None, False])
def test_callbacks_see_the_best_value_of_the_metric(base: dict[str, Any], greater_is_better: bool | None) -> None:
    """EarlyStoppingCallback compares each evaluation with it, in the direction of the arguments."""
    seen = []

    class Look(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((args.greater_is_better, state.best_metric, state.best_global_step))

    settings = {
        "test_split_size": 2,
        "max_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "early_stopping_patience": 9,
        "metric_for_best_model": "entropy",
        "greater_is_better": greater_is_better,
    }
    horizon_lm.train({**base, **settings}, callbacks=[Look()], **QUIET)
    values = {line["eval_entropy"]: line["step"] for line in lines(base) if "eval_entropy" in line and line["step"]}
    best = min(values) if greater_is_better is False else max(values)
    assert len(values) == 5
    assert seen == [(greater_is_better is None, best, values[best])]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_callbacks_see_the_gradients_of_an_update(base: dict[str, Any]) -> None:
    """on_optimizer_step comes after the update and before zero_grad, as in transformers."""
    seen: list[tuple[bool, int, float]] = []

    class Look(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            param = next(kwargs["model"].parameters())
            seen.append((param.grad is not None, state.global_step, kwargs["optimizer"].param_groups[0]["lr"]))

    horizon_lm.train({**base, "max_steps": 2}, callbacks=[Look()], **QUIET)
    assert seen == [(True, 0, 1e-2), (True, 1, 5e-3)]


def test_empty_sample_prompt_is_rejected(base: dict[str, Any], tmp_path: Path) -> None:
    plain = tiny.save_model(tmp_path / "plain", chat_template=None)
    texts = tiny.write_jsonl(tmp_path / "texts.jsonl", [{"text": "stars"}] * 8)
    settings = {"model_name_or_path": str(plain), "datasets": str(texts), "sample_prompts": [""]}
    with pytest.raises(ConfigError, match="has no tokens"):
        horizon_lm.train({**base, **settings}, **QUIET)


@pytest.mark.filterwarnings("ignore")
def test_reports_to_tensorboard(base: dict[str, Any]) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    said: list[str] = []
    horizon_lm.train({**base, "report_to": "tensorboard", "run_name": "a night", "max_steps": 4}, print_fn=said.append)
    (file,) = Path(base["output_dir"]).rglob("events.out.tfevents.*")
    board = events.EventAccumulator(str(file)).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 4]
    assert said.count(f"TensorBoard's events: {file.parent} (tensorboard --logdir {file.parent})") == 1


def test_wandb_project(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb reads its project from the environment when training begins; afterwards the environment is as it was."""
    seen = []

    class Tracker(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            seen.append(os.environ["WANDB_PROJECT"])

    monkeypatch.setattr(run_callbacks, "open_trackers", lambda report_to: [Tracker()])
    monkeypatch.setenv("WANDB_PROJECT", "before")
    horizon_lm.train({**base, "report_to": "wandb", "wandb_project": "nights", "max_steps": 1}, **QUIET)
    assert (seen, os.environ["WANDB_PROJECT"]) == (["nights"], "before")
    with pytest.raises(ConfigError, match="wandb_project: 'nights': is not used without report_to: wandb"):
        horizon_lm.train({**base, "wandb_project": "nights"}, **QUIET)


def test_metrics_begin_with_the_first_step(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of DPO's reference, which may take hours, are computed before."""
    prepared_at, started_at = [], []
    make_objectives = train.make_objectives

    def noting_the_end(*args: Any, **options: Any) -> Any:
        objectives = make_objectives(*args, **options)
        prepared_at.append(time.perf_counter())
        return objectives

    class Loop(train.Loop):
        def __init__(self, run: Any, training: Any) -> None:
            started_at.append(training.metrics.started)
            super().__init__(run, training)

    monkeypatch.setattr(train, "make_objectives", noting_the_end)
    monkeypatch.setattr(train, "Loop", Loop)
    horizon_lm.train({**base, "max_steps": 1}, **QUIET)
    assert started_at > prepared_at


def test_report_to_without_its_package(base: dict[str, Any]) -> None:
    result = run(
        "train", *(text for key, value in base.items() for text in (f"--{key}", value)), "--report_to", "comet_ml"
    )
    assert result.exit_code == 2
    assert "report_to: comet_ml: its package is not installed; pip install comet_ml" in result.stderr


@pytest.mark.parametrize("name", TRACKERS)
def test_trackers_name_their_packages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=f"^report_to: {name}: its package is not installed; pip install [a-z_-]+"):
        trackers.open_trackers([name])


def test_missing_tracker_is_found_before_the_rows_are_read(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("setup.load_tokenizer", "train.load_data"):
        monkeypatch.setattr(
            f"horizon_lm.runs.training.{name}", lambda *args: pytest.fail("work began before the tracker was checked")
        )
    with pytest.raises(ConfigError, match="report_to: comet_ml: its package is not installed"):
        horizon_lm.train({**base, "report_to": "comet_ml"}, **QUIET)


def test_custom_loss(base: dict[str, Any]) -> None:
    """A custom function with the same loss gives the same run, and its metrics are logged."""
    horizon_lm.train({**base, "max_steps": 4}, **QUIET)
    first = lines(base)

    def nll(model: Any, batch: Any) -> Any:
        logprobs = horizon_lm.token_logprobs(model, labels=batch.labels, **batch.inputs()).logprobs
        loss = -logprobs.sum() / batch.num_trained
        return loss, {"surprise": loss * 2}

    horizon_lm.train({**base, "max_steps": 4, "overwrite_output_dir": True}, objective=nll, **QUIET)
    for custom, builtin in zip(lines(base), first, strict=True):
        assert custom["loss"] == pytest.approx(builtin["loss"], rel=1e-5)
        assert custom["surprise"] == pytest.approx(2 * custom["loss"])
    with pytest.raises(ConfigError, match="must return a scalar tensor"):
        horizon_lm.train({**base, "overwrite_output_dir": True}, objective=lambda model, batch: 1.0, **QUIET)


def test_unit_grad_norms_add_up(base: dict[str, Any]) -> None:
    horizon_lm.train({**base, "log_unit_grad_norms": True, "max_steps": 2}, **QUIET)
    for line in lines(base):
        units = [value for name, value in line.items() if name.startswith("grad_norm/")]
        assert {"grad_norm/embed", "grad_norm/block0", "grad_norm/block1", "grad_norm/head"} <= set(line)
        assert sum(value**2 for value in units) ** 0.5 == pytest.approx(line["grad_norm"])


@pytest.mark.parametrize(
    "settings", [{"loss_type": "dft"}, {"label_smoothing_factor": 0.1}, {"packing": True, "max_length": 64}]
)
def test_other_losses_of_tokens(base: dict[str, Any], settings: dict[str, Any]) -> None:
    result = horizon_lm.train({**base, **settings, "test_split_size": 3, "max_steps": 6}, **QUIET)
    assert result.eval_loss_after < result.eval_loss_before - 0.5


def test_smoothed_loss_equals_that_of_transformers(tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.trainer_pt_utils import LabelSmoother

    from horizon_lm.runs.data.batch import Batch
    from horizon_lm.runs.objective.sft import SmoothedNll

    ids = torch.arange(3, 19).view(2, 8)
    labels = ids.clone()
    labels[0, :4] = -100
    batch = Batch(ids, torch.ones_like(ids), None, labels, int((labels[:, 1:] >= 0).sum()), 16, (0, 1), ("a", "b"))
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = LabelSmoother(0.2)(plain(ids), labels, shift_labels=True)
    expected.backward()
    streamed = horizon_lm.from_pretrained(model, precision="float32")
    loss = SmoothedNll(0.2)(streamed, batch)
    loss.value.backward()
    assert loss.value.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, param in streamed.named_parameters():
        torch.testing.assert_close(param.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-7)


def test_dpo_from_the_command_line(tmp_path: Path, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Margins grow; the reference log-probabilities of a model and its rows are computed once and cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pairs = [
        {"prompt": f"Night {n}? ", "chosen": "The keeper counts the stars.", "rejected": "Rain, rain, rain."}
        for n in range(8)
    ]
    rows = tiny.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    settings = {
        **base,
        "datasets": str(rows),
        "objective": "dpo",
        "learning_rate": 1e-3,
        "test_split_size": 2,
        "max_steps": 8,
    }
    arguments = [str(text) for key, value in settings.items() for text in (f"--{key}", value)]
    result = run("train", *arguments)
    assert result.exit_code == 0, result.stderr
    assert "margin" in result.stdout
    training = [line for line in lines(base) if "loss" in line]
    assert training[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert training[-1]["rewards/margins"] > training[0]["rewards/margins"] + 0.01
    held_out = [line for line in lines(base) if "eval_loss" in line]
    assert held_out[-1]["eval_rewards/accuracies"] == 1
    cached = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.pairs")}
    assert len(cached) == 2
    again = run("train", *arguments, "--overwrite_output_dir", "true")
    assert again.exit_code == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.pairs")} == cached


def test_packed_rows_without_trained_tokens_are_left_out(tmp_path: Path, base: dict[str, Any]) -> None:
    """bfd_split splits a row into several; parts without a trained token are left out, so that every step trains on
    some.
    """
    row = {"instruction": "What does the keeper do? " * 40, "output": "Counts."}
    rows = tiny.write_jsonl(tmp_path / "long.jsonl", [row] * 3)
    packing = {"packing": True, "packing_strategy": "bfd_split", "max_length": 64, "per_device_eval_batch_size": 1}
    said: list[str] = []
    horizon_lm.train(
        {**base, **packing, "datasets": str(rows), "eval_datasets": str(rows), "max_steps": 3}, print_fn=said.append
    )
    assert any("more without a token to train on" in line for line in said)
    assert all(line["tokens_trained"] > 0 for line in lines(base) if "loss" in line)


def test_non_finite_final_eval_loss_keeps_the_model(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate_rows = Evaluation.evaluate_rows

    def broken(self: Evaluation, step: int) -> Any:
        if step == 2:
            raise NonFiniteError("after step 2: the eval loss is nan")
        return evaluate_rows(self, step)

    monkeypatch.setattr(Evaluation, "evaluate_rows", broken)
    with pytest.raises(NonFiniteError):
        horizon_lm.train({**base, "test_split_size": 2, "max_steps": 2}, **QUIET)
    assert (Path(base["output_dir"]) / "model" / "model.safetensors").is_file()


def test_other_folders_are_kept(base: dict[str, Any]) -> None:
    folder = Path(base["output_dir"])
    horizon_lm.train({**base, "max_steps": 1}, **QUIET)
    (folder / "model").rename(folder / "model.old")
    before = (folder / "model.old" / "model.safetensors").read_bytes()
    for _ in range(2):
        horizon_lm.train({**base, "max_steps": 2, "overwrite_output_dir": True}, **QUIET)
    assert (folder / "model.old" / "model.safetensors").read_bytes() == before
    assert not list(folder.glob(".*"))


def test_run_stopped_before_tracing_has_no_trace(base: dict[str, Any]) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    horizon_lm.train({**base, "trace_steps": 1, "max_steps": 9}, callbacks=[Stop()], **QUIET)
    assert not (Path(base["output_dir"]) / "trace.json").exists()


def test_run_stopped_while_tracing_has_a_trace(base: dict[str, Any]) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 4

    horizon_lm.train({**base, "trace_steps": 5, "max_steps": 9}, callbacks=[Stop()], **QUIET)
    assert (Path(base["output_dir"]) / "trace.json").is_file()


def test_settings_of_a_call_override(base: dict[str, Any], tmp_path: Path) -> None:
    """Settings of a call override a mapping and a file, and drop settings that they make useless."""
    held_out = {**base, "test_split_size": 2, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    assert horizon_lm.train(held_out, max_steps=1, eval_strategy="no", **QUIET).num_steps == 1
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**held_out, "overwrite_output_dir": True}))  # JSON is YAML
    result = horizon_lm.train(file, num_train_epochs=2, test_split_size=None, **QUIET)
    assert result.num_steps > 3
    assert result.eval_loss_after is None
    with pytest.raises(ConfigError, match=r"train\(\): max_steps: 0"):
        horizon_lm.train(file, max_steps=0, **QUIET)
    with pytest.raises(ConfigError, match="objective is 'dpo', but in a call it is a function"):
        horizon_lm.train(file, objective="dpo", **QUIET)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["config.yaml", "samples.jsonl", "model"])
def test_foreign_files_are_not_overwritten(base: dict[str, Any], name: str) -> None:
    folder = Path(base["output_dir"])
    folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"{name} was not written by horizon-lm"):
        horizon_lm.train({**base, "overwrite_output_dir": True}, **QUIET)
    assert (folder / name).read_text() == "mine"
    assert [path.name for path in folder.iterdir()] == [name]


def test_unavailable_hub_is_reported_before_training(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "whoami", lambda self: 1 / 0)
    with pytest.raises(ConfigError, match="push_to_hub: the hub cannot be used"):
        horizon_lm.train({**base, "push_to_hub": True}, **QUIET)
    assert not Path(base["output_dir"]).exists()


def test_failed_upload_is_reported(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(HfApi, "whoami", lambda self: {"name": "me"})
    monkeypatch.setattr(HfApi, "create_repo", fails)
    said: list[str] = []
    horizon_lm.train({**base, "push_to_hub": True, "max_steps": 1}, print_fn=said.append)
    (message,) = [line for line in said if line.startswith("push_to_hub: the model was not uploaded")]
    assert message.endswith(f"it is in {Path(base['output_dir']) / 'model'}")


def test_speed_excludes_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts two seconds of steps and a hundred seconds of evaluation."""
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    model = horizon_lm.stream(tiny.build_model(402), device="cpu")
    outline = SimpleNamespace(step_flops=lambda tokens: 1.0)
    plan = SimpleNamespace(
        step=SimpleNamespace(outline=outline, tokens=1), time=None, buffers=SimpleNamespace(bytes=1),
        host=SimpleNamespace(bytes=1),
    )  # fmt: skip
    measured = metrics.Metrics(10, 5, plan)
    batch = SimpleNamespace(places=("",) * 2, is_stand_in=False, num_trained=6, num_tokens=8)
    clock[0] = 1.0
    with measured.exclude_from_timing():
        clock[0] = 101.0
    clock[0] = 102.0
    measured.add(StepResult.of(1.0, Loss(torch.tensor(1.0), 6.0), batch, 2), 1e-3)
    line = measured.line(1, SimpleNamespace(grad_norm=1.0, unit_grad_norms={}, num_skipped=0), model)
    assert (line["tokens_per_second"], line["eta_seconds"], line["seconds"]) == (4.0, 18.0, 102.0)


def test_eval_loss_of_experts_is_the_likelihood() -> None:
    plain = tiny_models.build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5).eval()
    ids = tiny_models.batch()["input_ids"]
    mask = torch.ones_like(ids)
    batch = Batch(ids, mask, None, ids, ids[:, 1:].numel(), ids.numel(), (0, 1), ("", ""))
    logits = plain(input_ids=ids, attention_mask=mask, output_router_logits=False).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    for head in ("chunked", "whole"):
        streamed = horizon_lm.stream(copy.deepcopy(plain), device="cpu", precision="float32", head=head)
        with torch.no_grad():
            assert sft.likelihood(streamed, batch).value.item() == pytest.approx(expected.item(), rel=1e-5)
            assert sft.nll(streamed, batch).value.item() > expected.item() + 0.1


def test_all_forward_passes_are_planned(tmp_path: Path, model: Path, base: dict[str, Any]) -> None:
    settings = {
        "objective": "dpo", "test_split_size": 2, "per_device_eval_batch_size": 3, "precompute_ref_batch_size": 5,
        "sample_prompts": ["What?"], "sample_max_new_tokens": 7,
    }  # fmt: skip
    config = as_config({**base, **settings})
    request = make_request(config, open_source(config), RowShape(50, 40, prompt_length=4), 1)
    shapes = {(each.rows, each.length, each.setting) for each in request.forwards}
    assert shapes == {(6, 40, "per_device_eval_batch_size"), (10, 50, "precompute_ref_batch_size"), (1, 11, "")}
    # two blocks of two heads of 8 numbers, keys and values, of 4 bytes
    assert [each.kept_bytes for each in request.forwards] == [0, 0, 11 * 2 * 2 * 2 * 8 * 4]


@pytest.mark.parametrize(("packing", "eval_packing"), [(True, None), (True, False), (False, True)])
def test_packing_of_eval_sets(base: dict[str, Any], packing: bool, eval_packing: bool | None) -> None:
    """Rows are held out before packing, and packing keeps all of their trained tokens."""
    settings = {"packing": packing, "eval_packing": eval_packing, "max_length": 128, "test_split_size": 4}
    config = as_config({**base, **settings})
    data = load_data(config, load_tokenizer(config, fetch_source(config).model))
    (eval_set,) = [part for part in data.parts if part.name == "held_out"]
    assert (len(eval_set.rows), len(data.training.rows)) == (4, 8)
    assert (len(data.training.packed) < 8) is packing
    assert (len(data.eval_sets["held_out"]) < 4) is (packing if eval_packing is None else eval_packing)
    assert eval_set.packed.num_targets.sum() == eval_set.rows.num_targets.sum()


def test_masks_are_planned_if_needed(tmp_path: Path, model: Path, base: dict[str, Any]) -> None:
    def shape(rows: list[dict[str, str]], **settings: Any) -> RowShape:
        path = tiny.write_jsonl(tmp_path / "shape.jsonl", rows)
        config = as_config({**base, **settings, "datasets": str(path)})
        data = load_data(config, load_tokenizer(config, fetch_source(config).model))
        return RowShape.of(data.loader, data.eval_sets.values())

    alike = [{"text": "stars and stars"}] * 4
    pair = {"prompt": "What? ", "chosen": "stars and stars", "rejected": "stars"}
    assert not shape(alike, objective="pretrain").masked
    assert shape([*alike, {"text": "stars"}], objective="pretrain").masked
    assert shape(alike, objective="pretrain", packing=True, max_length=64).masked
    assert not shape([{**pair, "rejected": "stars and keeper"}] * 4, objective="dpo").masked
    assert shape([pair] * 4, objective="dpo").masked
