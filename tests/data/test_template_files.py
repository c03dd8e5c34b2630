"""Chat templates in files: a fault of syntax is found before rows are read, and rows that a template rejects name its file."""

from pathlib import Path
from typing import Any

import pytest
import trl

from horizon_lm.errors import ConfigError, DataError
from horizon_lm.runs.data.chat_template import read_template
from horizon_lm.runs.data.template_syntax import EXTENSIONS
from tests.e2e.tiny import CHATML, CHATML_WITH_MARKS
from tests.support.prepared_rows import load, messages

PUBLISHED = {path.name: path.read_text() for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
OWN = {"chatml": CHATML, "marks": CHATML_WITH_MARKS, "empty": "", "no tags": '{"text": "a"}', "deep": "{{" + "(" * 9999}
LOOPS = "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% break %}{% endfor %}"


@pytest.mark.parametrize("name", ["own", "published"])
def test_valid_templates_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    templates = (
        PUBLISHED if name == "published" else {**OWN, "loops": LOOPS, "runtime": "{{ 1 / 0 }}{{ 'a' * 10**15 }}"}
    )
    assert len(templates) > 6
    for template in templates.values():
        (tmp_path / "t.jinja").write_text(template)
        assert read_template(tmp_path / "t.jinja", "t.jinja") == template


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "t.jinja:1: unexpected 'end of template'"),
        ("a\n{% if a %}\nb", "t.jinja:2: unexpected end of template"),
        ("a\n{{ a b }}", "t.jinja:2: expected token 'end of print statement', got 'b'"),
        ("{% generation %}a", "t.jinja:1: unexpected end of template"),
        ("{% nonsense %}", "t.jinja:1: encountered unknown tag 'nonsense'"),
    ],
)
def test_faults_of_syntax_are_named_with_their_line(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "t.jinja").write_text(template)
    with pytest.raises(ConfigError, match=rf"^chat_template_path: (?i:{message})"):
        read_template(tmp_path / "t.jinja", "t.jinja")


def test_the_tags_are_those_of_transformers() -> None:
    from transformers.utils import chat_template_utils

    theirs = chat_template_utils._cached_compile_jinja_template("").environment.extensions.values()
    assert {tag for each in theirs for tag in each.tags} == {tag for each in EXTENSIONS for tag in each.tags}


def test_rows_that_a_template_from_a_file_rejects_name_it(tmp_path: Path) -> None:
    """The control: other faults of rows, and the model's own template, do not."""
    refusing: dict[str, Any] = {"chat_template": "{{ raise_exception('no turns') }}"}
    rows = [messages("Who?", "I.")]
    fault = "the chat template rejects this row: no turns"
    (tmp_path / "t.jinja").write_text(refusing["chat_template"])
    template = str(tmp_path / "t.jinja")
    with pytest.raises(DataError, match=rf"{fault} \(chat_template_path: {template}\)$"):
        load(tmp_path, rows, chat_template_path=template, **refusing)
    with pytest.raises(DataError, match=rf"{fault}$"):
        load(tmp_path, rows, **refusing)
    with pytest.raises(DataError, match=r"must be text, but is a number$"):
        load(tmp_path, [{"text": 1}], chat_template_path=template, **refusing)
