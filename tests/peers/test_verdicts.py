"""A streamed test passes only if its outcome and its values are those of plain models."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.peers import command
from tests.peers.expected import ALLOWED, DIFFERENCES, REJECTIONS
from tests.peers.page import FOLDER, PAGES, suites_of, summary
from tests.peers.runner import results_of, run
from tests.peers.suites import SUITES, Suite, drawn
from tests.peers.verdicts import judge, read

PLAIN = {
    "id": "tests/test_a.py::test_b",
    "outcome": "passed",
    "streamed": 0,
    "runs": [{"log": [{"loss": 2.5, "grad_norm": math.nan}], "params": {"weight": [3.0, 2.0]}}],
}


def streamed(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(PLAIN) | {"streamed": 1} | changes


def of_run(log: float = 2.5, total: float = 3.0, norm: float = 2.0, name: str = "weight") -> list[dict[str, Any]]:
    return [{"log": [{"loss": log, "grad_norm": math.nan}], "params": {name: [total, norm]}}]


def ended_in(message: str, rejected: bool) -> dict[str, Any]:
    return streamed(outcome="failed", error="ModelNotSupportedError", message=message, rejected=rejected)


def test_equal_values_pass():
    assert judge(PLAIN, streamed()).kind == "pass"
    assert judge(PLAIN, streamed(runs=of_run(log=2.5002, norm=2.0001))).kind == "pass"  # sums added in another order


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        (of_run(log=2.51), "loss 2.5, streamed 2.51"),
        (of_run(log=math.nan), "loss 2.5, streamed nan"),
        (of_run(norm=2.001), "norm of weight 2, streamed 2.001; sum 3 and 3"),
        (of_run(total=-3.0), "norm of weight 2, streamed 2; sum 3 and -3"),
        (of_run(name="other"), "parameters in one mode only: other, weight"),
        (of_run() + of_run(), "1 trainings, and 2 streamed"),
        ([{"log": [], "params": {"weight": [3.0, 2.0]}}], "1 logged rows, and 0 streamed"),
        ([{"log": [{"loss": 2.5}], "params": {"weight": [3.0, 2.0]}}], "logged in one mode only: grad_norm"),
    ],
)
def test_other_values_are_a_failure(runs: Any, reason: str):
    verdict = judge(PLAIN, streamed(runs=runs))
    assert (verdict.kind, verdict.reason) == ("fail", reason)


def test_a_rejection_passes_if_it_is_listed():
    message = "LlamaForCausalLM of type 'remote' is not in the table of proven models"
    assert judge(PLAIN, ended_in(message, rejected=True)).kind == "rejected"
    assert judge(PLAIN, ended_in(message, rejected=False)).kind == "fail"  # another project's error with the same words
    assert judge(PLAIN, ended_in("this is new", rejected=True)).kind == "fail"


def test_a_test_without_a_streamed_model_does_not_count_as_a_pass():
    assert judge(PLAIN, streamed(streamed=0)).kind == "unused"


def test_the_pages_have_every_explanation_and_suite_and_no_failure():
    texts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in PAGES}
    explanations = (*REJECTIONS.values(), *DIFFERENCES.values(), *ALLOWED.values())
    assert [each for each in explanations if not any(each in text for text in texts.values())] == []
    for page, text in texts.items():
        assert [name for name in suites_of(page) if f"\n| {name} |" not in text] == []
        (total,) = (line for line in text.splitlines() if line.startswith("| all |"))
        assert total.split("|")[-2].strip() == "0"
    assert sorted(name for page in PAGES for name in suites_of(page)) == sorted(SUITES)


def test_each_difference_has_to_be_explained(monkeypatch: Any):
    monkeypatch.setitem(DIFFERENCES, "test_b: loss ", "a reason")
    assert judge(PLAIN, streamed(runs=of_run(log=2.6))).kind == "differs"
    both = judge(PLAIN, streamed(runs=of_run(log=2.6, norm=2.1)))
    assert (both.kind, both.reason) == ("fail", "norm of weight 2, streamed 2.1; sum 3 and 3")


def test_a_share_is_the_same_each_time_and_a_pattern_adds_to_it():
    tests = [f"test_merge[{config}-{model}]" for model in ("llama", "qwen2") for config in range(200)]
    shared = {test for test in tests if drawn(test, 10)}
    assert 20 < len(shared) < 60
    assert {test for test in tests if drawn(test, 10, "qwen2")} == shared | {test for test in tests if "qwen2" in test}


def test_the_sample_reports_that_it_was_not_run(monkeypatch: Any, tmp_path: Path, capsys: Any):
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    assert command.sample(tmp_path) == 0
    assert "cannot be downloaded" in capsys.readouterr().out


PROJECT = """
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def train(folder, rate):
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
    arguments = TrainingArguments(str(folder), learning_rate=rate, report_to=[], logging_steps=1, save_strategy="no")
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
    trainer.train()
    return trainer


def test_a_training(tmp_path):
    assert train(tmp_path, 1e-2).state.global_step == 3


def test_a_training_that_differs_when_streamed(tmp_path):
    train(tmp_path, 1e-3 if Trainer is transformers.Trainer else 1e-2)


def test_a_failure_when_streamed(tmp_path):
    assert Trainer is transformers.Trainer


def test_a_failure_on_plain_models():
    assert Trainer is not transformers.Trainer
"""


@pytest.mark.slow  # 30 s: two processes that import everything
def test_a_suite_is_run_on_plain_and_streamed_models(monkeypatch: Any, tmp_path: Path):
    tests = tmp_path / "other" / "tests"
    tests.mkdir(parents=True)
    (tmp_path / "hub").mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_training.py").write_text(PROJECT, encoding="utf-8")
    monkeypatch.setitem(SUITES, "other", Suite("other", ("tests/test_training.py",), "training or failure"))
    run(tmp_path, tmp_path / "results", "other")
    plain, drawn_of = read(results_of(tmp_path / "results", "other", "plain"))
    rows, _ = read(results_of(tmp_path / "results", "other", "streamed"))
    assert drawn_of == {"collected": 4, "share": 100, "also": ""}
    assert [row["outcome"] for row in plain.values()] == ["passed", "passed", "passed", "failed"]
    found = {test: judge(plain[test], row) for test, row in rows.items()}
    assert [each.kind for each in found.values()] == ["pass", "fail", "fail"]
    assert "2 fail" in summary("other", found)
    run(tmp_path, tmp_path / "results", "other")
    assert read(results_of(tmp_path / "results", "other", "streamed"))[0] == rows  # nothing was run again
