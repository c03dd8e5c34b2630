"""Run files and overrides: accepted values, and the place and remedy in each error."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from horizon_lm.common.optimizers import by_other_name
from horizon_lm.errors import ConfigError, DataError
from horizon_lm.runs.config import SCHEMAS
from horizon_lm.runs.config.foreign.tables import remedies
from horizon_lm.runs.config.load import parse_overrides, read_run_config, split_arguments
from horizon_lm.runs.config.text import describe_settings, page, to_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft.yaml"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    return path


@pytest.fixture
def write(tmp_path: Path, rows: Path):
    def write_run_file(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(f"model_name_or_path: some/model\ndatasets: {rows}\n{text}")
        return str(path)

    return write_run_file


def error_of(*args) -> str:
    with pytest.raises(ConfigError) as caught:
        read_run_config(*args)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL uses deprecated names of transformers
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_every_trl_setting_is_supported_or_explained(objective: str) -> None:
    """Shared settings have TRL's defaults, and each setting that is not supported has a remedy."""
    import trl

    theirs = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}[objective](use_cpu=True, bf16=False)
    names = {field.name for field in dataclasses.fields(theirs)}
    ours = SCHEMAS[objective].model_fields
    defaults = {name: getattr(theirs, name) for name in names & set(ours)}
    defaults["report_to"] = defaults["report_to"] or "none"  # TrainingArguments turns it into a list
    defaults["optim"] = by_other_name(defaults["optim"])[0]  # transformers has several names for one
    # A checkpoint has 12 bytes a parameter, so two are kept; an interrupted run goes on.
    defaults |= {"save_total_limit": 2, "resume_from_checkpoint": "auto"}
    assert {name: ours[name].default for name in defaults} == defaults
    all_ours = set().union(*(schema.model_fields for schema in SCHEMAS.values()))
    assert names - set(ours) <= set(remedies()) | all_ours
    assert not set(remedies()) & all_ours


def test_example_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    config = read_run_config(str(EXAMPLE), ["--model", "some/model"])  # its own is downloaded first
    assert config.device_memory == 300 * 2**20
    assert config.rows_per_step == 8


def test_resolved_file_reads_back_unchanged(write, tmp_path: Path, rows: Path) -> None:
    config = read_run_config(
        write(f"eval_datasets: [{{path: {rows}, columns: {{prompt: question}}}}]\nwarmup_steps: 0.1\n"),
        ["--device-memory", "1.5GiB", "--seed=7"],
    )
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert read_run_config(str(again)) == config
    assert (config.device_memory, config.seed, config.warmup_steps) == (3 * 2**29, 7, 0.1)


