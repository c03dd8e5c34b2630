"""What transformers tests of its Trainer, on a streamed model: each run equals that of the plain model.

The list in docs/trainer.md says what works; this is its evidence.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

import horizon_lm
from horizon_lm.errors import ConfigError, NonFiniteError
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support import tiny_models
from tests.support.thinned_cases import thinned
from tests.support.trainer_runs import STEPS, Settings, assert_equal, history, model_of, models, rows, train

CASES: dict[str, Settings] = {
    "no accumulation": {"gradient_accumulation_steps": 1, "max_steps": 4},
    "accumulation beyond an epoch": {"gradient_accumulation_steps": 16, "max_steps": 3},
    "last batch dropped": {"dataloader_drop_last": True},
    "rows of similar length together": {"train_sampling_strategy": "group_by_length"},
    "epochs": {"max_steps": -1, "num_train_epochs": 1.5},
    "tokens of a batch averaged alone": {"average_tokens_across_devices": False},
    "no clipping": {"max_grad_norm": 0.0},
    "strong clipping": {"max_grad_norm": 0.05},
    "weight decay": {"weight_decay": 0.5},
    "betas and epsilon": {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-4},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "warmup share": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.3},
    "scheduler with arguments": {
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4},
    },
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
    "adagrad": {"optim": "adagrad"},
    "activation checkpointing": {"gradient_checkpointing": True},
    "evaluation before training": {"eval_on_start": True},
    "empty cache": {"torch_empty_cache_steps": 2},
    "memory metrics": {"skip_memory_metrics": False},
    "seed of data": {"data_seed": 3},
    "number of tokens": {"include_num_input_tokens_seen": "all"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", thinned(CASES, every=5, keep=("strong clipping", "epochs", "sgd")))
def test_settings(tmp_path: Path, name: str) -> None:
    assert_equal(tmp_path, make=lambda model: dict(CASES[name]))


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    counted: list[int] = []

    def doubled(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        counted.append(int(num_items_in_batch))
        logits = outputs.logits[:, :-1].float().flatten(0, 1)
        return (
            2 * torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
        )

    plain, streamed = tiny_models.build("llama"), tiny_models.build("llama")
    streamed = horizon_lm.stream(streamed, precision="float32", head="whole")
    expected = train(Trainer, plain, tmp_path / "plain", compute_loss_func=doubled, eval_strategy="no")
    seen, counted[:] = list(counted), []
    got = train(
        horizon_lm.trainer(Trainer), streamed, tmp_path / "streamed", compute_loss_func=doubled, eval_strategy="no"
    )
    assert counted == seen
    assert difference(history(expected), history(got), 1e-5) is None
    assert difference(copied_weights(plain), copied_weights(streamed), 1e-5) is None


def test_a_subclass_with_a_loss_of_its_own(tmp_path: Path) -> None:
    class Scaled(Trainer):
        def __init__(self, *args: Any, scale: float = 0.5, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scale = scale

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * self.scale

    assert_equal(tmp_path, Scaled, lambda model: {"eval_strategy": "no"})


def test_callbacks_see_the_same_events_and_control_training(tmp_path: Path) -> None:
    events: dict[int, list[Any]] = {}

    class Recorder(TrainerCallback):
        def __init__(self, model: Any) -> None:
            self.seen = events.setdefault(len(events), [])
            self.model = model

        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_"):
                return super().__getattribute__(name)

            def record(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                kept = {"step": state.global_step, "epoch": state.epoch, "given": sorted(k for k in kwargs)}
                self.seen.append((name, kept))
                if name == "on_step_end":
                    control.should_save = state.global_step == 2
                    control.should_evaluate = state.global_step == 3
                    control.should_training_stop = state.global_step == 5
                if name == "on_pre_optimizer_step":
                    grad = self.model.get_parameter("lm_head.weight").grad
                    self.seen.append(("grad", round(float(grad.norm()), 5)))
                return control

            return record

    _, got = assert_equal(
        tmp_path, make=lambda model: {"callbacks": [Recorder(model)], "eval_strategy": "no", "max_grad_norm": 0.0}
    )
    assert events[0] == events[1]
    assert got.state.global_step == 5
    assert (tmp_path / "streamed" / "checkpoint-2" / "horizon").is_dir()


def test_early_stopping(tmp_path: Path) -> None:
    def make(model: Any) -> Settings:
        return {
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=1)], "metric_for_best_model": "loss",
            "greater_is_better": True, "eval_steps": 1, "save_strategy": "best", "load_best_model_at_end": True,
        }  # fmt: skip

    expected, got = assert_equal(tmp_path, make=make)
    assert expected.state.global_step == got.state.global_step < STEPS


def test_a_loss_that_is_not_finite_is_not_hidden(tmp_path: Path) -> None:
    """Transformers' filter, which is on by default, replaces such a loss in the log, and trains on with broken weights."""

    class Diverges(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (float("nan") if self.state.global_step == 2 else 1.0)

    _, model = models()
    weights: list[Any] = []

    class Keep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            weights.append(copied_weights(model))

    with pytest.raises(NonFiniteError):
        train(horizon_lm.trainer(Diverges), model, tmp_path, callbacks=[Keep()], eval_strategy="no")
    assert len(weights) == 2
    assert difference(copied_weights(model), weights[-1], 0.0) is None


@pytest.mark.parametrize("settings", [{}, {"optim": "sgd"}, {"gradient_accumulation_steps": 1}], ids=str)
def test_a_step_without_targets_is_an_error(tmp_path: Path, settings: dict[str, Any]) -> None:
    _, model = models()
    before, data = copied_weights(model), rows(8)
    data = data.map(lambda row: {"labels": [-100] * len(row["labels"])})
    with pytest.raises(NonFiniteError, match="step 1 is nan, because none of its rows has a target"):
        train(horizon_lm.trainer(Trainer), model, tmp_path, eval_strategy="no", train_dataset=data, **settings)
    assert difference(copied_weights(model), before, 0.0) is None


def test_a_step_without_targets_is_skipped(tmp_path: Path) -> None:
    _, model = models()
    before, data = copied_weights(model), rows(8)
    data = data.map(lambda row: {"labels": [-100] * len(row["labels"])})
    optimizer = horizon_lm.AdamW(model, lr=1e-3, weight_decay=0.1, non_finite="skip")
    optimizers = (optimizer, get_linear_schedule_with_warmup(optimizer, 0, 9))
    train(
        horizon_lm.trainer(Trainer),
        model,
        tmp_path,
        eval_strategy="no",
        train_dataset=data,
        max_steps=2,
        optimizers=optimizers,
    )
    assert (optimizer.num_skipped, optimizer.num_steps) == (2, 0)
    assert difference(copied_weights(model), before, 0.0) is None


def test_rows_without_targets_beside_others(tmp_path: Path) -> None:
    data = rows()
    data = data.map(
        lambda row, n: {"labels": row["labels"] if n % 4 else [-100] * len(row["labels"])}, with_indices=True
    )
    assert_equal(
        tmp_path, make=lambda model: {"eval_strategy": "no", "train_dataset": data, "per_device_train_batch_size": 1}
    )


@pytest.mark.parametrize("own", [True, False])
def test_optimizers_and_schedulers_of_ones_own(tmp_path: Path, own: bool) -> None:
    def make(model: Any) -> Settings:
        is_ours = own and hasattr(model, "_horizon")
        cls = horizon_lm.AdamW if is_ours else torch.optim.AdamW
        optimizer = cls(model if is_ours else model.parameters(), lr=3e-3, weight_decay=0.1)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
        return {"optimizers": (optimizer, scheduler), "max_grad_norm": 0.3, "eval_strategy": "no"}

    plain, streamed = models()
    expected = train(Trainer, plain, tmp_path / "plain", **make(plain))
    got = train(horizon_lm.trainer(Trainer), streamed, tmp_path / "streamed", **make(streamed))
    assert difference([h.get("loss") for h in history(expected)], [h.get("loss") for h in history(got)], 1e-5) is None
    assert difference(copied_weights(plain), copied_weights(streamed), 1e-5) is None


@pytest.mark.parametrize(("optim", "moments"), [("lion_32bit", "float32"), ("lion_8bit", "8bit")])
def test_lion(tmp_path: Path, optim: str, moments: str) -> None:
    """transformers' own needs bitsandbytes."""
    settings = {"eval_strategy": "no", "max_steps": 3, "weight_decay": 0.1, "adam_beta2": 0.99}
    streamed, other = model_of(streamed=True), model_of(streamed=True)
    got = train(horizon_lm.trainer(Trainer), streamed, tmp_path / "named", optim=optim, **settings)
    optimizer = got.streamed_optimizer
    assert (type(optimizer), optimizer.moments.kind, optimizer.num_steps) == (horizon_lm.Lion, moments, 3)
    names = got.get_decay_parameter_names(other)
    groups = [[p for n, p in other.named_parameters() if (n in names) == decays] for decays in (True, False)]
    own = horizon_lm.Lion(
        other, seed=got.args.seed, moments=moments,
        params=[{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
    )  # fmt: skip
    for group in own.param_groups:
        group["lr"] = got.args.learning_rate
    given = {"optimizers": (own, get_linear_schedule_with_warmup(own, 0, 3))}
    train(horizon_lm.trainer(Trainer), other, tmp_path / "given", **settings, **given)
    assert difference(copied_weights(streamed), copied_weights(other), 0.0) is None


@pytest.mark.parametrize("accumulated", [1, 2])
def test_updates_in_the_backward_pass(accumulated: int, tmp_path: Path) -> None:
    """Micro-batches that are accumulated share one backward pass, so their sum is known when a unit is updated."""
    plain, streamed = models()
    settings = {"eval_strategy": "no", "gradient_accumulation_steps": accumulated}
    expected = train(Trainer, plain, tmp_path / "plain", max_grad_norm=0.0, **settings)
    optimizer = horizon_lm.AdamW(streamed, lr=1e-3, weight_decay=0.0, update_in_backward=True)
    cls, scheduler = horizon_lm.trainer(Trainer), get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    given = {"optimizers": (optimizer, scheduler), **settings}
    with pytest.raises(ConfigError, match="max_grad_norm=0"):
        train(cls, streamed, tmp_path / "streamed", **given)
    train(cls, streamed, tmp_path / "streamed", max_grad_norm=0.0, **given)
    assert difference(copied_weights(expected.model), copied_weights(streamed), 1e-5) is None


def test_model_init(tmp_path: Path) -> None:
    """Each training begins with a new model, as a search over hyperparameters does."""
    made: list[Any] = []

    expected = train(Trainer, None, tmp_path / "plain", model_init=lambda: model_of(False))

    def init() -> Any:
        made.append(model_of(True))
        return made[-1]

    got = train(horizon_lm.trainer(Trainer), None, tmp_path / "streamed", model_init=init)
    assert difference(history(expected), history(got), 1e-5) is None
    before = copied_weights(got.model)
    got.optimizer = got.lr_scheduler = None  # as a search does
    got.train()
    assert len(made) == 3  # one for the constructor, and one for each training
    assert difference(copied_weights(got.model), before, 1e-6) is None


def metrics(prediction: Any) -> dict[str, float]:
    """Return what a user computes of predictions."""
    logits, labels = prediction.predictions, prediction.label_ids
    right = (np.argmax(logits[:, :-1], -1) == labels[:, 1:])[labels[:, 1:] != -100]
    return {"accuracy": float(right.mean()), "sum": float(np.abs(logits).mean())}


def test_evaluation_and_predictions(tmp_path: Path) -> None:
    def make(model: Any) -> Settings:
        return {"compute_metrics": metrics, "eval_dataset": {"a": rows(4), "b": rows(6)}, "eval_accumulation_steps": 1}

    expected, got = assert_equal(tmp_path, make=make)
    evaluated = [
        {k: v for k, v in h.items() if k.endswith(("accuracy", "sum", "loss"))} for h in expected.state.log_history
    ]
    ours = [{k: v for k, v in h.items() if k.endswith(("accuracy", "sum", "loss"))} for h in got.state.log_history]
    assert any("eval_b_accuracy" in line for line in evaluated)
    assert difference(evaluated, ours, 1e-5) is None
    a, b = (each.predict(rows(5)) for each in (expected, got))
    assert difference(torch.from_numpy(a.predictions), torch.from_numpy(b.predictions), 1e-5) is None
    assert difference(a.metrics["test_accuracy"], b.metrics["test_accuracy"], 1e-5) is None


def test_logits_of_an_evaluation_may_be_reduced(tmp_path: Path) -> None:
    got = []
    for model, cls in zip(models(), (Trainer, horizon_lm.trainer(Trainer)), strict=True):
        trainer = train(
            cls, model, tmp_path / cls.__module__, max_steps=1,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            compute_metrics=lambda prediction: {"sum": float(prediction.predictions.sum())},
        )  # fmt: skip
        got.append(trainer.evaluate()["eval_sum"])
    assert got[0] == got[1]


def test_generation_in_an_evaluation(tmp_path: Path) -> None:
    lengths = []
    for model, cls in zip(models(), (Seq2SeqTrainer, horizon_lm.trainer(Seq2SeqTrainer)), strict=True):
        model.generation_config.pad_token_id = 0
        args = Seq2SeqTrainingArguments(
            str(tmp_path), predict_with_generate=True, generation_max_length=24, use_cpu=True, report_to="none",
            per_device_eval_batch_size=2,
        )  # fmt: skip
        lengths.append(cls(model, args, eval_dataset=rows(4)).predict(rows(4)).predictions.tolist())
    assert lengths[0] == lengths[1]


def test_rows_that_are_read_one_after_the_other(tmp_path: Path) -> None:
    def make(model: Any) -> Settings:
        return {"train_dataset": rows().to_iterable_dataset()}

    assert_equal(tmp_path, make=make)


def test_padded_rows_from_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Padder:
        def __call__(self, given: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
            width = max(len(row["input_ids"]) for row in given)
            ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in given])
            mask = torch.tensor([[k < len(row["input_ids"]) for k in range(width)] for row in given]).long()
            return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    texts = [{"input_ids": list(range(1, 4 + n % 9))} for n in range(26)]
    assert_equal(
        tmp_path, make=lambda model: {"train_dataset": texts, "data_collator": Padder(), "eval_strategy": "no"}
    )
    assert "plan: " in capsys.readouterr().out


def test_a_second_training_goes_on(tmp_path: Path) -> None:
    expected, got = assert_equal(tmp_path, make=lambda model: {"max_steps": 2})
    for trainer in (expected, got):
        trainer.args.max_steps = 4
        trainer.train()
    assert difference(history(expected), history(got), 1e-5) is None
    assert difference(copied_weights(expected.model), copied_weights(got.model), 1e-5) is None


def test_a_search_over_hyperparameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is a stand-in: it tries two learning rates."""
    from transformers import trainer as module

    class Backend:
        def ensure_available(self) -> None:
            pass

        def default_hp_space(self, trial: Any) -> Any:
            return {}

        def run(self, trainer: Any, n_trials: int, direction: str, **kwargs: Any) -> list[float]:
            losses = []
            for rate in (1e-3, 1e-2):
                trainer.objective = None
                trainer.optimizer = trainer.lr_scheduler = None
                trainer.args.learning_rate = rate
                trainer.model = trainer.call_model_init()
                trainer.model_wrapped = trainer.model
                trainer.train()
                losses.append(trainer.evaluate()["eval_loss"])
            return losses

    found = []
    monkeypatch.setattr(module, "ALL_HYPERPARAMETER_SEARCH_BACKENDS", {module.HPSearchBackend("optuna"): Backend})
    for streamed, cls in ((False, Trainer), (True, horizon_lm.trainer(Trainer))):
        args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no", seed=7)
        trainer = cls(args=args, model_init=partial(model_of, streamed), train_dataset=rows(), eval_dataset=rows(4))
        found.append(trainer.hyperparameter_search(backend="optuna", n_trials=2))
    assert difference(found[0], found[1], 1e-5) is None
    assert found[0][0] != found[0][1]
