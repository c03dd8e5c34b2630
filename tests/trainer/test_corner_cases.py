"""Rare uses of a Trainer that need care when micro-batches are held back: each run equals that of the plain model."""

import threading
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from torch.optim import lr_scheduler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import horizon_lm
from horizon_lm.engine.passes import lockstep
from horizon_lm.errors import ConfigError
from horizon_lm.integrations.trainer_rows import longest_row
from tests.e2e import tiny
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support import tiny_models
from tests.support.thinned_cases import thinned
from tests.support.trainer_runs import assert_equal, history, models, rows, train
from tests.trainer.rows import of_kind

pytestmark = pytest.mark.filterwarnings("ignore")


class Twice(Trainer):
    """Its loss is that of two forward passes, as for consistency between two dropout masks."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        first, second = (model(**inputs) for _ in range(2))
        loss = first.loss + second.loss + (first.logits.softmax(-1) - second.logits.sigmoid()).square().mean()
        return (loss, first) if return_outputs else loss


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_two_forward_passes_in_a_loss(tmp_path: Path, accumulation: int) -> None:
    plain, streamed = (
        tiny_models.build("llama"),
        horizon_lm.stream(tiny_models.build("llama"), precision="float32", head="whole"),
    )
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": 3}
    expected = train(Twice, plain, tmp_path / "plain", **settings)
    got = train(horizon_lm.trainer(Twice), streamed, tmp_path / "streamed", **settings)
    assert difference(history(expected), history(got), 1e-5) is None
    assert difference(copied_weights(plain), copied_weights(streamed), 1e-5) is None


def test_two_forward_passes_of_chunks(tmp_path: Path) -> None:
    class Sum(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss + 2 * model(**inputs).loss

    assert_equal(tmp_path, Sum, lambda model: {"max_steps": 3, "eval_strategy": "no"})


class Weighted(Trainer):
    """Scales the loss of each micro-batch by a weight of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs) * (1 + inputs["input_ids"].float().mean() / 100)


def test_a_subclass_of_the_streamed_trainer(tmp_path: Path) -> None:
    """It is held back as a whole, whether it is below or above the mixin."""
    found = {}
    for name, cls in {
        "plain": Weighted,
        "below": horizon_lm.trainer(Weighted),
        "above": type("Above", (horizon_lm.trainer(Trainer),), {"compute_loss": _weighted}),
    }.items():
        model = tiny_models.build("llama")
        model = model if name == "plain" else horizon_lm.stream(model, precision="float32")
        found[name] = history(train(cls, model, tmp_path / name, max_steps=3, eval_strategy="no"))
    assert difference(found["plain"], found["below"], 1e-5) is None
    assert difference(found["plain"], found["above"], 1e-5) is None


def _weighted(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    loss = super(type(self), self).compute_loss(model, inputs, *args, **kwargs)
    return loss * (1 + inputs["input_ids"].float().mean() / 100)


def test_a_loss_knows_whether_its_batch_is_the_last(tmp_path: Path) -> None:
    seen: dict[str, list[bool]] = {}

    class Asking(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            seen.setdefault(self.args.output_dir, []).append(self.accelerator.sync_gradients)
            return super().compute_loss(*args, **kwargs)

    assert_equal(tmp_path, Asking, lambda model: {"max_steps": 3, "eval_strategy": "no"})
    assert seen[str(tmp_path / "streamed")] == seen[str(tmp_path / "plain")] == [False, False, False, True] * 3


class OwnOptimizer(Trainer):
    """Trains one weight, with an optimizer that the trainer makes."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.AdamW([next(iter(self.model.parameters()))], lr=1e-2, weight_decay=0.0)
        return self.optimizer


def test_a_trainer_that_makes_its_optimizer(tmp_path: Path) -> None:
    _, got = assert_equal(tmp_path, OwnOptimizer, lambda model: {"max_steps": 3})
    assert got.streamed_optimizer is None


class Halving(TrainerCallback):
    """Changes gradients after they were clipped, and records their norm."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = [param.grad for param in kwargs["model"].parameters() if param.grad is not None]
        self.norms.append(float(sum(grad.float().square().sum() for grad in grads)) ** 0.5)
        grads[0].mul_(0.5)


def test_callbacks_see_clipped_gradients(tmp_path: Path) -> None:
    seen: list[Halving] = []

    def make(model: Any) -> dict[str, Any]:
        seen.append(Halving())
        return {"callbacks": [seen[-1]], "max_grad_norm": 0.1, "max_steps": 3}

    assert_equal(tmp_path, Trainer, make)
    assert seen[1].norms == pytest.approx(seen[0].norms, rel=1e-4)
    assert seen[1].norms == pytest.approx([0.1] * 3, rel=1e-3)


class LowerLimit(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.max_grad_norm = 0.05


def test_the_present_limit_clips(tmp_path: Path) -> None:
    assert_equal(tmp_path, Trainer, lambda model: {"callbacks": [LowerLimit()], "max_steps": 4})


# Resuming


BETWEEN = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "max_steps": 6}


@pytest.mark.parametrize(
    "settings",
    [{"train_sampling_strategy": "group_by_length"}, {"accelerator_config": {"use_seedable_sampler": False}}],
    ids=str,
)
def test_resuming_reads_the_same_rows(tmp_path: Path, settings: dict[str, Any]) -> None:
    cls = horizon_lm.trainer(Trainer)
    seen: dict[int, list[Any]] = {}

    class Watching(cls):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.setdefault(len(seen) - 1 if started else 0, []).append(inputs["input_ids"].tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    started = False
    losses = []
    for resume in (None, str(tmp_path / "run" / "checkpoint-2")):
        seen, started = {}, False
        model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
        trainer = train(Watching, model, tmp_path / "run", resume=resume, **(BETWEEN | settings))
        losses.append({line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line})
    assert losses[0] == losses[1]


def test_another_optimizer_does_not_go_on(tmp_path: Path) -> None:
    cls = horizon_lm.trainer(Trainer)
    train(cls, models()[1], tmp_path, **BETWEEN)
    with pytest.raises(ConfigError, match=r"was saved with an optimizer of horizon_lm, and this trainer has Adafactor"):
        train(cls, models()[1], tmp_path, resume=True, **BETWEEN, optim="adafactor")


SCHEDULERS: dict[str, Any] = {
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 5]),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2, 3])], [1]
    ),
}