def test_unknown_setting_error_has_place_and_remedy(write) -> None:
    assert error_of(write("lerning_rate: 1e-5\n")).endswith(
        "run.yaml:3:1: lerning_rate is not a setting; did you mean learning_rate?"
    )
    assert "use warmup_steps; values below 1 are a fraction" in error_of(write("warmup_ratio: 0.1\n"))
    assert error_of(write("cutoff_len: 8\n")).endswith("cutoff_len is not a setting; it is called max_length here")
    assert error_of(write("bf16: true\n")).endswith(
        "bf16 is not a setting; weights are bf16 with an fp32 master by default (precision); remove it"
    )
    assert error_of(write("held_blocks: 2\n")).endswith(
        "held_blocks is not a setting; it is now called resident_blocks"
    )
    assert error_of(write(""), ["--lerning-rate", "1"]).startswith("--lerning-rate is not a setting")


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("lora", "use use_peft: true; without it, all weights are trained"),
        ("finetuning_type", "use use_peft: true; without it, all weights are trained"),  # LLaMA-Factory
        ("qlora", "use use_peft: true and load_in_4bit: true"),
        ("quantization_bit", "use load_in_4bit: true"),
        ("max_samples", "write it into an entry of datasets: {path: ..., max_samples: ...}"),
        ("data", "write it into datasets"),
        ("max_steps_per_epoch", "did you mean max_steps?"),
        (
            "dpo_beta",
            "of this objective, only of objective: dpo; remove it, or change the objective",
        ),  # Axolotl calls it so
        ("lora_rank", "it is called lora_r here"),
        ("sdp_attention", "use attn_implementation: sdpa"),
        ("train_on_inputs", "use train_on: all to train on prompts, too"),
        ("dion_momentum", "this optimizer is not supported; see optim; remove it"),
        ("num_generations", "it is for GRPO; use horizon_lm.trainer(GRPOTrainer) in a script (docs/trainer.md)"),
        ("do_train", "horizon-lm train always trains; remove it"),
        ("do_eval", "eval sets are evaluated as eval_strategy says; remove it"),
        ("do_predict", "answer prompts with horizon-lm generate once the model is trained; remove it"),
        ("ref_model", "the reference is the model that the run starts from; remove it"),
        ("zebra", "run horizon-lm train --settings for a list of all settings"),
    ],
)
def test_names_of_other_trainers_lead_to_ours(write, typed: str, remedy: str) -> None:
    """A name that users of TRL, LLaMA-Factory or Axolotl type is answered with the setting that does the same, or with why there is none."""
    message = error_of(write(""), [f"--{typed}", "true"])
    assert re.fullmatch(rf"--{typed} is not a setting(;|) {re.escape(remedy)}", message)


def test_all_errors_of_a_file_are_reported_together(write) -> None:
    message = error_of(write("learning_rate: -1\nprecision: fp16\n"), ["--max_steps", "many"])
    heading, *lines = message.splitlines()
    assert heading == "3 invalid settings:"
    assert [part in " ".join(lines) for part in ("run.yaml:3:1", "run.yaml:4:1", "--max_steps: 'many'")] == [True] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("head: whole\nhead_chunk_tokens: 8\n", "is not used with head: whole"),
        ("per_device_eval_batch_size: 2\n", "is not used without eval_datasets"),
        ("lr_scheduler_type: constant\nwarmup_steps: 3\n", "is not used by lr_scheduler_type"),
        ("device: mps\n", "must be auto, cpu, cuda or cuda:N; a Mac computes on its CPU"),
        ("learning_rate: .nan\n", "must be a finite number"),
        ("use_peft: true\nlora_target_modules: all\n", "'all': write all-linear for all linear layers"),
        ("use_peft: true\nlora_target_modules: q_proj,v_proj\n", "'q_proj,v_proj': write a list: [q_proj, v_proj]"),
        ("use_peft: true\nlora_modules_to_save: lm_head, norm\n", "write a list: [lm_head, norm]"),
        ("trainable: [lm_head, layers.1.*]\n", 'write one text of patterns: "lm_head|layers.1.*"'),
        ("eval_datasets: 7\n", "must be a path"),
        (
            "trainable: lm_head\nfreeze_vision_tower: false\n",
            "is not used with trainable: lm_head; remove one of the two",
        ),
        ("trainable: lm_head\nfreeze_language_model: true\n", "is not used with trainable: lm_head"),
        ("freeze_language_model: true\n", "set freeze_vision_tower or freeze_multi_modal_projector to false"),
        (
            "freeze_vision_tower: false\nuse_peft: true\nadapter_name_or_path: a\n",
            "has its own layers, so freeze_vision_tower is not used",
        ),
    ],
)
def test_invalid_values_are_rejected(write, text: str, message: str) -> None:
    error = error_of(write(text))
    assert message in error
    assert f"run.yaml:{2 + len(text.splitlines())}:1: " in error


@pytest.mark.parametrize(
    ("size", "remedy"),
    [("1024", "; write a unit, such as 1024GiB"), ("1KiB", ""), ("2 kb", ""), ("'7'", "; write a unit, such as 7GiB")],
)
def test_a_unit_is_asked_for_only_if_there_is_none(write, size: str, remedy: str) -> None:
    assert error_of(write(f"device_memory: {size}\n")).endswith(f": must be at least 4096 bytes{remedy}")


