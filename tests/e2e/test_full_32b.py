"""The example that trains all weights of a 32B model on a small machine, with everything at a smaller scale: model, memory and card."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from horizon_lm.common import resources
from horizon_lm.model.known_models import find_known
from tests.e2e import tiny
from tests.e2e.command import run

RECIPE = "examples/full_32b.yaml"
NARROWER = 40  # each width of the model is divided by this
HOST, CARD = 128e9, 24e9  # bytes of the machine
PLAIN = {"precision": "fp32_master", "moments": "float32", "optim": "adamw", "update_in_backward": "false"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model with the blocks of Qwen2.5-32B, and a 40th of their widths."""
    config = Qwen2Config(
        num_hidden_layers=64, hidden_size=5120 // NARROWER, intermediate_size=27648 // NARROWER, vocab_size=152064 // NARROWER,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    folder = tmp_path / "model"
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the arguments of the example on a machine whose memory and card are smaller by as much as the model."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The interpreter and its libraries are not smaller, so they are left out.
    monkeypatch.setattr(resources, "resident_bytes", lambda *_: 0)
    monkeypatch.setattr("horizon_lm.runs.admission.this_machine.FIRST_STEPS_BYTES", 0)
    known = find_known("Qwen/Qwen2.5-32B")
    assert known is not None
    own = json.loads(run("plan", "--model", model, "--device", "cpu", "--json").stdout)["model"]["parameters"]
    host, card = (int(num_bytes * own / known.parameters) for num_bytes in (HOST, CARD))
    # A CPU computes in host memory, which therefore has the card's memory, too.
    limits = ["--host_memory", host + card, "--device_memory", card, "--head_chunk_tokens", 64]
    rows = [
        "--model_name_or_path",
        model,
        "--max_steps",
        3,
        "--max_length",
        32,
        "--learning_rate",
        1e-3,
        "--device",
        "cpu",
    ]
    return [RECIPE, *rows, *limits, "--output_dir", tmp_path / "run"]


def test_it_trains_to_its_end(arguments: list[Any], tmp_path: Path) -> None:
    result = run("train", *arguments)
    assert result.exit_code == 0, result.stderr
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    planned = json.loads((tmp_path / "run/plan.json").read_text())
    assert planned["host"]["bytes"] > 0.9 * planned["host"]["available"], "the limit is no limit"
    assert (tmp_path / "run/model/model.safetensors").is_file()


def test_no_fewer_settings_fit(arguments: list[Any]) -> None:
    """Without each of the four, the plan says that it does not fit, and names those of the example."""
    for name, value in PLAIN.items():
        assert run("plan", *arguments, f"--{name}", value).exit_code == 3, name
    plain = [text for name, value in PLAIN.items() for text in (f"--{name}", value)]
    result = run("plan", *arguments, *plain, "--max_grad_norm", 1)
    wanted = "--moments 8bit --precision bf16 --update_in_backward true --max_grad_norm 0 --optim lion\n"
    assert wanted in result.stderr
