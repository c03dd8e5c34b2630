"""A run that is interrupted after any step and resumed ends in the same bits, the same metrics and the same output."""

import json
import math
import re
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import xxhash

import horizon_lm
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.errors import ConfigError, DeviceFaultError, HorizonError
from horizon_lm.planning.arithmetic.catalog import own_profile_path
from horizon_lm.runs.checkpoints import checkpoint
from horizon_lm.runs.checkpoints.part_reader import PartReader
from horizon_lm.runs.checkpoints.unit_file import UnitFile
from horizon_lm.runs.training import resume as resume_module
from horizon_lm.runs.training import train
from tests.e2e import resuming, tiny
from tests.e2e.resuming import SAVING, LogTheFifth, Runs, as_dpo, assert_resumes, resume
from tests.support import handmade_outlines
from tests.support.dying_devices import Death, dying
from tests.support.thinned_cases import thinned


def test_resume_after_every_step_is_exact(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes(runs, base | {"max_steps": 13, "logging_steps": 3}, tmp_path, range(1, 13))


def test_resume_after_a_signal_is_exact(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    """No checkpoint is due, but the signal writes one; neither it nor other checkpoints change the training."""
    expected, _ = runs.train({**base, "output_dir": str(tmp_path / "whole"), "save_strategy": "no"})
    cut = {**base, "output_dir": str(tmp_path / "cut")}
    runs.interrupt(cut, stop_after=5)
    outcome, lines = runs.train(cut)
    assert f"resume: from {tmp_path / 'cut' / 'checkpoint-5'} (step 5 of 8)" in lines
    assert outcome == expected


def flip(folder: Path) -> None:
    path = folder / "units" / "block1.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (flip, "units/block1.safetensors is damaged"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    runs: Runs, base: dict[str, Any], tmp_path: Path, damage: str
) -> None:
    """The run goes on, exactly; without any good checkpoint, it does not begin anew."""
    change, message = DAMAGES[damage]
    base = {**base, "save_strategy": "steps", "save_steps": 1}
    expected, _ = runs.train({**base, "output_dir": str(tmp_path / "whole")})
    cut = {**base, "output_dir": str(tmp_path / "cut")}
    runs.interrupt(cut, stop_after=5)
    change(tmp_path / "cut" / "checkpoint-5")
    shutil.copytree(tmp_path / "cut", tmp_path / "hopeless")
    outcome, lines = runs.train(cut)
    warning, used = (line for line in lines if line.startswith("resume: "))
    assert warning.startswith(f"resume: warning: {tmp_path / 'cut' / 'checkpoint-5'}")
    assert message in warning
    assert used == f"resume: from {tmp_path / 'cut' / 'checkpoint-4'} (step 4 of 8)"
    assert outcome == expected
    change(tmp_path / "hopeless" / "checkpoint-4")
    named = rf"(?s)checkpoint-5.*{message}.*checkpoint-4.*{message}.*no checkpoint can be used"
    with pytest.raises(ConfigError, match=named):
        horizon_lm.train({**cut, "output_dir": str(tmp_path / "hopeless")}, print_fn=lambda line: None)


IN_BACKWARD = {"update_in_backward": True, "max_grad_norm": 0}


@pytest.mark.parametrize("in_backward", thinned([True, False], every=2))
def test_run_whose_device_dies_is_resumed_exactly(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_backward: bool
) -> None:
    """The state is saved from host memory, without the device, while a checkpoint may be on its way."""
    settings = {**base, "save_strategy": "steps", "save_steps": 2} | (IN_BACKWARD if in_backward else {})
    expected, _ = runs.train({**settings, "output_dir": str(tmp_path / "whole")})
    saved = set()
    for at in (0, 40, 90):
        cut, death = {**settings, "output_dir": str(tmp_path / f"cut-{at}")}, Death()
        with monkeypatch.context() as patch:
            patch.setattr(
                "horizon_lm.engine.opening.attaching.open_device", lambda *_, death=death: dying(CpuDevice, death)
            )
            runs.before_step[5] = lambda death=death, at=at: death.arm(at)
            with pytest.raises(DeviceFaultError, match=r"the device failed after step [45] .*the device died"):
                horizon_lm.train(cut, print_fn=lambda line: None)
        runs.before_step.clear()
        outcome, lines = runs.train(cut)
        saved.add(next(line for line in lines if line.startswith("resume: from")).split("checkpoint-")[1].split()[0])
        assert outcome == expected, f"operation {at}, {death.killed_by}"
    assert "4" in saved


# Settings that may change

FREE = {
    "activation_checkpoints": 2, "resident_blocks": 1, "resident_graphs": 1, "logging_steps": 4, "save_steps": 3,
    "eval_steps": 5, "sample_steps": 7, "save_bandwidth": "1GiB", "step_timeout": 900.0,
}  # fmt: skip


def test_moments_that_the_plan_has_chosen_are_kept(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the plan would choose on the machine that goes on."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    slow = handmade_outlines.machine(
        device="cpu", device_bandwidth=1e12, host_bandwidth={"2": 1e6}
    )  # so updates are exposed
    slow.save(own_profile_path())
    cut = {**base, "output_dir": str(tmp_path / "cut"), "moments": "auto", "max_steps": 3}
    runs.interrupt(cut, stop_after=2)
    own_profile_path().unlink()
    runs.train(cut)
    assert [loop.optimizer.moments.kind for loop in runs.loops] == ["bfloat16", "bfloat16"]
    runs.train({**cut, "output_dir": str(tmp_path / "new")})
    assert runs.loops[-1].optimizer.moments.kind == "float32"


def test_settings_that_change_no_number_may_change(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    expected, _ = runs.train({**base, **SAVING, "output_dir": str(whole)})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        outcome = resume(runs, base | {"dataset_num_proc": 2} | FREE, whole, 3, tmp_path / "changed")
    finally:
        torch.set_num_threads(before)
    for name in ("memory", "model"):
        assert outcome[name] == expected[name]


@pytest.mark.parametrize(
    "change",
    [{"device_micro_batch_size": 1}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}],
    ids=["micro-batch", "accumulation"],
)
def test_another_split_of_a_step_changes_its_rounding_only(
    runs: Runs, base: dict[str, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    """With a rate that is not adaptive to the rounding: AdamW divides small gradients by their own size."""
    settings = {**base, "precision": "float32", "adam_epsilon": 1e-3}
    whole = tmp_path / "whole"
    runs.train({**settings, **SAVING, "output_dir": str(whole)})
    expected = weights(runs)
    lines: list[str] = []
    point = {"resume_from_checkpoint": str(whole / "checkpoint-3"), "output_dir": str(tmp_path / "changed")}
    horizon_lm.train(settings | change | point, print_fn=lines.append)
    assert any(line.startswith(f"resume: warning: {sorted(change)[0]}: ") for line in lines)
    difference = (weights(runs) - expected).norm() / expected.norm()
    assert 0 < difference < 1e-6


def weights(runs: Runs) -> torch.Tensor:
    model = runs.loops[-1].model
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 1e-3}, "learning_rate: 0.003 -> 0.001"),
        ({"seed": 7}, "seed: 42 -> 7"),
        ({"max_length": 32}, "max_length: 64 -> 32"),
        ({"per_device_train_batch_size": 4}, "rows per step: 3 -> 4"),
        ({"test_split_size": 4}, "test_split_size"),
    ],
)
def test_changes_of_the_trajectory_are_rejected(
    runs: Runs, base: dict[str, Any], tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    cut = {**base, "output_dir": str(tmp_path / "cut")}
    runs.interrupt(cut, stop_after=2)
    with pytest.raises(ConfigError, match=f"cannot be resumed.*{named}.*resume_with_changes"):
        horizon_lm.train(cut | change, print_fn=lambda line: None)
    assert (tmp_path / "cut" / "checkpoint-2").is_dir()


@pytest.mark.parametrize(
    ("settings", "name", "change"),
    [({}, "moments", "bfloat16"), ({"use_peft": True}, "lora_target_modules", ["q_proj"])],
)
def test_a_change_that_needs_another_state_is_never_allowed(
    runs: Runs, base: dict[str, Any], tmp_path: Path, settings: dict[str, Any], name: str, change: Any
) -> None:
    cut = {**base, **settings, "output_dir": str(tmp_path / "cut")}
    runs.interrupt(cut, stop_after=1)
    with pytest.raises(ConfigError, match=f"have changed: .*restore {name}, without which") as caught:
        horizon_lm.train(cut | {name: change, "seed": 7, "resume_with_changes": True}, print_fn=lambda line: None)
    assert f"{name}: " in str(caught.value)
    assert "seed: 42 -> 7" in str(caught.value)
    assert "resume_with_changes" not in str(caught.value)


def test_moments_that_the_plan_has_chosen_may_be_named(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    cut = {**base, "moments": "auto", "output_dir": str(tmp_path / "cut")}
    runs.interrupt(cut, stop_after=1)
    with pytest.raises(ConfigError, match=r"moments: auto -> float32\. .*or set resume_with_changes"):
        horizon_lm.train(cut | {"moments": "float32"}, print_fn=lambda line: None)
    runs.train(cut | {"moments": "float32", "resume_with_changes": True})


def test_another_folder_is_a_remedy_only_where_no_checkpoint_is_demanded(
    runs: Runs, base: dict[str, Any], tmp_path: Path
) -> None:
    cut = {**base, "output_dir": str(tmp_path / "cut")}
    runs.interrupt(cut, stop_after=1)
    for wanted, is_remedy in (("auto", True), (True, False), (str(tmp_path / "cut"), False)):
        with pytest.raises(ConfigError, match=r"seed: 42 -> 7\. Remedy: restore them") as caught:
            horizon_lm.train(cut | {"seed": 7, "resume_from_checkpoint": wanted}, print_fn=lambda line: None)
        assert ("choose another output_dir" in str(caught.value)) == is_remedy


def test_changed_rows_are_rejected_unless_allowed(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    rows = tiny.alpaca_rows(14)
    copy = tiny.write_jsonl(tmp_path / "copy.jsonl", rows)
    cut = {**base, "output_dir": str(tmp_path / "cut"), "datasets": [{"path": str(copy)}]}
    runs.interrupt(cut, stop_after=2)
    moved = cut | {"datasets": base["datasets"], "output_dir": str(tmp_path / "moved")}  # the same rows elsewhere
    runs.train(moved | {"resume_from_checkpoint": str(tmp_path / "cut" / "checkpoint-2")})
    tiny.write_jsonl(copy, [*rows[:-1], {**rows[-1], "output": "Sleeps."}])
    with pytest.raises(ConfigError, match="the training rows"):
        horizon_lm.train(cut, print_fn=lambda line: None)
    _, lines = runs.train(cut | {"resume_with_changes": True})
    assert any("the run differs from an uninterrupted one: the training rows" in line for line in lines)


@pytest.mark.parametrize("place", ["copy", "other"])
def test_other_weights_of_the_model_are_rejected(runs: Runs, base: dict[str, Any], tmp_path: Path, place: str) -> None:
    """A resumed run does not start from them: it would go on with the former model, whatever the settings name."""
    for name in ("model", "copy", "other"):
        shutil.copytree(base["model_name_or_path"], tmp_path / name)
    cut = {**base, "output_dir": str(tmp_path / "cut"), "model_name_or_path": str(tmp_path / "model")}
    runs.interrupt(cut, stop_after=2)
    runs.interrupt(cut | {"model_name_or_path": str(tmp_path / "copy")}, stop_after=3)  # the same weights
    weights = tmp_path / place / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    changed = cut | {"model_name_or_path": str(tmp_path / place)}
    named = {"copy": str(tmp_path / "copy"), "other": f"{tmp_path / 'copy'} -> {tmp_path / 'other'}"}[place]
    with pytest.raises(ConfigError, match=rf"the weights of the model \({named}; .*resume_with_changes"):
        horizon_lm.train(changed, print_fn=lambda line: None)
    _, lines = runs.train(changed | {"resume_with_changes": True})
    assert any("goes on with those of its checkpoint" in line for line in lines)


def test_a_run_that_is_shorter_than_its_checkpoint_says_so(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    cut = {**base, "output_dir": str(tmp_path / "cut")}
    runs.interrupt(cut, stop_after=2)
    _, lines = runs.train(cut | {"max_steps": 1, "resume_with_changes": True})
    assert [line for line in lines if "nothing is trained" in line] == [
        "resume: warning: the checkpoint is at step 2, and the run ends at step 1: nothing is trained; raise max_steps or num_train_epochs "
        "to go on"
    ]
    longer = {
        "max_steps": 3,
        "output_dir": str(tmp_path / "longer"),
        "resume_from_checkpoint": str(tmp_path / "cut" / "checkpoint-2"),
    }
    assert "nothing is trained" not in "".join(runs.train(cut | longer | {"resume_with_changes": True})[1])


def test_changes_that_are_allowed_take_effect(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    """The schedule goes on at its step, with the rates of the new settings."""
    cut = {**base, "output_dir": str(tmp_path / "cut"), "weight_decay": 0.0}
    runs.interrupt(cut, stop_after=2)
    changes = {
        "learning_rate": 1e-3,
        "weight_decay": 0.2,
        "adam_beta2": 0.9,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
    }
    outcome, _ = runs.train(cut | changes | {"resume_with_changes": True})
    lines = [line for line in outcome["metrics"] if "loss" in line]
    rates = [1e-3 * (1 + math.cos(math.pi * (step - 2) / 6)) / 2 for step in range(2, 8)]
    assert [line["learning_rate"] for line in lines if line["step"] > 2] == pytest.approx(rates)
    assert next(line["rows_seen"] for line in lines if line["step"] == 3) == 3 + 3 + 2
    groups = runs.loops[-1].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.2, 0]
    assert {group["betas"] for group in groups} == {(0.9, 0.9)}


def test_other_versions_are_rejected(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = {**base, "output_dir": str(tmp_path / "cut")}
    runs.interrupt(cut, stop_after=2)
    installed = resume_module.installed_packages()
    monkeypatch.setattr(resume_module, "installed_packages", lambda: {**installed, "transformers": "4.0.0"})
    with pytest.raises(ConfigError, match=r"transformers: .* -> 4\.0\.0"):
        horizon_lm.train(cut, print_fn=lambda line: None)


@pytest.mark.usefixtures("drawn")
def test_trackers_and_pictures_go_on(base: dict[str, Any], tmp_path: Path) -> None:
    """TensorBoard has each point once, in the folder of the first part; loss.png has both parts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cut = {**base, "output_dir": str(tmp_path / "cut"), "report_to": ["tensorboard"], "logging_steps": 1}
    with pytest.MonkeyPatch.context() as patch:
        Runs(patch).interrupt(cut | {"save_strategy": "steps", "save_steps": 3}, stop_after=4)
    metrics = resuming.untimed(tmp_path / "cut" / "metrics.jsonl")
    horizon_lm.train(
        cut | {"resume_from_checkpoint": str(tmp_path / "cut" / "checkpoint-3")}, print_fn=lambda line: None
    )
    assert resuming.untimed(tmp_path / "cut" / "metrics.jsonl")[: len(metrics)] == metrics
    (folder,) = {path.parent for path in (tmp_path / "cut").rglob("events.out.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [point.step for point in events.Scalars("train/loss")] == list(range(1, 9))
    assert (tmp_path / "cut" / "loss.png").stat().st_size > 0


# Controls: what is left out of a checkpoint is missed

SLABS = {"weights": "", "low halves": ".low", "first moments": ".exp_avg", "second moments": ".exp_avg_sq",
         "first scales": ".exp_avg_scale", "second scales": ".exp_avg_sq_scale"}  # fmt: skip
VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "steps of the optimizer": lambda content: content["optimizer"].update(step=0),
    "steps of the parameters": lambda content: content["optimizer"].update(
        steps=dict.fromkeys(content["optimizer"]["steps"], 0)
    ),
    "seed of the rounding": lambda content: content["optimizer"].update(seed=99),
    "skipped steps": lambda content: content["optimizer"].update(skipped={"num": 0, "num_consecutive": 0}),
    "step": lambda content: content["state"].update(step=3),
    "schedule": lambda content: content["state"]["scheduler"].update(last_epoch=0),
    "window of the metrics": lambda content: content["state"]["metrics"].update(
        sums={name: type(value)() for name, value in content["state"]["metrics"]["sums"].items()}
    ),
    "lines of the metrics": lambda content: content["state"]["files"].update(
        {"metrics.jsonl": {"bytes": 0, "xxh3_128": xxhash.xxh3_128_hexdigest(b"")}}
    ),
    "eval loss before": lambda content: content["state"].update(loss_before=None),
    "best metric": lambda content: content["state"]["best"].update(metric=None, num_worse=0),
    "callbacks": lambda content: content["state"]["callbacks"]["callbacks"].clear(),
}


@pytest.fixture(scope="module")
def whole(
    base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path, dict[str, Any]]:
    """Return the settings, the folder and the outcome of a run with state of every kind."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    settings = base | {
        "precision": "fp32_master", "moments": "8bit", "non_finite": "skip", "early_stopping_patience": 2,
        "early_stopping_threshold": 10.0, "logging_steps": 3, "eval_steps": 2,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        runs = Runs(patch)
        runs.before_step[2] = lambda: spoil(runs)
        outcome, _ = runs.train({**settings, **SAVING, "output_dir": str(folder)}, callbacks=[LogTheFifth()])
    return settings, folder, outcome


def spoil(runs: Runs) -> None:
    """Let the gradient of the next step be infinite, so that it is skipped."""
    (param, *_) = runs.loops[-1].model.parameters()
    handle = param.register_post_accumulate_grad_hook(lambda each: (each.grad.fill_(torch.inf), handle.remove()))


def test_nothing_is_left_out(runs: Runs, whole: Any, tmp_path: Path) -> None:
    settings, folder, expected = whole
    assert expected["result"][3] == 1
    assert resume(runs, settings, folder, 4, tmp_path / "run", callbacks=[LogTheFifth()]) == expected


@pytest.mark.parametrize("kind", [*SLABS, *VALUES])
def test_what_is_left_out_is_missed(
    runs: Runs, whole: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, folder, expected = whole
    if kind in SLABS:
        monkeypatch.setattr(PartReader, "read", without(SLABS[kind]))
    else:
        read_state = checkpoint.read_state

        def changed(path: Path) -> dict[str, Any]:
            content = read_state(path)
            VALUES[kind](content)
            return content

        for module in (checkpoint, resume_module):
            monkeypatch.setattr(module, "read_state", changed)
    try:
        found = resume(runs, settings, folder, 4, tmp_path / "run", callbacks=[LogTheFifth()])
    except HorizonError:
        assert kind in (
            "weights",
            "step",
        )  # weights that were not read may be NaN; the order of the rows is another one
    else:
        assert found != expected


def test_a_reference_that_is_left_out_is_missed(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference of DPO: weights of a checkpoint are not those of the reference, so it cannot be computed from them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings, whole = as_dpo(base, tmp_path) | {"max_steps": 5}, tmp_path / "whole"
    expected, _ = runs.train({**settings, **SAVING, "output_dir": str(whole)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another cache"))
    assert resume(runs, settings, whole, 3, tmp_path / "same") == expected
    with monkeypatch.context() as patched:
        patched.setattr(train, "read_tensors", lambda path: None)
        found = resume(runs, settings, whole, 3, tmp_path / "computed")
        assert found["metrics"] != expected["metrics"]
        assert found["model"] != expected["model"]
        patched.setattr(train, "read_tensors", lambda path: {})
        with pytest.raises(ConfigError, match="has no reference for them"):
            resume(runs, settings, whole, 3, tmp_path / "none")


def without(suffix: str) -> Callable[[PartReader, UnitFile], None]:
    """Return a method that reads all slabs of a unit but one."""
    read_all = PartReader.read

    def read(reader: PartReader, file: UnitFile) -> None:
        kept = [(section, bytes(section.memory())) for section in file.sections if section.suffix == suffix]
        read_all(reader, file)
        for section, content in kept:
            section.memory()[:] = content

    return read


# The date of a run

DATED = "{{ '<|im_start|>system\\n' + strftime_now('%Y-%m-%d %H:%M:%S.%f') + '<|im_end|>\\n' }}" + tiny.CHATML


def test_a_run_keeps_its_date(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed on another day, without its cached rows, goes on with the date on which it began."""
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    settings = {**base, "chat_template_path": str(template), **SAVING}
    whole = tmp_path / "whole"
    expected, lines = runs.train({**settings, "output_dir": str(whole)})
    today = date.today().isoformat()
    assert f"chat template: prints the date of the run, {today}" in lines
    monkeypatch.setattr(resume_module, "today", lambda: "2031-01-01")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert resume(runs, settings, whole, 4, tmp_path / "later") == expected
    state = json.loads((tmp_path / "later" / "checkpoint-7" / "training_state.json").read_text())["state"]
    assert state["data"]["day"] == today
    # The control: a new run has the date of its day.
    other, lines = runs.train({**settings, "output_dir": str(tmp_path / "new")})
    assert "chat template: prints the date of the run, 2031-01-01" in lines
    assert other["model"] != expected["model"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": 13}, "the training rows (11 -> 10 rows, "),
        ({"output": "Sleeps."}, " tokens, "),
        ({"template": tiny.CHATML + " "}, " tokens, another chat template)"),
        ({"letter": "B"}, "the training rows (other tokens in 11 rows)"),
        ({"weight": 2.0}, "the order of the rows (weights: [1.0] -> [2.0])"),
    ],
)
def test_what_differs_in_the_rows_is_named(
    runs: Runs, base: dict[str, Any], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """No change of rows is reported with the same number on both sides."""

    def settings(
        rows: int = 14, output: str = "", letter: str = "A", template: str = tiny.CHATML, weight: float = 1.0
    ) -> Any:
        content = [{**row, "input": letter, "output": row["output"] + output} for row in tiny.alpaca_rows(rows)]
        path = tiny.write_jsonl(tmp_path / "rows.jsonl", content)
        (tmp_path / "template.jinja").write_text(template)
        return {
            **base, "datasets": [{"path": str(path), "weight": weight}], "output_dir": str(tmp_path / "cut"),
            "chat_template_path": str(tmp_path / "template.jinja"), "max_steps": 3,
        }  # fmt: skip

    runs.interrupt(settings(), stop_after=1)
    with pytest.raises(ConfigError) as caught:
        horizon_lm.train(settings(**changes), print_fn=lambda line: None)
    found = str(caught.value)
    assert named in found
    assert not [change for change in re.findall(r"(\S+) -> (\S+)", found) if change[0] == change[1]]
