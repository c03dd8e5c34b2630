"""``horizon-lm eval``: results equal those of the plain model, and bad arguments are rejected."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from horizon_lm.runs.data.vision import Vision
from tests.e2e.command import run
from tests.support import image_models
from tests.support.image_models import picture

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of lm-eval and its imports

CHOICES = """
task: keepers
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWERS = """
task: said
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of tasks whose data paths are relative to it."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    words = ["stars", "the dome", "rain", "one by one"]
    rows = [{"question": f"What is {n}?", "choices": words, "answer": n % 4} for n in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "choices.yaml").write_text(CHOICES)
    (folder / "answers.yaml").write_text(ANSWERS)
    return folder


def test_results_equal_the_plain_model(
    folder: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are lm-eval's own tasks read, of which there are thousands, where each task is a file."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from horizon_lm.cli.eval import load_tasks

    files = [str(folder / "choices.yaml"), str(folder / "answers.yaml")]
    managers: list[dict[str, Any]] = []
    create = TaskManager.__init__

    def observed(self: Any, **options: Any) -> None:
        managers.append(options)
        create(self, **options)

    monkeypatch.setattr(TaskManager, "__init__", observed)
    result = run(
        "eval", model, "--tasks", ",".join(files), "--apply-chat-template", "--batch-size", 3, "--precision", "float32",
        "--device", "cpu", "--output", tmp_path / "results.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "|keepers|" in result.stdout.replace(" ", "")
    ours = json.loads((tmp_path / "results.json").read_text())["results"]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain_harness = HFLM(pretrained=plain, tokenizer=AutoTokenizer.from_pretrained(model), batch_size=3)
    manager = TaskManager(include_defaults=False)
    theirs = simple_evaluate(
        model=plain_harness, tasks=load_tasks(files), apply_chat_template=True, task_manager=manager
    )["results"]
    assert {each.get("include_defaults", True) for each in managers} == {False}
    for task, metric in (("keepers", "acc,none"), ("said", "exact_match,none")):
        assert ours[task][metric] == theirs[task][metric]
        assert ours[task]["sample_len"] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nothing.yaml"], "nothing.yaml: no such file"),
        (["--tasks", "{folder}/broken.yaml"], "broken.yaml cannot be loaded (its paths are relative to its folder)"),
        (["--tasks", "{folder}/rowless.yaml"], "rowless.yaml cannot be loaded"),
        (["--tasks", " , "], "name a task of lm-eval or a YAML file"),
        (["--tasks", "{folder}/choices.yaml", "--num-fewshot", "50", "--device", "cpu"], "lm-eval rejects"),
        (
            ["--tasks", "{folder}/endless.yaml", "--device", "cpu"],
            "lm-eval rejects the settings: Invalid configuration",
        ),
        pytest.param(
            ["--tasks", "no_such_task_of_lm_eval"], "no_such_task_of_lm_eval cannot be loaded", marks=pytest.mark.slow
        ),
        (
            ["--tasks", "{folder}/choices.yaml", "--output", "{folder}/nowhere/results.json"],
            "does not exist; create it",
        ),
    ],
)
def test_bad_arguments(folder: Path, model: Path, arguments: list[str], message: str) -> None:
    (folder / "endless.yaml").write_text(ANSWERS.replace("max_gen_toks: 6", "max_gen_toks: 1000000"))
    (folder / "broken.yaml").write_text("task: [")
    (folder / "rowless.yaml").write_text(CHOICES.replace("rows.jsonl", "others.jsonl"))
    result = run("eval", model, *(text.format(folder=folder) for text in arguments))
    assert result.exit_code == 2
    assert message in result.stderr


def test_missing_lm_eval(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("lm_eval"):
            raise ImportError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    result = run("eval", model, "--tasks", folder / "choices.yaml")
    assert result.exit_code == 2
    assert "pip install lm_eval" in result.stderr


def test_example_task(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    result = run(
        "eval",
        model,
        "--tasks",
        Path(__file__).parents[2] / "examples" / "eval" / "tarrow.yaml",
        "--limit",
        2,
        "--device",
        "cpu",
    )
    assert result.exit_code == 0, result.stderr
    assert "tarrow" in result.stdout


IMAGES = """
task: seen
dataset_path: parquet
dataset_kwargs: {data_files: {test: rows.parquet}}
test_split: test
output_type: generate_until
doc_to_image: [picture]
doc_to_text: "<image>{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def test_tasks_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """The answers that plain transformers gives about the pictures are expected, so that each one counts; a model of text is rejected."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    llava = image_models.save_llava(tmp_path / "llava")
    plain = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32)
    processor = Vision(llava, plain.config).processor
    rows: dict[str, list[Any]] = {"question": [], "picture": [], "answer": []}
    for number in range(4):
        content = [{"type": "image"}, {"type": "text", "text": f"What is {number}?"}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=text, images=[picture(number)], return_tensors="pt")
        tokens = plain.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        rows["question"].append(f"What is {number}?")
        rows["picture"].append(picture(number))
        rows["answer"].append(processor.tokenizer.decode(tokens).split(".")[0])
    features = Features(question=Value("string"), picture=ImageFeature(), answer=Value("string"))
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "seen.yaml").write_text(IMAGES)
    output = tmp_path / "results.json"
    options = ("--apply-chat-template", "--precision", "float32", "--device", "cpu", "--batch-size", 1)
    result = run("eval", llava, "--tasks", tmp_path / "seen.yaml", *options, "--output", output)
    assert result.exit_code == 0, result.stderr
    assert json.loads(output.read_text())["results"]["seen"]["exact_match,none"] == 1.0
    result = run("eval", model, "--tasks", tmp_path / "seen.yaml", *options)
    assert result.exit_code == 2
    assert "seen: questions have images, and" in result.stderr
    assert "reads only text" in result.stderr
    rows = {"question": ["?"], "choices": [["a", "b"]], "answer": [0]}
    Dataset.from_dict(rows).to_json(tmp_path / "rows.jsonl")
    (tmp_path / "likely.yaml").write_text(CHOICES)
    result = run("eval", llava, "--tasks", tmp_path / "seen.yaml", "--tasks", tmp_path / "likely.yaml", *options)
    assert result.exit_code == 2
    assert "compares likelihoods" in result.stderr