def test_errors_of_checks_follow_those_of_settings() -> None:
    """An error of several lines stays one; the kind is that of all errors, or ConfigError."""
    rows, model = DataError("2 invalid rows:\nrows.jsonl:1: a\nrows.jsonl:2: b"), ConfigError("model: c")
    with pytest.raises(ConfigError) as raised:
        read_run_config(None, ["--model", "m", "--max_steps", "x"], without_rows=True, checks=lambda _: [rows, model])
    assert str(raised.value).splitlines() == [
        "3 mistakes:", "--max_steps: 'x': must be a valid integer", "2 invalid rows:", "  rows.jsonl:1: a", "  rows.jsonl:2: b",
        "model: c",
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"^2 invalid rows:\nrows.jsonl:1: a\nrows.jsonl:2: b$"):
        read_run_config(None, ["--model", "m"], without_rows=True, checks=lambda _: [rows])


def test_missing_settings_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("")
    assert f"{path}: model_name_or_path is missing. Model to start from" in error_of(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1\n", "run.yaml:2:1: not valid YAML"),
        (b"a: 1\na: 2\n", "run.yaml:2:1: not valid YAML"),
        (b"- a\n", "one setting per line"),
        (b"1: a\n", "1 is not the name of a setting"),
        (b"\xff\xfe", "not a text file in UTF-8"),
    ],
)
def test_unreadable_files_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert message in error_of(str(path))


@pytest.mark.parametrize(
    ("name", "content", "is_of_rows"),
    [
        ("a.jsonl", '{"text": "a"}\n', True),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"}\n', True),
        ("a.jsonl.gz", "\x1f", True),
        ("a.csv", "prompt,completion\na,b\n", True),
        ("a.parquet", "PAR1", True),
        ("a.json", '\n[\n{"text": "a"}]\n', True),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', True),
        ("a.json", '{"seed": 1}\n', False),
        ("a.json", '{\n"seed": 1\n}\n', False),
        ("a.txt", "Once there was a keeper.\nShe kept: the light.\n", True),
        ("a.txt", "# mine\nseed: 1\n", False),
        ("a.txt", "", False),
    ],
)
def test_a_file_of_rows_is_no_run_file(tmp_path: Path, name: str, content: str, is_of_rows: bool) -> None:
    path = tmp_path / name
    path.write_text(content)
    remedy = f"{path}: this is a file of rows; name a run file with datasets: {path} (horizon-lm init writes one)"
    assert (error_of(str(path)) == remedy) == is_of_rows


def test_missing_file(tmp_path: Path) -> None:
    assert "No such file" in error_of(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "overrides", "max_steps"),
    [
        ("num_train_epochs: 2\n", ["--max_steps", "5"], 5),
        ("max_steps: 5\n", ["--num_train_epochs", "2"], -1),
        ("max_steps: 5\nnum_train_epochs: 2\n", [], 5),  # as in transformers, whatever the order
        ("num_train_epochs: 2\nmax_steps: 5\n", [], 5),
    ],
)
def test_length_of_a_run(write, text: str, overrides: list[str], max_steps: int) -> None:
    """Steps take precedence over epochs, and the command line over the file."""
    assert read_run_config(write(text), overrides).max_steps == max_steps


WITH_EVALUATION = (
    "test_split_size: 2\neval_strategy: steps\neval_steps: 5\nper_device_eval_batch_size: 4\neval_packing: true\n"
)


