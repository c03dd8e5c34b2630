"""Starter files, both our own and those translated from other trainers, are valid and train."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.errors import ConfigError
from horizon_lm.runs.config.load import as_config, read_run_config
from horizon_lm.runs.config.rules import WITHOUT_ROWS
from horizon_lm.runs.config.run import SCHEMAS
from horizon_lm.tools.translate import translate_file
from tests.e2e import tiny
from tests.e2e.command import run

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the model and the rows that the foreign files name."""
    monkeypatch.chdir(tmp_path)
    tiny.save_model(tmp_path / "base-model")
    rows = [
        {"messages": [{"role": "user", "content": f"Night {n}?"}, {"role": "assistant", "content": f"{n} stars."}]}
        for n in range(20)
    ]
    tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    tiny.write_jsonl(tmp_path / "keepers.json", tiny.alpaca_rows(20))
    info = {
        "keepers": {
            "file_name": "keepers.json",
            "columns": {"prompt": "instruction", "query": "input", "response": "output"},
        }
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    for path in FOREIGN.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    return tmp_path


EXPECTED: dict[str, dict[str, Any]] = {
    "trl": {
        "packing": True, "max_length": 96, "warmup_steps": 0.1, "train_on": "assistant", "rows_per_step": 8, "seed": 3,
        "learning_rate": 2e-5, "lr_scheduler_type": "cosine",
    },
    "llamafactory": {
        "max_length": 128, "warmup_steps": 0.1, "test_split_size": 0.2, "eval_strategy": "steps", "eval_steps": 2,
        "dataset_num_proc": 2, "rows_per_step": 2, "trust_remote_code": True, "overwrite_output_dir": True,
    },
    "axolotl": {
        "max_length": 128, "packing": True, "eval_packing": False, "moments": "8bit", "rows_per_step": 2,
        "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 0.25, "save_strategy": "steps", "save_steps": 0.5,
        "attn_implementation": "varlen", "learning_rate": 2e-5,
    },
}  # fmt: skip
ACCEPTED = {
    "trl": (),
    "llamafactory": ("template: the model's own", "cutoff_len: "),
    "axolotl": ("excess_length_strategy: Axolotl drops",),
}
LEFT_OUT = {
    "trl": ("gradient_checkpointing: every block is recomputed", "bf16: weights are bf16 with an fp32 master by default"),
    "llamafactory": ("deepspeed: weights are always streamed", "ddp_timeout: rank_timeout limits", "plot_loss: "),
    "axolotl": ("gradient_checkpointing: ", "bf16: ", "pad_to_sequence_len: ", "special_tokens: ", "dataset_prepared_path: "),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of multiprocessing about forking with threads
@pytest.mark.parametrize("name", list(EXPECTED))
def test_foreign_files_translate_and_train(work: Path, name: str) -> None:
    accept = [word for line in ACCEPTED[name] for word in ("--accept", line.partition(":")[0])]
    printed = run("init", "--from", f"{name}.yaml", *accept)
    assert printed.exit_code == 0, printed.stderr
    assert re.search(rf"^[0-9]+ settings of {name}\.yaml left out, changing nothing:\n", printed.stderr, re.M)
    for line in (*ACCEPTED[name], *LEFT_OUT[name]):
        assert line in printed.stdout
        assert f"\n  {line}" in printed.stderr
    (work / "ours.yaml").write_text(printed.stdout)
    config = read_run_config("ours.yaml")
    assert {key: getattr(config, key) for key in EXPECTED[name]} == EXPECTED[name]
    here = ["--device", "cpu", "--trust_remote_code", "false", "--max_steps", "3"]
    trained = run("train", "ours.yaml", *here)
    assert trained.exit_code == 0, trained.stderr
    assert (work / f"out-{name}" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("objective", ["sft", "pretrain", "dpo"])
def test_start_files_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str) -> None:
    printed = run("init", objective, "--full")
    assert printed.exit_code == 0
    (tmp_path / "run.yaml").write_text(printed.stdout)
    row = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    config = read_run_config(str(tmp_path / "run.yaml"), ["--datasets", str(row)])
    assert config.objective == objective
    # uncommented, the file sets every setting to its default
    whole = "".join(line.removeprefix("# ") + "\n" for line in printed.stdout.splitlines() if not line.startswith("##"))
    whole = whole[whole.index("objective:") :]
    whole = "\n".join(line for line in whole.splitlines() if not line.startswith("---"))
    (tmp_path / "whole.yaml").write_text(whole)
    assert read_run_config(str(tmp_path / "whole.yaml"), ["--datasets", str(row)]) == config

    short = run("init", objective)
    (tmp_path / "short.yaml").write_text(short.stdout)
    assert read_run_config(str(tmp_path / "short.yaml"), ["--datasets", str(row)]) == config
    assert 2 * len(short.stdout.splitlines()) < len(printed.stdout.splitlines())
    assert "--full" in short.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grpo"], "'grpo' is not an objective; choose one of sft, pretrain, dpo"),
        (["--from", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--from", "sft.py"], "sft.py is a Python script, not a file of settings; two changed lines"),
        (["--from", "other.yaml"], "not a file of TRL, LLaMA-Factory or Axolotl"),
        (["--from", "ours.yaml"], "ours.yaml: this is already a run file of Horizon-LM"),
        (["--from", "ppo.yaml"], "stage: 'ppo': this is a file of PPO, which is not a supported objective"),
    ],
)
def test_untranslatable_files_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "sft.py").write_text("from trl import SFTTrainer\n")
    (tmp_path / "ppo.yaml").write_text("stage: ppo\nfinetuning_type: full\n")
    (tmp_path / "ours.yaml").write_text(run("init", "dpo").stdout)
    result = run("init", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_model: m\nmicro_batch_size: 1\ndatasets: 5\n", "datasets: not in the format of Axolotl"),
        ("base_model: m\nmicro_batch_size: 1\ndatasets: [5]\n", "datasets: not in the format of Axolotl"),
        ("model_name_or_path: m\ncutoff_len: 8\ndataset: 5\n", "dataset: not in the format of LLaMA-Factory"),
        ("model_name_or_path: m\nstage: [[sft]]\ncutoff_len: 8\n", None),
        ("base_model: m\nmicro_batch_size: 1\nevals_per_epoch: often\n", None),
        ("model_name_or_path: m\nloss_type: [[a]]\n", None),
        ("model_name_or_path: m\nstage: []\ncutoff_len: 8\n", "does not say which command"),
        ("model_name_or_path: m\nlora_rank: {a: 5}\ncutoff_len: 8\n", "lora_rank: "),
        ("model_name_or_path: m\npacking: true\ndataset_mixture: [5]\n", "dataset_mixture: not in the format of TRL"),
        (
            "model_name_or_path: m\npacking: true\ndataset_mixture: {datasets: [5]}\n",
            "dataset_mixture: not in the format of TRL",
        ),
        ("model_name_or_path: m\ndeepspeed: /dev/zero\ncutoff_len: 8\n", "/dev/zero is a pipe, a device or a socket"),
    ],
)
def test_values_of_the_wrong_type(tmp_path: Path, text: str, message: str | None) -> None:
    """Values of the wrong type are rejected by name or left out with a reason, never with a traceback."""
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    result = run("init", "--from", path)
    if message is None:
        assert result.exit_code in (0, 2), result.stderr
    else:
        assert result.exit_code == 2
        assert message in result.stderr