@pytest.mark.parametrize("name", thinned(SCHEDULERS, every=2))
def test_schedulers_of_torch_go_on(tmp_path: Path, name: str) -> None:
    cls, rates = horizon_lm.trainer(Trainer), []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        _, model = models()
        optimizer = horizon_lm.AdamW(model, lr=1e-3)
        own = {"optimizers": (optimizer, SCHEDULERS[name](optimizer))}
        trainer = train(cls, model, tmp_path, resume=resume, **BETWEEN, **own)
        rates.append([line["learning_rate"] for line in trainer.state.log_history if "loss" in line])
    assert len(set(rates[0])) > 2
    assert rates[0] == rates[1]


def test_a_scheduler_that_cannot_be_saved_is_rejected_before_training(tmp_path: Path) -> None:
    class Table:
        def __init__(self) -> None:
            self.table = torch.linspace(1, 0, 20)

        def __call__(self, step: int) -> float:
            return float(self.table[step])

    _, model = models()
    optimizer = horizon_lm.AdamW(model, lr=1e-3)
    own = {"optimizers": (optimizer, lr_scheduler.LambdaLR(optimizer, Table()))}
    with pytest.raises(ConfigError, match="the state of the scheduler LambdaLR has a Tensor"):
        train(horizon_lm.trainer(Trainer), model, tmp_path, **BETWEEN, **own)
    assert optimizer.num_steps == 0
    train(horizon_lm.trainer(Trainer), model, tmp_path, **(BETWEEN | {"save_only_model": True}), **own)


# Rows


def test_the_longest_row_of_what_is_left() -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[1] * n for n in (3, 50, 7)], "doc_ids": ["a", "b", "c"]})
    assert longest_row(data, None) == 50
    assert longest_row(data.filter(lambda row: len(row["input_ids"]) < 10), None) == 7
    assert longest_row(data.select([0]), None) == 3
    tensors = [{"input_ids": torch.ones(n, dtype=torch.long), "labels": torch.ones(n)} for n in (4, 9)]
    assert longest_row(tensors, None) == 9


def test_the_tokens_of_prompts_with_images_are_not_known(tmp_path: Path) -> None:
    """A processor counts image tokens only of images that it is given, and rejects a prompt that has parts without them."""
    arguments = trl.GRPOConfig(str(tmp_path), max_completion_length=8, report_to=[], bf16=False)
    prompts = datasets.Dataset.from_dict({"prompt": ["one", "another one"]})
    tokens = {"one": [1], "another one": [1, 2]}
    assert longest_row(prompts, arguments, lambda prompt: {"input_ids": tokens[prompt]}) == 10
    assert longest_row(prompts.add_column("images", [["a.png"], []]), arguments, tokens.pop) is None


def test_rows_of_tensors(tmp_path: Path) -> None:
    made = [{name: torch.tensor(value) for name, value in row.items()} for row in rows(12)]
    assert_equal(tmp_path, Trainer, lambda model: {"train_dataset": made, "max_steps": 2, "eval_strategy": "no"})


# TRL


