"""The tokens that end trained answers end those of the trained model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import horizon_lm
from horizon_lm.runs.training import samples
from horizon_lm.tools.gguf import export as gguf_export
from tests.e2e import tiny
from tests.e2e.command import run
from tests.support.gguf_files import metadata

pytestmark = pytest.mark.filterwarnings("ignore")
END, TEXT_END = 1, "<|endoftext|>"
VICUNA = {"temperature": 0.9, "top_p": 0.6}  # without do_sample, which transformers saves only if nothing was changed


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a base model whose end token is not the one that ends the turns of its template, with published settings."""
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"eos_token": TEXT_END})
    model = tiny.build_model(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | VICUNA))
    return tmp_path / "base"


def train(base: Path, **settings: Any) -> tuple[Path, list[str]]:
    """Train two steps, and return the folder of the run and what it printed."""
    rows = tiny.write_jsonl(base.parent / "rows.jsonl", settings.pop("rows", tiny.alpaca_rows()))
    lines: list[str] = []
    result = horizon_lm.train(
        {"objective": "sft", "model_name_or_path": str(base), "datasets": str(rows), "device": "cpu", "max_steps": 2,
         "output_dir": str(base.parent / "run"), "save_steps": 1, **settings},
        print_fn=lines.append,
    )  # fmt: skip
    return result.output_dir, "\n".join(lines).splitlines()


def ends(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_a_trained_model(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, settings = list[Any](), samples.generation_settings

    @contextmanager
    def watched(model: Any, *arguments: Any) -> Iterator[None]:
        with settings(model, *arguments):
            used.append(model.generation_config.eos_token_id)
            yield

    monkeypatch.setattr(samples, "generation_settings", watched)
    output, lines = train(base, sample_prompts=["Who?"], sample_steps=1, sample_max_new_tokens=2)
    own = AutoTokenizer.from_pretrained(base).eos_token_id
    assert [line for line in lines if "answers end at" in line] == [
        f"answers end at <|im_end|>, as those that are trained on do (generation_config.json; the model's own: {TEXT_END})"
    ]
    assert used == [[own, END]] * 2
    assert ends(output / "model") == [own, END]
    assert AutoModelForCausalLM.from_pretrained(output / "model").generation_config.eos_token_id == [own, END]
    assert run("export", output / "checkpoint-1", base.parent / "exported").exit_code == 0
    assert ends(base.parent / "exported") == [own, END]
    gguf_export.export_gguf(output / "model", base.parent / "gguf")
    found = metadata(base.parent / "gguf" / "model.gguf")
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (own, END)


def test_trained_adapters(base: Path) -> None:
    output, _ = train(base, use_peft=True, lora_target_modules="all-linear")
    own, folder = AutoTokenizer.from_pretrained(base).eos_token_id, base.parent
    assert ends(output / "model") == [own, END]
    assert GenerationConfig.from_pretrained(output / "model").eos_token_id == [own, END]
    opened = horizon_lm.from_pretrained(output / "model", device="cpu")
    assert opened.generation_config.eos_token_id == [own, END]
    assert run("export", output / "checkpoint-1", folder / "exported").exit_code == 0
    assert ends(folder / "exported") == [own, END]
    assert run("merge", output / "model", folder / "merged").exit_code == 0
    assert ends(folder / "merged") == [own, END]


@pytest.mark.parametrize(
    ("known", "expected"),
    [(END, END), ([END, 2], [END, 2]), ([2], [2, END]), (None, [END])],
)
def test_end_tokens_that_a_model_has(base: Path, known: Any, expected: Any) -> None:
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": known}))
    output, lines = train(base)
    assert ends(output / "model") == expected
    assert any("answers end at" in line for line in lines) == (known != expected)


def test_without_a_generation_config(base: Path) -> None:
    (base / "generation_config.json").unlink()
    output, _ = train(base)
    assert ends(output / "model") == [AutoTokenizer.from_pretrained(base).eos_token_id, END]


def test_inspect_shows_them(base: Path) -> None:
    rows = tiny.write_jsonl(base.parent / "rows.jsonl", tiny.alpaca_rows())
    arguments = (
        "inspect",
        "--objective",
        "sft",
        "--model",
        base,
        "--datasets",
        rows,
        "--output-dir",
        base.parent / "o",
    )
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "answers end at <|im_end|>, as those that are trained on do" in result.stdout
    assert json.loads(run(*arguments, "--json").stdout)["end_tokens"] == {"<|im_end|>": END}


def test_settings_that_transformers_would_not_save(base: Path) -> None:
    """The control: transformers rejects a generation config that was changed for other settings of it."""
    model = horizon_lm.from_pretrained(base, device="cpu")
    model.generation_config.eos_token_id = [END]
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(base.parent / "plain")
    model.save_pretrained(base.parent / "saved")
    found = json.loads((base.parent / "saved" / "generation_config.json").read_text())
    assert found["eos_token_id"] == [END]
    assert VICUNA.items() <= found.items()


def test_texts_and_pretraining_change_nothing(base: Path) -> None:
    texts = [{"text": f"The keeper counts {number} stars."} for number in range(12)]
    output, lines = train(base, objective="pretrain", rows=texts)
    assert ends(output / "model") == AutoTokenizer.from_pretrained(base).eos_token_id
    assert not any("answers end at" in line for line in lines)