@pytest.mark.parametrize(
    ("text", "overrides", "kept", "dropped"),
    [
        (
            WITH_EVALUATION,
            ["--eval_strategy", "no"],
            {"eval_packing": True, "per_device_eval_batch_size": 4},
            ["eval_steps"],
        ),
        (WITH_EVALUATION, ["--eval_strategy", "epoch"], {"eval_packing": True}, ["eval_steps"]),
        (WITH_EVALUATION, ["--test_split_size", "null"], {"eval_packing": None}, ["eval_strategy", "eval_steps"]),
        (
            WITH_EVALUATION + "packing: true\npacking_strategy: wrapped\n",
            ["--packing", "false"],
            {"eval_packing": True},
            [],
        ),
        ("head_chunk_tokens: 8\n", ["--head", "whole"], {}, ["head_chunk_tokens"]),
        ("save_strategy: epoch\nsave_total_limit: 2\n", ["--save_strategy", "no"], {}, ["save_total_limit"]),
        ("num_train_epochs: 2\n", ["--max_steps", "-1"], {"num_train_epochs": 2}, []),
    ],
)
def test_settings_made_unused_by_an_override_are_dropped(
    write, text: str, overrides: list[str], kept: dict[str, object], dropped: list[str]
) -> None:
    config = read_run_config(write(text), overrides)
    assert {name: getattr(config, name) for name in kept} == kept
    assert [name for name in dropped if getattr(config, name) != type(config).model_fields[name].default] == []


def test_the_best_checkpoint_is_kept_within_the_limit_without_others(write) -> None:
    text = "save_strategy: 'no'\nsave_total_limit: 1\n"
    assert "save_total_limit: 1: is not used" in error_of(write(text))
    best = "eval_strategy: steps\ntest_split_size: 0.1\nload_best_model_at_end: true\n"
    assert read_run_config(write(text + best)).save_total_limit == 1


def test_settings_unused_before_an_override_are_still_rejected(write) -> None:
    assert "eval_steps: 5: is not used" in error_of(write("eval_steps: 5\n"), ["--save_strategy", "no"])
    assert "--eval_steps: 5: is not used" in error_of(
        write(WITH_EVALUATION), ["--eval_strategy", "no", "--eval_steps", "5"]
    )


def test_arguments_are_split_into_file_and_overrides() -> None:
    assert split_arguments(["--seed", "1", "run.yaml", "--precision=bf16"]) == (
        "run.yaml",
        ["--seed", "1", "--precision=bf16"],
    )
    assert parse_overrides(["--seed", "1", "--output_dir", "007", "--max-length=null"]) == {
        "seed": 1,
        "output_dir": "007",
        "max_length": None,
    }
    for tokens, message in (
        (["--seed"], "has no value"),
        (["--seed", "1", "--seed=2"], "given twice"),
        (["--seed", "[1"], "cannot be read"),
        (["seed", "1"], "is not an override"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_overrides(tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a.yaml b.yaml", "expected one run file, but got 2: a.yaml, b.yaml"),
        ("a.yaml --seed 1 b.yaml", "expected one run file, but got 2: a.yaml, b.yaml"),
        ("a.yaml --datasets b c d --seed 1", "got 3: a.yaml, c, d; write a list in brackets: --datasets '[b, c, d]'"),
        ("a.yaml --lora-target-modules=b c", "a.yaml, c; write a list in brackets: --lora-target-modules '[b, c]'"),
        ("a.yaml learning_rate=1e-4", "learning_rate=1e-4 is no run file; write --learning_rate 1e-4"),
        ("'+sample_prompts=a b'", "+sample_prompts=a b is no run file; write --sample_prompts 'a b'"),
    ],
)
def test_arguments_as_other_commands_have_them(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(message)}$"):
        split_arguments(shlex.split(arguments))
    assert split_arguments(["a=1.yaml"]) == ("a=1.yaml", [])


def test_every_setting_has_a_description() -> None:
    for line in describe_settings().splitlines():
        name, _, description = line.partition(": ")
        assert description.endswith(".") or name.startswith("# "), name


def test_settings_page_is_up_to_date() -> None:
    assert (EXAMPLE.parents[1] / "docs" / "generated" / "settings.md").read_text(encoding="utf-8") == page()
