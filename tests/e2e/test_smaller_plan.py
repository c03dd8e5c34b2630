"""A first step that runs out of device memory is run once more with a smaller plan, with the result of such a plan."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from horizon_lm.common.units import HEAD, block
from horizon_lm.errors import DeviceFaultError, DoesNotFitError
from horizon_lm.planning.arithmetic.request import Limit, Machine
from horizon_lm.runs.admission.inputs import Source, open_source
from horizon_lm.runs.training.first_step import FirstStep
from horizon_lm.runs.training.loop import Loop
from horizon_lm.runs.training.train import train
from horizon_lm.schedule.ops import Kind
from tests.e2e import tiny
from tests.support.device_short_of_memory import Computation, ShortDevice

BLOCKS = 6
FIRST, LAST = (Kind.BACKWARD, block(0)), (Kind.FORWARD, block(BLOCKS - 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with enough blocks that the weights that stay on the device matter."""
    folder, tokenizer = tmp_path_factory.mktemp("deep"), tiny.build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=BLOCKS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {}


@pytest.fixture
def runs(model: Path, sources: dict[str, Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Runs":
    # One source for all runs, because outlining the model takes longer than training it.
    monkeypatch.setattr(
        "horizon_lm.runs.admission.run_plan.open_source", lambda run: sources.setdefault("", open_source(run))
    )
    return Runs(model, tmp_path, monkeypatch)


class Runs:
    """Trains in a folder, on a device that is planned with 64 MiB and has what a test gives it."""

    def __init__(self, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = Machine("test", on_host=False, hardware=None, device_limits=[Limit("of the test", 64 * 2**20)])
        monkeypatch.setattr("horizon_lm.runs.admission.run_plan.this_machine", lambda run: machine)
        monkeypatch.setattr("horizon_lm.engine.opening.attaching.open_device", lambda *args: self.device)
        self.folder, self.said = folder, list[str]()
        rows = tiny.write_jsonl(folder / "rows.jsonl", tiny.alpaca_rows(12))
        self.config = {
            "model_name_or_path": str(model), "datasets": str(rows), "device": "cpu", "per_device_train_batch_size": 6,
            "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-3, "max_grad_norm": 0,
        }  # fmt: skip

    def train(self, name: str, *failures: Computation, capacity: int | None = None, **settings: Any) -> Path:
        """Train into a new folder of this name, or go on with the run in it."""
        self.device, self.said = ShortDevice(failures, capacity=capacity, eagerness=1.0), []
        output = self.folder / name
        train(self.config | settings | {"output_dir": str(output)}, print_fn=self.said.append)
        assert not self.device.failures, "these computations did not run"
        return output


def plan_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())


def chosen(folder: Path) -> dict[str, Any]:
    """Return the choices of the plan of a run, as settings of a run."""
    settings = plan_of(folder)["run"]["settings"]
    del settings["slices"], settings["attn_implementation"]
    return settings


def results(folder: Path) -> tuple[bytes, list[Any]]:
    """Return the trained weights, and the loss and the norm of each step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "tokens_total", "rows_seen")
    return (folder / "model" / "model.safetensors").read_bytes(), [[line[name] for name in names] for line in lines]


CASES: dict[str, tuple[list[Computation], dict[str, Any]]] = {
    "in the backward": ([FIRST], {}),
    "in the head, with updates in the backward": ([(Kind.FORWARD, HEAD)], {"update_in_backward": True}),
    "for a buffer": ([], {"head_chunk_tokens": 8, "per_device_train_batch_size": 1}),
    "in a block, with nothing resident": ([LAST], {"head_chunk_tokens": 8, "activation_checkpoints": "host"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_first_step_is_run_once_more_with_a_smaller_plan(runs: Runs, case: str) -> None:
    failures, settings = CASES[case]
    unlimited = runs.train("unlimited", **settings)
    capacity = None if failures else runs.device.counters.allocated_peak - 1
    found = runs.train("found", *failures, capacity=capacity, **settings)
    said, plan = runs.said, plan_of(found)
    problem = plan["run"]["reasons"][0]
    assert problem.startswith("step 1 needed more device memory than planned (")
    assert {problem, "step 1 is run once more with this smaller plan"} <= set(said)
    assert plan["fits"]
    assert plan["device"]["limits"] == [{"name": "of the test", "bytes": 64 * 2**20}]
    for name, value in chosen(found).items():
        written = json.dumps(value).strip('"')
        assert f"\n{name}: {written}\n" in (found / "config.yaml").read_text()

    assert plan_of(unlimited)["device"]["bytes"] > plan["device"]["bytes"]
    assert chosen(unlimited) != chosen(found)
    from_the_start = runs.train("from the start", **(settings | chosen(found)))
    assert results(found) == results(from_the_start)


def test_a_step_that_has_updated_weights_ends_the_run(runs: Runs) -> None:
    """Here it is the first one after a resume. Its weights, some old and some new, are not saved."""
    settings = {"update_in_backward": True, "save_strategy": "steps", "save_steps": 1}
    point = runs.train("whole", **settings) / "checkpoint-1"
    with pytest.raises(DoesNotFitError, match="after some weights were updated") as raised:
        runs.train("failed", FIRST, resume_from_checkpoint=str(point), **settings)
    assert "It would fit with\n  --" in str(raised.value)
    assert not list((runs.folder / "failed").glob("checkpoint-*"))


def test_a_second_failure_ends_the_run(runs: Runs) -> None:
    with pytest.raises(DoesNotFitError, match="with a smaller plan, too") as raised:
        runs.train("run", LAST, FIRST)
    assert "step 1 is run once more with this smaller plan" in runs.said
    assert "It would fit with\n  --" in str(raised.value)


def test_settings_of_the_user_are_kept(runs: Runs) -> None:
    """A plan that leaves nothing open has no smaller one, but it has remedies."""
    given = {"activation_checkpoints": "host", "head_chunk_tokens": 512, "device_micro_batch_size": 6}
    with pytest.raises(DoesNotFitError, match="step 1 needed more device memory than planned") as raised:
        runs.train("run", FIRST, **given)
    assert "It would fit with" in str(raised.value)


def test_a_later_step_is_not_repeated(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "finish_step", lambda self, step: runs.device.failures.append(LAST))
    with pytest.raises(DeviceFaultError, match="after step 1"):
        runs.train("run")


def test_a_step_that_has_counted_is_not_repeated() -> None:
    """Its weights are already those after the step."""
    optimizer, calls = SimpleNamespace(num_steps=0, num_skipped=0, partial_update=False), []

    def train_step() -> None:
        calls.append(1)
        optimizer.num_steps += 1
        raise torch.OutOfMemoryError("CUDA out of memory.")

    training: Any = SimpleNamespace(optimizer=optimizer)
    first_step = FirstStep(None, training)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        first_step.run(train_step, 1)
    assert len(calls) == 1


def test_the_first_step_after_a_resume(runs: Runs) -> None:
    """Another residency changes no bit. A step that does not fit at all leaves the checkpoints as they are."""
    settings = {"head_chunk_tokens": 8, "save_strategy": "steps", "save_steps": 1}
    expected = results(runs.train("whole", **settings))
    point = {"resume_from_checkpoint": str(runs.folder / "whole" / "checkpoint-1")}
    resumed = runs.train("resumed", LAST, **settings, **point)
    assert "step 2 is run once more with this smaller plan" in runs.said
    assert not any("rounding" in line for line in runs.said)
    assert results(resumed)[0] == expected[0]

    with pytest.raises(DoesNotFitError, match="step 2 needed more device memory"):
        runs.train("failed", LAST, LAST, **settings, **point)
    (saved,) = (runs.folder / "failed").glob("checkpoint-*")
    assert saved.name == "checkpoint-1"  # of the same state as the one that it was resumed from
    assert results(runs.train("failed", **settings))[0] == expected[0]


def test_a_resumed_run_warns_if_a_smaller_plan_rounds_otherwise(runs: Runs) -> None:
    settings = {"head_chunk_tokens": 8, "activation_checkpoints": "host", "save_strategy": "steps", "save_steps": 1}
    point = runs.train("whole", **settings) / "checkpoint-1"
    runs.train("resumed", LAST, resume_from_checkpoint=str(point), **settings)
    assert any("resume: warning: device_micro_batch_size: None -> " in line for line in runs.said)
