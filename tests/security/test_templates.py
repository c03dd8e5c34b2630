"""A chat template is a program of whoever made the model: it may not loop for ever, fill the memory or reach Python."""

from pathlib import Path

import pytest

from horizon_lm.errors import ConfigError
from horizon_lm.runs.data import template_limits
from horizon_lm.runs.data.template_limits import _SERVER, limit_templates
from tests.e2e import tiny
from tests.e2e.command import run

MESSAGES = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
BOMBS = {
    "text": ("{{ 'a' * 10**10 }}", "of memory"),
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "of memory|takes more",
    ),
    "width": ("{{ '%1000000000000d' % 1 }}", "of memory|rejects|takes more|too big|too large"),
    "output": ("{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}", "renders more than"),
    "nested lists": ("{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}", "more than"),
    "number": ("{{ (9 ** (9 ** 9)) % 7 }}", "takes more than 1 second|of memory"),
}  # fmt: skip
ESCAPES = {
    "class": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
    "format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "import": "{% import '/etc/passwd' as p %}{{ p }}",
    "include": "{% include '/etc/passwd' %}",
    "list change": "{{ messages.append(1) }}{{ messages.__len__() }}",
}


@pytest.fixture(autouse=True)
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the tests: a text may take one second instead of five."""
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 1)


SLOW = ("nested lists", "number")  # ended by the limit on time, as the loop below


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in BOMBS])
def test_bombs_are_stopped(name: str) -> None:
    template, message = BOMBS[name]
    tokenizer = tiny.build_tokenizer(template)
    limit_templates()
    with pytest.raises((ConfigError, ValueError), match=message):
        tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert tiny.build_tokenizer().apply_chat_template(MESSAGES, tokenize=False).count("<|im_end|>") == 2


@pytest.mark.parametrize("name", ESCAPES)
def test_the_sandbox_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    limit_templates()
    with pytest.raises(Exception, match=r".") as caught:
        tiny.build_tokenizer(ESCAPES[name]).apply_chat_template(MESSAGES, tokenize=False)
    assert "root:" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_rendered_text_and_marks_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils as utils

    limit_templates()
    for template in (tiny.CHATML, tiny.CHATML_WITH_MARKS, "{{ messages | tojson }}{{ strftime_now('%Y') }}{{ tools }}"):
        tokenizer = tiny.build_tokenizer(template)
        options = {"tools": [{"name": "f", "n": [1, 2.5, None, True]}], "tokenize": True, "return_dict": True}
        options |= {"return_assistant_tokens_mask": template is tiny.CHATML_WITH_MARKS}
        ours = tokenizer.apply_chat_template([*MESSAGES, *MESSAGES], **options)
        with monkeypatch.context() as patch:
            patch.setattr(utils, "_compile_jinja_template", utils._cached_compile_jinja_template)
            theirs = tokenizer.apply_chat_template([*MESSAGES, *MESSAGES], **options)
        assert dict(ours) == dict(theirs)
        assert template is not tiny.CHATML_WITH_MARKS or any(ours["assistant_masks"])


def test_a_run_with_a_looping_template_is_rejected_at_once(tmp_path: Path) -> None:
    """It would loop again in every row, so the first one ends the run. Workers ignore the signal that ends the loop."""
    model = tiny.save_model(tmp_path / "model", chat_template=LOOP)
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(50))
    result = run("inspect", "--model_name_or_path", model, "--datasets", rows, "--dataset_num_proc", 2)
    assert result.exit_code == 2
    assert "the chat template takes more than 1 second" in result.stderr


def test_a_process_that_was_killed_is_replaced() -> None:
    """A run that fails kills its child processes, and another run may follow in the same Python."""
    limit_templates()
    tokenizer = tiny.build_tokenizer()
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    process = _SERVER._process
    assert process is not None
    process.kill()
    process.wait()
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == text


def test_a_forked_worker_has_a_process_of_its_own(tmp_path: Path, model: Path) -> None:
    """Two workers that wrote to one pipe would get each other's texts."""
    tiny.build_tokenizer().apply_chat_template(MESSAGES, tokenize=False)
    before = _SERVER._process
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(40))
    one = run("inspect", "--model_name_or_path", model, "--datasets", rows)
    tiny.write_jsonl(rows, tiny.alpaca_rows(40))  # not from the cache
    two = run("inspect", "--model_name_or_path", model, "--datasets", rows, "--dataset_num_proc", 2)
    assert one.stdout == two.stdout
    assert _SERVER._process is before is not None
    assert before.poll() is None


RAISING = {
    "division": "{{ 1 // 0 }}",
    "overflow": "{{ 2.0 ** 100000 }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "training only": "{% if messages | length > 2 %}{{ 1 // 0 }}{% endif %}" + tiny.CHATML,  # rendered by TRL
}


@pytest.mark.parametrize("command", ["inspect", "train", "generate"])
@pytest.mark.parametrize("name", RAISING)
def test_a_template_may_raise_anything(name: str, command: str, tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model", chat_template=RAISING[name])
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(1))
    messages = [*MESSAGES, {"role": "user", "content": "When?"}, {"role": "assistant", "content": "Now."}]
    if name == "training only":
        tiny.write_jsonl(rows, [{"messages": messages}])
    arguments = ["--model_name_or_path", model, "--datasets", rows]
    if command == "generate":
        result = run("generate", model, "Who?", "--device", "cpu", "--max-new-tokens", 1)
    else:
        result = run(command, *arguments, *(["--device", "cpu"] if command == "train" else []))
    if command == "generate" and name == "training only":
        assert result.exit_code == 0
    else:
        assert result.exit_code == (2 if command == "generate" else 4)
        assert "the chat template rejects" in result.stderr


def test_an_evaluation_with_a_template_that_raises_is_rejected(tmp_path: Path) -> None:
    from horizon_lm.cli.eval import require_template

    with pytest.raises(ConfigError, match="the chat template rejects the prompt: integer division"):
        require_template(tiny.build_tokenizer(RAISING["division"]))
