"""Run files and overrides: what is accepted, and where an error points."""

import dataclasses
from pathlib import Path

import pytest

from horizon_lm.config import SCHEMAS
from horizon_lm.config.load import describe_settings, parse_overrides, read_run_config, split_arguments
from horizon_lm.config.text import page, to_yaml
from horizon_lm.config.unsupported import ELSEWHERE
from horizon_lm.errors import ConfigError

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


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own settings of transformers' old names
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_every_setting_of_trl_is_ours_or_explained(objective: str) -> None:
    """Names, defaults, and for each name that is missing here what does its work: users see these sentences."""
    import trl

    theirs = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}[objective](use_cpu=True, bf16=False)
    names = {field.name for field in dataclasses.fields(theirs)}
    ours = SCHEMAS[objective].model_fields
    defaults = {name: getattr(theirs, name) for name in names & set(ours)}
    defaults["report_to"] = defaults["report_to"] or "none"  # TrainingArguments makes a list of it
    assert {name: ours[name].default for name in defaults} == defaults
    of_others = set().union(*(schema.model_fields for schema in SCHEMAS.values()))
    assert names - set(ours) <= set(ELSEWHERE) | of_others
    assert not set(ELSEWHERE) & of_others


def test_the_example_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    config = read_run_config(str(EXAMPLE))
    assert config.device_memory == 300 * 2**20
    assert config.rows_per_step == 8


def test_resolved_file_reads_back_as_the_same(write, tmp_path: Path, rows: Path) -> None:
    config = read_run_config(
        write(f"eval_datasets: [{{path: {rows}, columns: {{prompt: question}}}}]\nwarmup_steps: 0.1\n"),
        ["--device-memory", "1.5GiB", "--seed=7"],
    )
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert read_run_config(str(again)) == config
    assert (config.device_memory, config.seed, config.warmup_steps) == (3 * 2**29, 7, 0.1)


def test_unknown_setting_names_place_and_remedy(write) -> None:
    assert error_of(write("lerning_rate: 1e-5\n")).endswith(
        "run.yaml:3:1: lerning_rate is not a setting; did you mean learning_rate?"
    )
    assert "warmup_steps takes a share" in error_of(write("warmup_ratio: 0.1\n"))
    assert error_of(write("cutoff_len: 8\n")).endswith("cutoff_len is not a setting; it is called max_length here")
    assert error_of(write("held_blocks: 2\n")).endswith(
        "held_blocks is not a setting; it is called resident_blocks now"
    )
    assert error_of(write(""), ["--lerning-rate", "1"]).startswith("--lerning_rate is not a setting")


def test_all_errors_of_a_file_are_told_at_once(write) -> None:
    message = error_of(write("learning_rate: -1\nprecision: fp16\n"), ["--max_steps", "many"])
    heading, *lines = message.splitlines()
    assert heading == "3 settings cannot be used:"
    assert [part in " ".join(lines) for part in ("run.yaml:3:1", "run.yaml:4:1", "--max_steps: 'many'")] == [True] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("head: whole\nhead_chunk_tokens: 8\n", "is not used with head: whole"),
        ("num_train_epochs: 2\nmax_steps: 10\n", "takes the place of num_train_epochs"),
        ("per_device_eval_batch_size: 2\n", "is not used without eval_datasets"),
        ("lr_scheduler_type: constant\nwarmup_steps: 3\n", "is not used by lr_scheduler_type"),
        ("warmup_steps: 1.5\n", "a whole number of steps, or a share"),
        ("device_memory: lots\n", "device_memory"),
        ("device: tpu\n", "must be auto, cpu, cuda or cuda:N"),
        ("learning_rate: .nan\n", "must be a finite number"),
        ("max_steps: 0\n", "at least 1, or -1"),
        ("seed: true\n", "must be a valid integer"),
        ("eval_datasets: nowhere.jsonl\n", "there is no such file"),
        ("eval_datasets: 7\n", "must be a path"),
    ],
)
def test_values_that_cannot_be_used(write, text: str, message: str) -> None:
    told = error_of(write(text))
    assert message in told
    assert f"run.yaml:{2 + len(text.splitlines())}:1: " in told


def test_missing_settings_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("")
    assert f"{path}: model_name_or_path is missing. The model to start from" in error_of(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1\n", "run.yaml:2:1: not valid YAML"),
        (b"a: 1\na: 2\n", "run.yaml:2:1: not valid YAML"),
        (b"- a\n", "one setting a line"),
        (b"1: a\n", "1 is not the name of a setting"),
        (b"\xff\xfe", "not a text file in UTF-8"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert message in error_of(str(path))


def test_missing_file(tmp_path: Path) -> None:
    assert "No such file" in error_of(str(tmp_path / "none.yaml"))


def test_length_on_the_command_line_replaces_that_of_the_file(write) -> None:
    config = read_run_config(write("num_train_epochs: 2\n"), ["--max_steps", "5"])
    assert (config.max_steps, config.num_train_epochs) == (5, 3.0)


EVALUATED = (
    "test_split_size: 2\neval_strategy: steps\neval_steps: 5\nper_device_eval_batch_size: 4\neval_packing: true\n"
)


@pytest.mark.parametrize(
    ("text", "overrides", "kept", "gone"),
    [
        (EVALUATED, ["--eval_strategy", "no"], {"eval_packing": True, "per_device_eval_batch_size": 4}, ["eval_steps"]),
        (EVALUATED, ["--eval_strategy", "epoch"], {"eval_packing": True}, ["eval_steps"]),
        (EVALUATED, ["--test_split_size", "null"], {"eval_packing": None}, ["eval_strategy", "eval_steps"]),
        (EVALUATED + "packing: true\npacking_strategy: wrapped\n", ["--packing", "false"], {"eval_packing": True}, []),
        ("head_chunk_tokens: 8\n", ["--head", "whole"], {}, ["head_chunk_tokens"]),
        ("save_strategy: epoch\nsave_total_limit: 2\n", ["--save_strategy", "no"], {}, ["save_total_limit"]),
        ("num_train_epochs: 2\n", ["--max_steps", "-1"], {"num_train_epochs": 2}, []),
    ],
)
def test_what_a_change_makes_useless_gives_way(
    write, text: str, overrides: list[str], kept: dict[str, object], gone: list[str]
) -> None:
    config = read_run_config(write(text), overrides)
    assert {name: getattr(config, name) for name in kept} == kept
    assert [name for name in gone if getattr(config, name) != type(config).model_fields[name].default] == []


def test_what_was_useless_before_is_an_error_still(write) -> None:
    assert "eval_steps: 5: is not used" in error_of(write("eval_steps: 5\n"), ["--save_strategy", "no"])
    assert "--eval_steps: 5: is not used" in error_of(write(EVALUATED), ["--eval_strategy", "no", "--eval_steps", "5"])


def test_arguments_are_told_apart() -> None:
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
    with pytest.raises(ConfigError, match="one run file"):
        split_arguments(["a.yaml", "b.yaml"])


def test_every_setting_has_a_sentence() -> None:
    for line in describe_settings().splitlines():
        name, _, sentence = line.partition(": ")
        assert sentence.endswith(".") or name.startswith("# "), name


def test_the_page_of_settings_is_true() -> None:
    assert (EXAMPLE.parents[1] / "docs" / "settings.md").read_text(encoding="utf-8") == page()
