"""Each script in examples/trainer trains alike with and without its two lines, with the defaults of TRL."""

import json
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS

import horizon_lm
from tests.e2e import tiny
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support.thinned_cases import thinned
from tests.support.trainer_runs import history
from tests.trainer import rows

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainer"
STEPS = 20
SETTINGS: dict[str, list[str]] = {
    "trainer": [],
    "sft": [],
    "sft_lora": ["--use_peft", "--lora_target_modules", "all-linear", "--lora_dropout", "0"],
    "dpo": [],
    "kto": [],
    "reward": [],
    "grpo": ["--num_generations", "2", "--max_completion_length", "6"],
}
# KTO computes its estimate of the KL without gradients: one load and one pass more. GRPO generates up to six tokens, each
# with a load and a pass. Preferences have two sequences a row.
LOADS = dict.fromkeys(SETTINGS, 2) | {"kto": 3, "grpo": 2 + 6}
ROWS = dict.fromkeys(SETTINGS, 8) | {"dpo": 16, "reward": 16}


class Passes(TrainerCallback):
    """Counts what each step loads, and how often each row passes a block."""

    steps: list[dict[str, float]]

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before = self.counts(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.before is not None:
            after = self.counts(model)
            assert after is not None
            self.steps.append({name: after[name] - self.before[name] for name in after})

    def counts(self, model: Any) -> dict[str, float] | None:
        if not hasattr(model, "_horizon"):
            return None
        engine = model._horizon.engine
        blocks = sum(slabs.plain.weights.nbytes for unit, slabs in engine.store.units.items() if unit.is_block)
        moved = sum(n for op, n in engine.device.counters.moved.items() if op.startswith("stream_in:block"))
        return {"loads": moved / blocks, "rows": engine.counts["block_forward_rows"] / engine.parts.num_blocks}


def run_example(
    name: str, folder: Path, output: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool, *more: str
) -> Any:
    """Run a script, with its own two lines or with a plain model and the trainer as it is. Return its trainer."""

    def plain(path: str, model_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
        return model_class.from_pretrained(path, dtype=torch.float32, **options)

    if streamed:
        monkeypatch.setattr(horizon_lm, "from_pretrained", partial(horizon_lm.from_pretrained, precision="float32"))
    else:
        monkeypatch.setattr(horizon_lm, "from_pretrained", plain)
        monkeypatch.setattr(horizon_lm, "trainer", lambda cls: cls)
    arguments = {
        "model_name_or_path": folder / "model", "dataset_name": folder / "rows", "output_dir": output, "max_steps": STEPS,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "use_cpu": "true", "seed": 7, "disable_tqdm": "true",
    }  # fmt: skip
    flat = [str(each) for key, value in arguments.items() for each in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flat, *SETTINGS[name], *more])
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")["trainer"]


def prepare(name: str, folder: Path) -> None:
    """Write model and rows for a script."""
    tiny.save_model(folder / "model")
    if name == "reward":
        torch.manual_seed(3)
        classifier = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
        classifier.save_pretrained(folder / "model")
    (folder / "rows").mkdir()
    tiny.write_jsonl(folder / "rows" / "train.jsonl", rows.of_kind(name.partition("_")[0]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "settings", "tolerance"),
    [
        *thinned([(name, ("--bf16", "false"), 3e-6) for name in SETTINGS], every=6),
        # With autocast to bfloat16, changing every weight by one unit in the last place changes losses and norms of the
        # plain trainer by as much: 1.3e-3 and 2.4e-3 with `reward`, 1.8e-4 and 6.8e-4 with `dpo`, 1.3e-4 and 3.6e-4 with
        # `kto`. Its weights change by up to 2e-3 of their norm (`kto`).
        *(pytest.param(name, (), 3e-3, marks=pytest.mark.slow) for name in ("sft", "dpo", "kto", "reward", "grpo")),
    ],
    ids=str,
)
def test_equal_with_and_without_the_two_lines(
    name: str, settings: tuple[str, ...], tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(name, tmp_path)
    settings = () if name == "trainer" else settings
    passes = type("Counted", (Passes,), {"steps": []})
    with monkeypatch.context() as patched:
        patched.setattr("transformers.trainer.DEFAULT_CALLBACKS", [*DEFAULT_CALLBACKS, passes])
        got = run_example(name, tmp_path, tmp_path / "streamed", patched, True, *settings)
    with monkeypatch.context() as patched:
        expected = run_example(name, tmp_path, tmp_path / "plain", patched, False, *settings)
    assert difference(history(expected), history(got), tolerance) is None
    # AdamW moves a weight by a whole learning rate even if its gradient is nothing but rounding, which differs by processor.
    assert difference(copied_weights(expected.model), copied_weights(got.model), max(3 * tolerance, 1e-4)) is None
    assert len(passes.steps) == STEPS
    assert max(step["loads"] for step in passes.steps) <= LOADS[name]
    most = LOADS[name] * ROWS[name]
    if name == "grpo":  # an answer may end before its last token
        assert all(2 * ROWS[name] < step["rows"] <= most for step in passes.steps)
    else:
        assert {step["rows"] for step in passes.steps} == {most}
    if name == "sft_lora":
        assert (tmp_path / "streamed" / "adapter_model.safetensors").is_file()
        return
    saved = json.loads((tmp_path / "streamed" / "config.json").read_text())
    assert saved["architectures"] == [type(expected.model).__name__]
