"""The command line: the files of a run, exit codes and error messages."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import horizon_lm
from horizon_lm import cli
from horizon_lm.cli import generate
from horizon_lm.common.quantities import format_bytes
from horizon_lm.model.files import checkpoint_loader
from horizon_lm.planning.arithmetic.catalog import published
from horizon_lm.runs.training import busy_cores
from tests.e2e import tiny
from tests.e2e.command import run


@pytest.fixture
def run_file(tmp_path: Path, model: Path) -> Path:
    train = tiny.write_jsonl(tmp_path / "train.jsonl", tiny.alpaca_rows(12))
    held_out = tiny.write_jsonl(tmp_path / "held_out.jsonl", tiny.alpaca_rows(3))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model_name_or_path: {model}\ndatasets: {train}\neval_datasets: {held_out}\noutput_dir: {tmp_path / 'run'}\n"
        "device: cpu\nper_device_train_batch_size: 4\nlearning_rate: 1e-2\nlogging_steps: 2\n"
    )
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_train_and_use_the_model(tmp_path: Path, model: Path, run_file: Path) -> None:
    result = run("train", run_file, "--precision", "float32")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "run"
    lines = result.stdout.splitlines()
    assert f"run folder: {folder}" in lines
    assert f"horizon-lm generate {folder / 'model'}" in result.stdout
    assert "horizon-lm merge" not in result.stdout  # as for adapters

    first, *steps, last = metrics(folder)
    assert [line["step"] for line in steps] == [1, 2, 4, 6, 8, 9]
    assert steps[-1]["epoch"] == 3
    assert last["eval_loss"] < first["eval_loss"] - 1
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["tokens_total"] > steps[-1]["tokens_trained"] > 0
    needed = {"grad_norm", "learning_rate", "tokens_per_second", "trained_tokens_per_second", "device_bytes_peak"}
    assert needed | {"host_bytes", "seconds", "eta_seconds"} <= set(steps[0])

    # the exported model has the trained weights: Hugging Face computes the same eval loss from it
    exported = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.chat_template == tiny.CHATML
    total, count = 0.0, 0
    for row in tiny.alpaca_rows(3):
        question = {"role": "user", "content": row["instruction"]}
        whole = [question, {"role": "assistant", "content": row["output"]}]
        prefix = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = tokenizer.apply_chat_template(whole, return_dict=True, return_tensors="pt")["input_ids"]
        targets = slice(len(prefix), ids.shape[1] - 1)  # the answer and its end token, without the newline after it
        with torch.no_grad():
            logits = exported(input_ids=ids).logits[0]
        total += torch.nn.functional.cross_entropy(
            logits[targets.start - 1 : targets.stop - 1], ids[0, targets], reduction="sum"
        ).item()
        count += targets.stop - targets.start
    assert count == last["eval_tokens"]
    assert total / count == pytest.approx(last["eval_loss"], rel=1e-5)

    answer = run("generate", folder / "model", "What does the keeper do on night 2?", "--max-new-tokens", 12)
    assert answer.exit_code == 0
    assert "Counts" in answer.stdout
    repeated = run("train", folder / "config.yaml", "--output_dir", tmp_path / "again")
    assert repeated.exit_code == 0
    one, two = (load_file(path / "model" / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_metrics_have_the_cores_that_other_programs_use(
    tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_cores, "_LEAST_SECONDS", 0)
    monkeypatch.setattr(busy_cores, "missing_cores", lambda processes: 1.25)
    assert run("train", run_file, "--max_steps", 2).exit_code == 0
    steps = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert [line["cores_of_others"] for line in steps] == [1.25] * len(steps) != []


def test_sampling_uses_the_seed(model: Path) -> None:
    texts = [
        run("generate", model, "Who?", "--max_new_tokens", 8, "--temperature", 1, "--seed", seed).stdout
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.usefixtures("drawn")
def test_finished_run_is_not_overwritten(tmp_path: Path, run_file: Path) -> None:
    assert run("train", run_file, "--max_steps", 1).exit_code == 0
    before = (tmp_path / "run/model/model.safetensors").read_bytes()
    rejected = run("train", run_file)
    assert rejected.exit_code == 2
    assert "holds a finished run" in rejected.stderr
    # a run that does not fit changes nothing
    failed = run("train", run_file, "--overwrite_output_dir", "true", "--device_memory", "8KiB")
    assert failed.exit_code == 3
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == before
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") == 3
    assert run("train", run_file, "--overwrite_output_dir", "true").exit_code == 0
    assert (tmp_path / "run/model/model.safetensors").read_bytes() != before
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "config.yaml", "loss.png", "metrics-1.jsonl", "metrics.jsonl", "model", "plan.json",
    ]  # fmt: skip


# Bad input: exit code, place, remedy


def bad_setting(files: Path) -> list[str]:
    return ["--lerning_rate", "1"]


def missing_model(files: Path) -> list[str]:
    return ["--model_name_or_path", str(files / "nowhere" / "model")]


def not_a_causal_lm(files: Path) -> list[str]:
    tiny.save_model(files / "t5")
    (files / "t5" / "config.json").write_text('{"model_type": "t5"}')
    return ["--model_name_or_path", str(files / "t5")]


def cross_layer_state(files: Path) -> list[str]:
    tiny.save_model(files / "gemma3n")
    config = {
        "model_type": "gemma3n_text", "tie_word_embeddings": False, "hidden_size": 32, "intermediate_size": [48] * 4, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    }  # fmt: skip
    (files / "gemma3n" / "config.json").write_text(json.dumps(config))
    return ["--model_name_or_path", str(files / "gemma3n")]


def config_that_contradicts_itself(files: Path) -> list[str]:
    file = tiny.save_model(files / "odd") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "none_such"}))
    return ["--model_name_or_path", str(files / "odd")]


def no_weights(files: Path) -> list[str]:
    (tiny.save_model(files / "empty") / "model.safetensors").unlink()
    return ["--model_name_or_path", str(files / "empty")]


def truncated_weights(files: Path) -> list[str]:
    file = tiny.save_model(files / "torn") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return ["--model_name_or_path", str(files / "torn")]


def missing_tensor(files: Path) -> list[str]:
    file = tiny.save_model(files / "part") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    return ["--model_name_or_path", str(files / "part")]


def no_template(files: Path) -> list[str]:
    return ["--model_name_or_path", str(tiny.save_model(files / "base", chat_template=None))]


def no_tokenizer(files: Path) -> list[str]:
    for file in tiny.save_model(files / "mute").glob("tokenizer*"):
        file.unlink()
    return ["--model_name_or_path", str(files / "mute")]


def missing_rows(files: Path) -> list[str]:
    return ["--datasets", str(files / "nowhere.jsonl")]


def malformed_row(files: Path) -> list[str]:
    rows = [*tiny.alpaca_rows(2), {"instruction": "a"}]
    return ["--datasets", str(tiny.write_jsonl(files / "bad.jsonl", rows))]


def output_is_a_file(files: Path) -> list[str]:
    (files / "taken").write_text("")
    return ["--output_dir", str(files / "taken")]


def unknown_model_name(files: Path) -> list[str]:
    return ["--model_name_or_path", "smollm2-135m-instruct"]


def kernel_that_is_not_installed(files: Path) -> list[str]:
    return ["--attn_implementation", "flash_attention_2"]


def no_cuda(files: Path) -> list[str]:
    return ["--device", "cuda"]


@pytest.mark.parametrize(
    ("prepare_input", "code", "message"),
    [
        (bad_setting, 2, "did you mean learning_rate?"),
        (missing_model, 2, "nowhere/model': no such folder"),
        (not_a_causal_lm, 2, "'t5' has no causal language model"),
        (cross_layer_state, 2, "shares keys and values"),
        (config_that_contradicts_itself, 2, "transformers cannot build this model"),
        (no_weights, 2, "safetensors"),
        (truncated_weights, 2, "model.safetensors"),
        (missing_tensor, 2, "model.layers.1.mlp.up_proj.weight"),
        (no_template, 2, "has no chat template"),
        (no_tokenizer, 2, "has no tokenizer that can be read"),
        (missing_rows, 2, "no such file"),
        (malformed_row, 4, "bad.jsonl:3: field 'output' is missing"),
        (output_is_a_file, 2, "taken is a file"),
        (
            unknown_model_name,
            2,
            "smollm2-135m-instruct is neither a folder nor a model that could be fetched",
        ),
        pytest.param(
            kernel_that_is_not_installed,
            2,
            "attn_implementation: flash_attention_2 cannot be used here",
            marks=pytest.mark.skipif(find_spec("flash_attn") is not None, reason="it is installed"),
        ),
        pytest.param(no_cuda, 2, "cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
    ],
)
def test_bad_input(tmp_path: Path, run_file: Path, prepare_input: Any, code: int, message: str) -> None:
    result = run("train", run_file, *prepare_input(tmp_path))
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "run" / "model").exists()


def test_bad_arguments_of_generate(model: Path) -> None:
    for arguments, message in (
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--device-memory", "plenty"], "plenty"),
        (["--precision", "fp8"], "fp8"),
    ):
        result = run("generate", model, "Who?", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    assert run("generate", model, " ").exit_code == 2
    assert run("generate", model / "nowhere/there", "Who?").exit_code == 2


def test_messages_of_commands_name_no_settings_of_run_files(model: Path, tmp_path: Path) -> None:
    nowhere, mute = tmp_path / "nowhere" / "there", Path(no_tokenizer(tmp_path)[1])
    for arguments, message in (
        (("generate", nowhere, "Who?"), f"{nowhere} is not a folder"),
        (("generate", mute, "Who?"), f"{mute} has no tokenizer"),
        (("generate", model, "Who?", "--base", nowhere), f"--base: {nowhere} is not a folder"),
        (("merge", nowhere, tmp_path / "merged"), f"{nowhere} is not a folder"),
        (("export", nowhere, tmp_path / "gguf", "--format", "gguf"), f"{nowhere} is not a folder"),
        (("plan", "--model", nowhere), f"--model: '{nowhere}': no such folder"),
        (("export", nowhere, tmp_path / "exported"), f"{nowhere}: no such folder"),
        (("checkpoints", nowhere), f"{nowhere}: no such folder"),
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stderr.startswith(f"error: {message}")) == (2, True), result.stderr


def test_a_folder_with_a_gguf_file_alone(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    for arguments in (("generate", tmp_path, "Who?"), ("plan", "--model", tmp_path)):
        result = run(*arguments)
        assert (result.exit_code, "gguf_file: b.gguf (--gguf-file b.gguf)" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("more", [(), ("--gguf-file", "b.gguf")])
def test_a_gguf_file_in_place_of_its_folder(tmp_path: Path, more: tuple[str, ...]) -> None:
    (file := tmp_path / "b.gguf").write_bytes(b"GGUF")
    for arguments in (("generate", file, "Who?"), ("eval", file, "--tasks", "a")):
        result = run(*arguments, *more)
        assert (result.exit_code, result.stderr) == (
            2,
            f"error: {file} is a file; write {tmp_path} --gguf-file b.gguf\n",
        )


def test_system_prompt_of_generate(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []

    def record(model: Any, tokenizer: Any, inputs: Any, *others: Any) -> None:
        rendered.append(tokenizer.decode(inputs["input_ids"][0]))

    monkeypatch.setattr(generate, "_answer", record)
    assert run("generate", model, "Who?", "--system", "Be brief.").exit_code == 0
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>"
    assert rendered == [f"{start}\n<|im_start|>assistant\n"]

    only_users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    for name, template, message in (
        ("dropped", only_users, "drops the system prompt"),
        ("rejected", no_system, "the chat template rejects the prompt: no system role"),
        ("plain", None, "needs a chat template"),
    ):
        folder = tiny.save_model(tmp_path / name, chat_template=template)
        result = run("generate", folder, "Who?", "--system", "Be brief.")
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


# Files of the folder that a user names, and the remedy. A run of adapters has no config.json anywhere.
_OF_RUNS = {
    "finished": (["model/config.json", "checkpoint-4/manifest.json"], "is the folder of a run; its model is in {}/model"),
    "adapters": (["model/adapter_config.json", "checkpoint-4/manifest.json"], "is the folder of a run; its model is in {}/model"),
    "stopped": (["checkpoint-4/manifest.json"], "its last checkpoint is {0}/checkpoint-4 (horizon-lm export {0}/checkpoint-4 OUT)"),
    "checkpoint": (["manifest.json", "config.json", "adapter_config.json"], "horizon-lm export {} OUT"),
}  # fmt: skip
_COMMANDS = {
    "generate": ["generate", "{}", "Who?"], "merge": ["merge", "{}", "{}-out"], "export": ["export", "{}", "{}-out"],
    "export to GGUF": ["export", "{}", "{}-out.gguf", "--format", "gguf"],
}  # fmt: skip


@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize("kind", _OF_RUNS)
def test_commands_point_to_the_model_of_a_run(kind: str, command: str, tmp_path: Path) -> None:
    folder, (files, remedy) = tmp_path / "run", _OF_RUNS[kind]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    if (kind, command) == ("checkpoint", "export"):
        return  # this is the remedy
    result = run(*(word.format(folder) for word in _COMMANDS[command]))
    assert (result.exit_code, remedy.format(folder) in result.stderr) == (2, True), result.stderr


def test_a_model_beside_checkpoints_is_no_folder_of_a_run(tmp_path: Path) -> None:
    """As transformers' Trainer writes them."""
    for name in ("config.json", "checkpoint-4/manifest.json", "checkpoint-4/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert "checkpoint-4" not in run("generate", tmp_path, "Who?").stderr


def test_non_finite_loss_leaves_the_weights(tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row has a token whose embedding is NaN: earlier steps are kept, and the message names the row."""
    monkeypatch.setattr(
        checkpoint_loader, "require_finite", lambda *args: None
    )  # otherwise such a checkpoint is rejected
    poisoned = tiny.save_model(tmp_path / "poisoned")
    file = poisoned / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][tiny.build_tokenizer()("Z")["input_ids"][0]] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    rows = tiny.alpaca_rows(12)
    rows[7]["instruction"] += "Z"
    data = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    arguments = ["--model_name_or_path", poisoned, "--datasets", data, "--per_device_train_batch_size", "1"]
    result = run("train", run_file, *arguments, "--logging_steps", "1")
    assert result.exit_code == 5
    assert "rows.jsonl:8" in result.stderr
    step = int(result.stderr.split("step ")[1].split(":")[0])
    assert step > 1, "choose a seed for which the row is not the first"
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, *range(1, step)]
    assert not (tmp_path / "run" / "model").exists()


def test_help_and_version() -> None:
    overview = run("--help")
    assert overview.exit_code == 0
    assert "75 interrupted" in " ".join(overview.output.split())
    assert "torch" in run("version").output
    assert run("--version").output == run("version").output
    settings = run("train", "--settings").output
    assert "per_device_train_batch_size (8)" in settings
    assert "One of linear, cosine, cosine_with_restarts" in settings


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("plan", "--gpu", 2), "--gpus"),
        (("plan", "--modle=m", "--device", "h200"), "--model"),
        (("plan", "--price-per-kw", 1), "--price-per-kwh"),
        (("inspect", "--btches", 3), "--batches"),
        (("train", "--setings"), "--settings"),
        (("merge", "a", "b", "--bsae", "c"), "--base"),
        (("plan", "--model", "Qwen/Qwen2.5-7B", "--device", "rtx490"), "rtx-4090"),
        (("trian", "run.yaml"), "'train'"),
    ],
)
def test_a_mistyped_option_machine_or_command(arguments: tuple[Any, ...], meant: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, meant in result.stderr.rpartition("rror")[2]) == (2, True), result.stderr


@pytest.mark.parametrize("command", ["plan", "train", "inspect"])
def test_a_model_in_the_place_of_a_run_file(command: str, model: Path) -> None:
    for name in ("Qwen/Qwen2.5-7B", model):
        result = run(command, name, "--device", "cpu")
        assert (result.exit_code, result.stderr) == (
            2,
            f"error: {name} is no run file; if it is a model, write --model {name}\n",
        )


def test_settings_are_no_mistyped_options() -> None:
    assert "use per_device_train_batch_size" in run("plan", "--batch_size", 3, "--model", "m").stderr


def test_an_interrupt_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    result = run("plan", "--model", "m")
    assert (result.exit_code, result.stderr) == (75, "interrupted; files written before are intact\n")


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_help_names_every_option_in_full(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut in a terminal of 80 columns, or of 50."""
    for width in (80, 50):
        monkeypatch.setenv("COLUMNS", str(width))
        text = run(command, "--help").output
        parameters = cli._LazyCommand(command).make_context(command, [], resilient_parsing=True).command.params
        names = {
            name
            for each in parameters
            if not getattr(each, "hidden", False)
            for name in (*each.opts, *each.secondary_opts)
            if name.startswith("--")
        }
        assert names <= set(text.replace(",", " ").split())
        assert "…" not in text


@pytest.mark.parametrize("command", ["train", "inspect"])
def test_the_model_is_an_option_as_in_plan(
    command: str, tmp_path: Path, model: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file.write_text(run_file.read_text().replace(str(model), "nowhere/else"))
    monkeypatch.setattr("horizon_lm.runs.training.train.train", lambda config: print(config.model_name_or_path))
    result = run(command, run_file, "--model", model)
    assert (result.exit_code, str(model) in result.stdout or command == "inspect") == (0, True), result.stderr
    twice = run(command, run_file, "--model", model, "--model_name_or_path", model)
    assert (twice.exit_code, "--model_name_or_path and --model are both given; keep one" in twice.stderr) == (2, True)


def test_help_needs_no_torch() -> None:
    """`--help` imports no slow package."""
    code = (
        "import sys; import horizon_lm.cli; print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_of_plan_lists_the_profiles() -> None:
    words = set(
        " ".join(run("plan", "--help").output.split()).replace("- ", "-").replace(",", " ").replace(".", " ").split()
    )
    assert published().keys() <= words


@pytest.mark.parametrize(
    ("words", "expected"), [("horizon-lm re", ["report"]), ("horizon-lm export --fo", ["--format"])]
)
def test_shell_completion(monkeypatch: pytest.MonkeyPatch, words: str, expected: list[str]) -> None:
    monkeypatch.setenv("_HORIZON_LM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert run().stdout.split() == expected


def test_inspect_reports_what_is_left_of_the_rows(tmp_path: Path, run_file: Path) -> None:
    """Rows that are left out, with their places, and the date that a template prints, in words and as JSON."""
    long = {"instruction": "q" * 200, "output": "Never seen."}
    tiny.write_jsonl(tmp_path / "train.jsonl", [*tiny.alpaca_rows(4), long, long])
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%Y') }}" + tiny.CHATML)
    options = ("--max_length", 64, "--chat_template_path", tmp_path / "dated.jinja")
    told = run("inspect", run_file, *options).stdout
    found = json.loads(run("inspect", run_file, *options, "--json").stdout)
    numbers = {name: found["numbers"][name] for name in ("rows_read", "left_out", "rows", "date_in_template")}
    assert numbers == {"rows_read": 6, "left_out": 2, "rows": 4, "date_in_template": date.today().isoformat()}
    problem = next(each for each in found["findings"] if each["what"] == "are cut before any answer to train on")
    assert (problem["rows"], problem["places"]) == (2, [f"{tmp_path / 'train.jsonl'}:5-6"])
    assert re.search(rf"^date in template +{date.today().isoformat()} *$", told, re.M)
    assert (
        f"rows that are cut before any answer to train on: 2 ({tmp_path / 'train.jsonl'}:5-6); they are left out"
        in told
    )


@pytest.mark.parametrize(
    ("template", "settings"),
    [(tiny.CHATML, {}), (None, {}), (None, {"use_peft": True, "lora_target_modules": "all-linear"})],
)
def test_the_last_lines_of_a_run_work_as_they_are_printed(
    template: str | None, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tokenizers with and without a chat template, adapters, and a path with spaces and quotes."""
    monkeypatch.chdir(tmp_path)
    model = tiny.save_model(tmp_path / "base", template)
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"text": "The keeper waits."}] * 2)
    run_settings = {
        "model_name_or_path": str(model), "datasets": [str(rows)], "output_dir": "a run's \"folder\"", "device": "cpu",
        "max_steps": 1, "save_strategy": "no", **settings,
    }  # fmt: skip
    said: list[str] = []
    horizon_lm.train(run_settings, print_fn=said.append)
    printed = [line[2:] for line in said[-1].splitlines() if line.startswith("  ")]
    commands = [shlex.split(line) for line in printed if line.startswith("horizon-lm ")]
    assert [command[1] for command in commands] == ["generate", *(["merge"] if settings else []), "report"]
    for command in commands:
        result = run(*command[1:])
        assert result.exit_code == 0, result.output
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec("\n".join(line for line in printed if not line.startswith("horizon-lm ")), {})
    assert "generated_text" in output.getvalue()


def test_train_and_inspect_print_the_same_findings(tmp_path: Path, run_file: Path) -> None:
    tiny.write_jsonl(tmp_path / "train.jsonl", [*tiny.alpaca_rows(6), *tiny.alpaca_rows(2)])
    inspected, trained = (
        [line for line in run(command, run_file, "--max_steps", 1).stdout.splitlines() if " rows that " in line]
        for command in ("inspect", "train")
    )
    assert [
        line for line in inspected if line.startswith("warning: training data: rows that are copies of others: 2 (")
    ]
    assert trained == inspected


def test_a_checkpoint_has_one_size(tmp_path: Path, run_file: Path) -> None:
    """That of all its files, also of the tokenizer and the manifest."""
    trained = run("train", run_file, "--max_steps", 2, "--save_steps", 1).stdout
    folder = tmp_path / "run" / "checkpoint-1"
    size = format_bytes(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    assert f"\n{folder}: {size} in " in trained
    assert f"  {size}  " in run("checkpoints", folder).stdout
