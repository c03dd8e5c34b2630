"""The docstrings of `stream` and `from_pretrained`, the settings of a run and their page describe an option with one text."""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import horizon_lm
from horizon_lm.common.streaming_options import OPTION_TEXTS, StreamingOptions
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.config.run import SCHEMAS

ROOT = Path(__file__).parents[2]
OF_FOLDERS = ("model_name_or_path", "gguf_file", "trust_remote_code")  # arguments of `from_pretrained` alone


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("option_texts", ROOT / "scripts" / "option_texts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(text: str | None) -> str:
    return " ".join((text or "").split())


def test_each_option_of_two_places_has_a_text() -> None:
    arguments = [
        *inspect.signature(horizon_lm.stream).parameters,
        *inspect.signature(horizon_lm.from_pretrained).parameters,
    ]
    assert OPTION_TEXTS.keys() == RunConfig.model_fields.keys() & set(arguments)
    assert StreamingOptions.names() == [name for name in OPTION_TEXTS if name in StreamingOptions.names()]


@pytest.mark.parametrize("name", OPTION_TEXTS)
def test_an_option_is_described_alike(name: str, script: ModuleType) -> None:
    """A place may go on with sentences of its own."""
    for schema in SCHEMAS.values():
        assert words(schema.model_fields[name].description).startswith(OPTION_TEXTS[name])
    page = (ROOT / "docs" / "generated" / "settings.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert rows
    assert all(f"| {OPTION_TEXTS[name]}" in row for row in rows)
    described = horizon_lm.from_pretrained if name in OF_FOLDERS else horizon_lm.stream
    assert f"{name}: {script.argument_text(name)}" in words(inspect.getdoc(described))


def test_docstrings_are_written_by_the_script(script: ModuleType) -> None:
    source = script.DOCSTRINGS.read_text(encoding="utf-8")
    assert script.with_option_texts(source) == source, "out of date: run python scripts/option_texts.py"
    changed = source.replace("compute device: auto", "device: auto")
    assert changed != source
    assert script.with_option_texts(changed) == source