def trl_trainer(name: str, model: Any, folder: Path, data: Any = None, **settings: Any) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    given = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "seed": 7,
        "gradient_accumulation_steps": 2, "save_strategy": "no", "learning_rate": 1e-3, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "bf16": False,
    }  # fmt: skip
    cls, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    cls = horizon_lm.trainer(cls) if hasattr(model, "_horizon") else cls
    own = (
        {}
        if name != "GRPO"
        else {"reward_funcs": lambda completions, **_: [float(len(str(c)) % 7) for c in completions]}
    )
    data = data or {"train_dataset": datasets.Dataset.from_list(of_kind(name.lower()))}
    tokenizer = tiny.build_tokenizer(tiny.CHATML)
    return cls(model=model, args=config(**(given | settings)), processing_class=tokenizer, **own, **data)


def pair(folder: Path, family: str = "llama", **config: Any) -> tuple[Any, Any]:
    """Return a plain model for the tiny tokenizer, and the same one streamed."""
    sizes = {"vocab_size": len(tiny.build_tokenizer()), "max_position_embeddings": 256, "pad_token_id": 1} | config
    tiny_models.build(family, bos_token_id=0, eos_token_id=1, **sizes).save_pretrained(folder / "model")
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    return plain, horizon_lm.from_pretrained(folder / "model", "cpu", "float32")


@pytest.mark.parametrize(
    ("name", "own", "asked"), thinned([("SFT", 0.01, 0.1), ("SFT", 0.0, 0.1), ("SFT", 0.01, 0.0), ("DPO", 0.0, 0.1)])
)
def test_the_auxiliary_loss_has_the_arguments_weight(tmp_path: Path, name: str, own: float, asked: float) -> None:
    logs = []
    for model in pair(tmp_path, "qwen3_moe", router_aux_loss_coef=own):
        trainer = trl_trainer(name, model, tmp_path, router_aux_loss_coef=asked)
        trainer.train()
        kept = ("loss", "grad_norm", "aux_loss")
        logs.append([{k: float(line[k]) for k in kept if k in line} for line in trainer.state.log_history])
    assert ("aux_loss" in logs[0][0]) == bool(asked)
    assert difference(*logs, 1e-5) is None


def test_an_adaptive_coefficient_moves_once_a_step(tmp_path: Path) -> None:
    logs = []
    settings = {
        "num_generations": 2, "max_completion_length": 6, "use_adaptive_entropy": True, "entropy_target": 1e9,
        "entropy_coef_delta": 0.01,
    }  # fmt: skip
    for model in pair(tmp_path):
        trainer = trl_trainer("GRPO", model, tmp_path, **settings)
        trainer.train()
        logs.append([line["entropy_coef"] for line in trainer.state.log_history if "entropy_coef" in line])
    assert logs[1] == pytest.approx(logs[0])
    assert logs[0] == pytest.approx([0.01, 0.02, 0.03])


def test_sets_without_a_reference(tmp_path: Path) -> None:
    """An eval set that is read row by row has a reference in each pass; a set that comes later is explained."""
    data = {"train_dataset": datasets.Dataset.from_list(of_kind("dpo"))}
    late = datasets.Dataset.from_list(of_kind("dpo", 4))
    logs = []
    for model in pair(tmp_path):
        given = data | {"eval_dataset": late.to_iterable_dataset()}
        trainer = trl_trainer("DPO", model, tmp_path, given, eval_strategy="steps", eval_steps=2)
        trainer.train()
        logs.append([line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line])
    assert logs[1] == pytest.approx(logs[0], rel=1e-5)
    trainer = trl_trainer("DPO", pair(tmp_path)[1], tmp_path, data)
    trainer.train()
    with pytest.raises(ConfigError, match="give the set to the trainer as eval_dataset, or a streamed reference"):
        trainer.evaluate(late)


# Constructors and threads


def test_constructors_with_arguments_of_their_own(tmp_path: Path) -> None:
    class Scaled(Trainer):
        def __init__(self, scale: float, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scale = scale

    class Builds(Trainer):
        def __init__(self, *, args: Any, **kwargs: Any) -> None:
            super().__init__(model=models()[1], args=args, **kwargs)

    arguments = train(Trainer, models()[0], tmp_path, max_steps=1, eval_strategy="no").args
    assert horizon_lm.trainer(Scaled)(2.0, models()[1], arguments).scale == 2.0
    assert hasattr(horizon_lm.trainer(Builds)(args=arguments).model, "_horizon")


def test_an_interrupt_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(1)
        if len(started) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lockstep.run_together([lambda: lockstep.batched_call("here", 1, lambda values: values)] * 4)
    assert not [thread for thread in threading.enumerate() if thread.name == "horizon-lockstep"]