ACCEPT = ("train_on", "cutoff_len", "excess_length_strategy", "warmup_ratio", "datasets.type", "optimizer")
TRL, LLAMA_FACTORY, AXOLOTL = (
    "model_name_or_path: m\ndataset_name: d\n",
    "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: keepers\n",
    "base_model: m\nmicro_batch_size: 1\ndatasets: [{path: d, type: chat_template}]\n",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # of two settings for the same thing, the other trainer's precedence decides, in either order
        (LLAMA_FACTORY + "warmup_ratio: 0.1\nwarmup_steps: 0\n", {"warmup_steps": 0.1}),
        (TRL + "warmup_steps: 0\nwarmup_ratio: 0.1\n", {"warmup_steps": 0.1}),
        (TRL + "warmup_steps: 5\nwarmup_ratio: 0.1\n", {"warmup_steps": 5}),
        (AXOLOTL + "warmup_ratio: 0.1\nwarmup_steps: 0\n", {"warmup_steps": 0}),
        (TRL + "bf16: false\n", {"precision": "float32"}),
        (TRL + "bf16: false\nfp16: false\n", {"precision": "float32"}),
        # all tokens of conversations and texts, but the completion of a prompt
        (TRL.replace("dataset_name: d", "datasets: [{path: a, columns: [messages]}]\nuse_liger_kernel: true"), {"train_on": "all"}),
        (
            TRL.replace("dataset_name: d", "datasets: [{path: a, columns: [prompt, completion]}]\nuse_liger_kernel: true"),
            {"train_on": "completion"},
        ),
        (TRL + "assistant_only_loss: true\ncompletion_only_loss: false\n", {"train_on": "assistant"}),
        (TRL + "completion_only_loss: true\nassistant_only_loss: false\n", {"train_on": "completion"}),
        # their defaults
        (LLAMA_FACTORY, {"max_length": 2048, "learning_rate": 5e-5}),
        (AXOLOTL, {"max_length": 512, "warmup_steps": 0.03, "lr_scheduler_type": "cosine"}),
        # values as lenient parsers read them
        (AXOLOTL + "learning_rate: '0.0003'\nadam_beta2: '0.95'\n", {"learning_rate": 3e-4, "adam_beta2": 0.95}),
        (LLAMA_FACTORY + "neat_packing: yes\nmask_history: on\n", {"packing": True, "train_on": "completion"}),
        (AXOLOTL + "max_steps: 10\nnum_epochs: 3\n", {"max_steps": 10}),
        # optimizers of ours that transformers does not have
        (LLAMA_FACTORY + "use_muon: true\n", {"optim": "muon"}),
        (AXOLOTL + "optimizer: muon\nadam_beta2: 0.99\n", {"optim": "muon", "adam_beta1": 0.95, "adam_beta2": 0.99}),
        (AXOLOTL + "optimizer: lion_8bit\n", {"optim": "lion", "moments": "8bit"}),
        # of adapters, Axolotl joins the two
        (AXOLOTL + "adapter: lora\nlora_target_linear: true\nlora_target_modules: [q_proj]\n", {"lora_target_modules": "all-linear"}),
        (AXOLOTL + "adapter: lora\nlora_target_linear: false\nlora_target_modules: [q_proj]\n", {"lora_target_modules": ["q_proj"]}),
        # settings of another objective
        (LLAMA_FACTORY + "pref_loss: sigmoid\npref_beta: 0.1\n", {"max_length": 2048}),
        (AXOLOTL + "pretraining_dataset: []\n", {"max_length": 512, "objective": None, "packing": None}),
        (TRL + "warmup_ratio: 0.1\nwarmup_steps: '0'\n", {"warmup_steps": 0.1}),
        (
            AXOLOTL + "val_set_size: 0.1\neval_steps: 0.2\nsave_steps: 5\n",
            {"eval_strategy": "steps", "eval_steps": 0.2, "save_strategy": "steps", "save_steps": 5},
        ),
        # rows
        (
            "model_name_or_path: m\nuse_liger_kernel: false\ndatasets: [{path: a, columns: [text]}, {path: b}]\n",
            {"datasets": [{"path": "a", "format": "text"}, {"path": "b"}]},
        ),
        (
            "model_name_or_path: m\nuse_liger_kernel: false\ndatasets: [{path: a}]\ndataset_text_field: body\n",
            {"datasets": [{"path": "a", "columns": {"text": "body"}}]},
        ),
        (
            "base_model: m\nmicro_batch_size: 1\npretraining_dataset: [{path: a, text_column: body}]\nmax_steps: 9\n",
            {"objective": "pretrain", "packing": True, "packing_strategy": "wrapped", "max_steps": 9,
             "datasets": [{"path": "a", "format": "text", "columns": {"text": "body"}}]},
        ),
        (
            "base_model: m\nsample_packing: true\ndatasets: [{path: a, type: completion}]\n",
            {"packing": True, "packing_strategy": "bfd_split", "datasets": [{"path": "a", "format": "text"}]},
        ),
        (
            AXOLOTL.replace("datasets:", "sample_packing: true\ntest_datasets: [{path: t, type: completion}]\ndatasets:"),
            {"packing": True, "packing_strategy": None},
        ),
        (
            "base_model: m\nrl: dpo\nmicro_batch_size: 1\ndatasets: [{path: a, type: chat_template.default}]\n",
            {"objective": "dpo", "datasets": [{"path": "a", "columns": {"prompt": "messages"}}]},
        ),
        (
            AXOLOTL.replace("type: chat_template", "type: {field_instruction: q, field_output: a, format: 'Q: {instruction}'}"),
            {"datasets": [{"path": "d", "format": "alpaca", "columns": {"instruction": "q", "output": "a"}}]},
        ),
        (AXOLOTL.replace("chat_template", "alpaca:chat"), {"datasets": [{"path": "d", "format": "alpaca"}]}),
        (AXOLOTL.replace("chat_template", "alpaca_chat.load_qa"), {"datasets": [{"path": "d", "format": "question_answer"}]}),
        (
            AXOLOTL.replace("type: chat_template", "type: chat_template, field_tools: functions, chat_template: tokenizer_default"),
            {"datasets": [{"path": "d", "format": "messages", "columns": {"tools": "functions"}}]},
        ),
        (
            AXOLOTL.replace("chat_template", "chatml.intel") + "rl: dpo\n",
            {"objective": "dpo", "datasets": [{"path": "d", "columns": {"instruction": "question"}}]},
        ),
        (
            AXOLOTL.replace("type: chat_template", "type: {field_prompt: ask, prompt_format: '{prompt}'}") + "rl: dpo\n",
            {"datasets": [{"path": "d", "columns": {"instruction": "ask"}}]},
        ),
        (  # what Axolotl does anyway
            "base_model: m\nmicro_batch_size: 1\n"
            "datasets: [{path: d, type: chat_template, roles_to_train: [assistant], train_on_eos: turn}]\n",
            {"datasets": [{"path": "d", "format": "messages"}]},
        ),
        (
            "base_model: m\nmicro_batch_size: 1\ndatasets: [{path: rows.jsonl, type: chat_template, split: train}]\n",
            {"datasets": [{"path": "rows.jsonl", "format": "messages"}]},
        ),
    ],
)  # fmt: skip
def test_translation_keeps_the_meaning(work: Path, text: str, expected: dict[str, Any]) -> None:
    (work / "theirs.yaml").write_text(text)
    objective = None if "base_model" in text or "stage" in text else "sft"
    settings = translate_file("theirs.yaml", objective, ACCEPT).settings
    assert {key: settings.get(key) for key in expected} == expected
    assert {"max_steps", "num_train_epochs"} - settings.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # accepted by name
        (AXOLOTL, "accept them with --accept excess_length_strategy --accept warmup_ratio:\n  excess_length_strategy: Axolotl drops rows"),
        (AXOLOTL, "limits its default warmup to 100 steps"),
        (AXOLOTL + "shuffle_merged_datasets: false\n", "--accept shuffle_merged_datasets"),
        (AXOLOTL.replace("chat_template", "alpaca"), "datasets.type: rows are rendered with the model's chat template"),
        ("base_model: m\nsequence_len: 8\ndatasets: [{path: a, type: completion}]\n", "Axolotl continues texts longer than sequence_len"),
        (LLAMA_FACTORY + "packing: true\n", "accept them with --accept packing"),
        (LLAMA_FACTORY.replace("keepers", "partly"), "dataset_info.partly.columns: query is not mapped"),
        (TRL + "fp16: true\nbf16: false\n", "fp16: blocks compute in bf16"),
        (TRL + "torch_dtype: float16\n", "--accept torch_dtype"),
        # never accepted
        (
            "base_model: m\nmicro_batch_size: 1\ndatasets: [{path: d, type: chat_template, train_on_eos: last}]\n",
            "\n  datasets.train_on_eos: all answers of the assistant are trained on, each with its end; remove it",
        ),
        (AXOLOTL + "lr_scheduler: rex\n", "\n  lr_scheduler: 'rex'"),
        (AXOLOTL + "max_grad_norm: 'nan'\n", "\n  max_grad_norm: nan"),
        (AXOLOTL + "optimizer: dion\n", "\n  optimizer: this optimizer is not supported; remove it to train with AdamW, or use one of adamw, lion, muon"),
        (AXOLOTL + "optimizer: muon\n", "optimizer: Axolotl's Muon leaves biases and norms as they are"),
        (AXOLOTL + "cosine_min_lr_ratio: 0.1\n", "\n  cosine_min_lr_ratio: use lr_scheduler: cosine_with_min_lr with"),
        (LLAMA_FACTORY + "use_muon: true\nweight_decay: 0.1\n", "weight_decay: LLaMA-Factory's Muon also decays"),
        (AXOLOTL + "something_new: true\n", "\n  something_new: unknown setting, which may matter; remove it"),
        (AXOLOTL + "something_new: false\n", "\n  something_new: unknown setting"),
        (AXOLOTL.replace("type:", "shards: 4, type:"), "\n  datasets.shards: these rows would be drawn at random"),
        (AXOLOTL.replace("type: chat_template", "type: pygmalion"), "\n  datasets.type: 'pygmalion' is not supported; write the rows as messages"),
        (AXOLOTL.replace("type: chat_template", "type: input_output"), "\n  datasets.type: segments with labels of their own are not supported"),
        (AXOLOTL.replace("type: chat_template", "type: {system_prompt: s}"), "accept them with --accept datasets.type.system_prompt --accept datasets.type"),
        (AXOLOTL.replace("type: chat_template", "type: {field_question: q}"), "\n  datasets.type.field_question: unknown setting"),
        (AXOLOTL.replace(", type: chat_template", ""), "\n  datasets.type: rows of tokens are not read; give their texts"),
        (AXOLOTL.replace("type: chat_template", "type: chat_template, chat_template: llama3"), "\n  datasets.chat_template: the model's own chat template"),
        (AXOLOTL.replace("type: chat_template", "type: chat_template, drop_system_message: true"), "\n  datasets.drop_system_message: remove the system"),
        (AXOLOTL.replace("type: chat_template", "type: chatml") + "rl: dpo\n", "\n  datasets.type: its columns are found in the rows"),
        (AXOLOTL.replace("path: d", "path: rows.jsonl, split: test"), "\n  datasets.split: test: a file has no splits"),
        (AXOLOTL.replace("datasets", "#"), "\n  datasets: is missing"),
        (LLAMA_FACTORY.replace("keepers", "nowhere"), "\n  dataset: nowhere: not in dataset_info.json"),
        (LLAMA_FACTORY.replace("keepers", "many"), "\n  dataset_info.many.num_samples: these rows would be drawn at random"),
        (LLAMA_FACTORY.replace("keepers", "many"), "\n  dataset_info.many.tags: messages must be {role, content}"),
        (LLAMA_FACTORY.replace("keepers", "ranked"), "\n  dataset_info.ranked: it has rows for another objective than sft"),
        (LLAMA_FACTORY + "max_samples: many\n", "\n  datasets.0.max_samples: "),
        (LLAMA_FACTORY + "deepspeed: {optimizer: {type: Lamb}}\n", "\n  deepspeed: it has its own optimizer"),
        (LLAMA_FACTORY + "deepspeed: ds.json\n", "\n  deepspeed: it has its own scheduler"),
        (LLAMA_FACTORY.replace("model_name_or_path: m", ""), "\n  model_name_or_path: is missing"),
        (TRL + "label_smoothing: 0.1\n", "\n  label_smoothing: it is for objective: dpo"),
        (TRL + "loss_type: sigmoid\nlabel_smoothing: 0.1\n", "\n  label_smoothing: 0.1 is not used without loss_type: robust"),
        (TRL + "load_in_4bit: true\n", "\n  load_in_4bit: True is not used without use_peft"),
        (TRL + "dataset_mixer: {a: 0.333}\n", "\n  dataset_mixer: a: 0.333 is not a whole number of percent"),
        (TRL + "dataset_mixture: {datasets: [{id: a, weight: 1.5}]}\n", "\n  dataset_mixture.weight: 1.5 is not a share"),
        (TRL + "dataset_mixture: {datasets: [{id: a, columns: [chosen, rejected]}]}\n", "\n  datasets: a has rows for another objective than sft"),
        (TRL + "loss_type: sigmoid\nneftune_noise_alpha: 5\n", "\n  neftune_noise_alpha: it is for objective: "),
    ],
)  # fmt: skip
def test_what_changes_the_training_is_rejected(work: Path, text: str, message: str) -> None:
    info = json.loads((work / "dataset_info.json").read_text())
    info["many"] = {"file_name": "many.json", "num_samples": 100, "tags": {"role_tag": "speaker"}}
    info["partly"] = {"file_name": "keepers.json", "columns": {"prompt": "instruction", "response": "output"}}
    info["ranked"] = {"file_name": "keepers.json", "ranking": True}
    (work / "dataset_info.json").write_text(json.dumps(info))
    (work / "ds.json").write_text('{"scheduler": {"type": "WarmupLR"}}')
    (work / "theirs.yaml").write_text(text)
    objective = ["sft"] if "model_name_or_path" in text and "stage" not in text and "loss_type" not in text else []
    accept = (
        [] if "\n  " not in message or "accept" in message else [word for name in ACCEPT for word in ("--accept", name)]
    )
    result = run("init", *objective, *accept, "--from", "theirs.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize(
    "text", [TRL + "dataset_num_proc: 2\n", LLAMA_FACTORY, AXOLOTL, "model: m\ntrain_dataset: d\ncutoff_len: 8\n"]
)
@pytest.mark.parametrize("command", ["train", "plan", "inspect"])
def test_commands_answer_foreign_files_with_init(work: Path, command: str, text: str) -> None:
    (work / "theirs.yaml").write_text(text)
    result = run(command, "theirs.yaml")
    assert result.exit_code == 2
    assert "theirs.yaml: this is a file of " in result.stderr
    assert "translate it with horizon-lm init --from theirs.yaml > run.yaml" in result.stderr
    with pytest.raises(ConfigError, match="this is a file of"):
        as_config("theirs.yaml")


