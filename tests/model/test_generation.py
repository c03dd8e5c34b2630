"""What a folder's generation_config.json may decide about an answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import tiny
from tests.e2e.command import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def answer(folder: Path, temperature: float = 0, **settings: Any) -> Any:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1} | settings))
    return run("generate", folder, "hello", "--device", "cpu", "--max-new-tokens", 6, "--temperature", temperature)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4}, {"num_beams": "x"}, {"num_beams": 2**63}, {"dola_layers": "low"}, {"constraints": ["x"]}, {"stop_strings": "a"},
        {"forced_eos_token_id": 10**12}, {"sequence_bias": [[[1], "x"]]}, {"assistant_early_exit": 1},
        {"custom_generate": "somebody/code"}, {"min_length": 10**9},
    ],
)  # fmt: skip
def test_what_makes_no_sense_here_is_left_out(folder: Path, settings: dict[str, Any]) -> None:
    expected = answer(folder).stdout
    found = answer(folder, **settings)
    assert found.exit_code == 0, found.output
    assert found.stdout == expected


@pytest.mark.parametrize(
    ("settings", "temperature", "message"),
    [
        ({"eos_token_id": "x"}, 0, "generation_config.json: eos_token_id: 'x' is not a token from 0 to"),
        ({"eos_token_id": [1, -1]}, 0, "eos_token_id: '[1, -1]' is not"),
        (
            {"repetition_penalty": "a"},
            0,
            "repetition_penalty: 'a' is not a number from 0 to 1000; correct or remove it",
        ),
        ({"top_k": 2**63}, 1, "top_k: '9223372036854775808' is not a number"),
        ({"top_p": -1}, 1, "top_p: '-1' is not a number from 0 to 1"),
    ],
)
def test_invalid_settings_are_rejected(
    folder: Path, settings: dict[str, Any], temperature: float, message: str
) -> None:
    found = answer(folder, temperature, **settings)
    assert found.exit_code == 2
    assert message in found.stderr


def test_end_tokens_and_penalties_are_used(folder: Path) -> None:
    plain, penalized = answer(folder), answer(folder, repetition_penalty=100.0)
    assert plain.exit_code == penalized.exit_code == 0
    assert penalized.stdout != plain.stdout
    (folder / "generation_config.json").unlink()
    ended = answer(folder, eos_token_id=list(range(300)))
    assert len(ended.stdout) < len(plain.stdout)