def test_accept_needs_a_file() -> None:
    result = run("init", "sft", "--accept", "template")
    assert (result.exit_code, "add --from FILE" in result.stderr) == (2, True)


def test_a_name_that_need_not_be_accepted(work: Path) -> None:
    """A mistyped name is answered, whether the file can be translated without it or not."""
    names = ("--accept", "cutoff_len", "--accept", "tempalte")
    rejected = run("init", "--from", "llamafactory.yaml", *names)
    assert (rejected.exit_code, "\n  template: " in rejected.stderr) == (2, True)
    assert "\n--accept tempalte is not needed" in rejected.stderr
    translated = run("init", "--from", "llamafactory.yaml", *names, "--accept", "template")
    assert translated.exit_code == 0
    assert "\n--accept tempalte is not needed: no such setting changes the numbers\n" in translated.stderr
    assert "--accept cutoff_len" not in translated.stderr


def test_the_objective_of_the_file_decides(work: Path) -> None:
    (work / "theirs.yaml").write_text(LLAMA_FACTORY)
    result = run("init", "dpo", "--from", "theirs.yaml")
    assert (result.exit_code, "this is a file for objective: sft, not dpo" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        "model_name_or_path: m\nstage: dpo\npref_loss: orpo\ndataset: d\n",
        TRL + "loss_type: [sigmoid, bco_pair, sft]\n",
        TRL + "loss_type: apo_zero\n",
    ],
)
def test_unsupported_loss_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    result = run("init", "--from", tmp_path / "theirs.yaml")
    assert result.exit_code == 2
    assert re.search(r"\n  (loss_type|pref_loss): .*'sigmoid', 'hinge', 'ipo' or 'robust'", result.stderr)


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "TRL": (
        "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nlora_r: 8\nlora_target_modules: [q_proj]\n",
        {"lora_r": 8, "lora_alpha": 32.0, "lora_dropout": 0.05, "lora_target_modules": ["q_proj"]},
    ),
    "Axolotl": (
        "base_model: m\ndatasets: [{path: d, type: alpaca}]\nadapter: lora\nlora_r: 8\nlora_alpha: 16\n"
        "lora_target_linear: true\npeft_use_dora: true\n",
        {"lora_r": 8, "lora_alpha": 16.0, "lora_dropout": 0.0, "lora_target_modules": "all-linear", "use_dora": True},
    ),
    "LLaMA-Factory, by default": (
        "model_name_or_path: m\nstage: sft\ndataset: keepers\n",
        {"lora_r": 8, "lora_alpha": 16.0, "lora_dropout": 0.0, "lora_target_modules": "all-linear"},
    ),
    "LLaMA-Factory": (
        "model_name_or_path: m\nstage: sft\ndataset: keepers\nfinetuning_type: lora\nlora_rank: 64\nlora_target: q_proj,v_proj\n",
        {"lora_r": 64, "lora_alpha": 128.0, "lora_target_modules": ["q_proj", "v_proj"]},
    ),
    "TRL, 4 bits": (
        "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: fp4\n",
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "use_bnb_nested_quant": False},
    ),
    "Axolotl, 4 bits": (
        "base_model: m\ndatasets: [{path: d, type: alpaca}]\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\n",
        {"load_in_4bit": True, "use_bnb_nested_quant": True},
    ),
    "LLaMA-Factory, 4 bits": (
        "model_name_or_path: m\nstage: sft\ndataset: keepers\nfinetuning_type: lora\nquantization_bit: 4\n",
        {"load_in_4bit": True, "use_bnb_nested_quant": True},
    ),
}


@pytest.mark.parametrize("trainer", ADAPTERS)
def test_adapters_are_translated(work: Path, trainer: str) -> None:
    """With the other trainer's own defaults, where they differ."""
    text, expected = ADAPTERS[trainer]
    (work / "theirs.yaml").write_text(text)
    translated = translate_file("theirs.yaml", "sft" if "TRL" in trainer else None, ACCEPT)
    assert not translated.left_out.nothing
    config = SCHEMAS["sft"].model_validate(translated.settings, context=WITHOUT_ROWS)
    assert config.use_peft
    assert {name: getattr(config, name) for name in expected} == expected


def test_full_fine_tuning_has_no_adapters(work: Path) -> None:
    (work / "theirs.yaml").write_text("model_name_or_path: m\nstage: sft\ndataset: keepers\nfinetuning_type: full\n")
    assert "use_peft" not in translate_file("theirs.yaml", accept=ACCEPT).settings
