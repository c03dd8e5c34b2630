"""Rows are checked as they are trained on, after they were cut to ``max_length``: those that fail are left out with their places."""

from pathlib import Path
from typing import Any

import pytest

from horizon_lm.errors import ConfigError, DataError
from horizon_lm.runs.config.run import SCHEMAS
from horizon_lm.runs.data.loader import batch_from
from horizon_lm.runs.data.preprocess import PreprocessConfig, prepare
from horizon_lm.runs.training.rows import RunData, load_data
from tests.e2e.tiny import CHATML, CHATML_WITH_MARKS, build_tokenizer
from tests.support.prepared_rows import load, messages, write

NO_ANSWER, SAME = "have no text or answer to train on", "have the same chosen and rejected answer"
CUT = "are cut before any answer to train on"
Row = dict[str, Any]


def found(data: RunData) -> dict[str, tuple[int, str]]:
    """Return the number of rows and their lines, by finding."""
    return {
        finding.problem: (finding.rows.count, str(finding.rows).rpartition(":")[2]) for _, finding in data.findings()
    }


def pair(chosen: Any, rejected: Any) -> Row:
    """Return two answers, as texts or as messages with further fields."""
    if isinstance(chosen, str):
        return {"prompt": "Who? ", "chosen": chosen, "rejected": rejected}
    answers = {name: [{"role": "assistant", **fields}] for name, fields in (("chosen", chosen), ("rejected", rejected))}
    return {"prompt": [{"role": "user", "content": "Who?"}], **answers}


def said(content: str, **others: str) -> Row:
    return {"content": content, **others}


SHORT, LONG = "I.", "I" * 60
QUESTIONS = {"train_on": "all"}
CASES: dict[str, tuple[str, Row, Row, Row, str]] = {  # objective, settings, a good row, one that fails, the finding
    "no answer is left": ("sft", {}, messages("Who?", SHORT), messages("q" * 60, SHORT), CUT),
    "only the question is left": ("sft", QUESTIONS, messages("Who?", SHORT), messages("q" * 60, SHORT), CUT),
    "no last answer is left": (
        "sft", {"train_on": "completion"}, messages("Who?", SHORT), messages("Who?", "I", LONG, SHORT), CUT,
    ),
    "an answer of spaces is left": ("sft", {}, messages("Who?", SHORT), messages("Who?", "\n \t" * 20 + "I"), CUT),
    "no completion is left": (
        "sft", {}, {"prompt": "Who?", "completion": SHORT}, {"prompt": LONG, "completion": SHORT}, CUT,
    ),
    "only the prompt is left": (
        "sft", QUESTIONS, {"prompt": "Who?", "completion": SHORT}, {"prompt": LONG, "completion": SHORT}, CUT,
    ),
    "a completion of spaces is left": (
        "sft", {}, {"prompt": "Who?", "completion": SHORT}, {"prompt": "Who?", "completion": "\n \t" * 20 + "I"}, CUT,
    ),
    "a text of spaces is left": ("pretrain", {}, {"text": "At dusk."}, {"text": "\n \t" * 20 + "I"}, CUT),
    "packed": (
        "sft", {"packing": True}, messages("Who?", SHORT), messages("Who?", "\n \t" * 20 + "I"), CUT,
    ),
    "equal texts are left": ("dpo", {}, pair(SHORT, "No."), pair(LONG + "a", LONG + "b"), SAME),
    "equal messages are left": (
        "dpo", {}, pair(said(SHORT), said("No.")), pair(said(LONG + "a"), said(LONG + "b")), SAME,
    ),
    "the template drops the difference": (
        "dpo", {}, pair(said(SHORT), said("No.")), pair(said(SHORT, thinking="a"), said(SHORT, thinking="b")), SAME,
    ),
    "equal from the start": ("dpo", {}, pair(SHORT, "No."), pair(SHORT, SHORT), SAME),
    "a rejected answer of spaces is left": ("dpo", {}, pair(SHORT, "No."), pair(SHORT, "\n" * 60 + "I"), CUT),
    "an empty rejected answer": ("dpo", {}, pair(SHORT, "No."), pair(SHORT, ""), NO_ANSWER),
    "no answer": ("sft", {}, messages("Who?", SHORT), messages("Who?"), NO_ANSWER),
    "an empty answer": ("sft", {}, messages("Who?", SHORT), messages("Who?", " "), NO_ANSWER),
    "an empty completion": (
        "sft", {}, {"prompt": "Who?", "completion": SHORT}, {"prompt": "Who?", "completion": ""}, NO_ANSWER,
    ),
    "a completion of a question": (
        "sft", {}, {"prompt": messages("Who?")["messages"], "completion": messages("x", SHORT)["messages"][1:]},
        {"prompt": messages("Who?", SHORT)["messages"], "completion": messages("Why?")["messages"]}, NO_ANSWER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rows_that_fail_once_they_are_cut_are_left_out(tmp_path: Path, case: str) -> None:
    """In training rows and in eval sets; a run all of whose rows fail ends with an error that names them."""
    objective, settings, good, bad, problem = CASES[case]
    settings = {"max_length": 30, **settings}
    data = load(tmp_path, [good, bad], eval_rows=[good, good, bad], objective=objective, **settings)
    assert (len(data.training.rows), len(data.parts[1].rows)) == (1, 2)
    places = {(name, each.problem): str(each.rows) for name, each in data.findings()}
    assert places["training data", problem].endswith("rows.jsonl:2")
    assert places["eval", problem].endswith("eval.jsonl:3")
    batch = data.loader.batch(0)
    assert (batch.labels[:, 1:] != -100).any(1).all()  # no row, and so no rank, has nothing to train on
    with pytest.raises(DataError, match=rf"training data: no row is left to train on: rows that {problem}: 2 \(.*:1-2"):
        load(tmp_path, [bad, bad], objective=objective, **settings)


@pytest.mark.parametrize("case", [name for name in CASES if name.endswith(("left", "packed"))])
def test_rows_that_are_not_cut(tmp_path: Path, case: str) -> None:
    """The control: the same rows are used if all of their tokens are."""
    objective, settings, good, bad, _ = CASES[case]
    assert len(load(tmp_path, [good, bad], objective=objective, max_length=256, **settings).training.rows) == 2


def test_each_row_is_left_out_for_one_reason(tmp_path: Path) -> None:
    """Pairs may have several reasons: the numbers add up to the rows that are left out, and each reason has its own remedy."""
    pairs = [
        pair(SHORT, "No."), pair(SHORT, SHORT), pair("", ""), pair("", SHORT), pair(LONG, ""), pair(LONG + "a", LONG + "b"),
        {"prompt": LONG, "chosen": SHORT, "rejected": SHORT}, {"prompt": LONG, "chosen": SHORT, "rejected": "No."},
    ]  # fmt: skip
    data = load(tmp_path, pairs, objective="dpo", max_length=30)
    reasons = {each.problem: each for _, each in data.findings() if each.leaves_out}
    assert {name: (each.rows.count, str(each.rows).rpartition(":")[2]) for name, each in reasons.items()} == {
        NO_ANSWER: (3, "3-5"), CUT: (2, "7-8"), SAME: (2, "6"),
    }  # fmt: skip
    assert sum(each.rows.count for each in reasons.values()) == data.report.num_read - len(data.training.rows)
    assert {name: "max_length" in each.remedy for name, each in reasons.items()} == {
        NO_ANSWER: False,
        CUT: True,
        SAME: True,
    }


def test_an_eval_set_of_which_no_row_is_left(tmp_path: Path) -> None:
    *_, good, bad, problem = CASES["no answer is left"]
    with pytest.raises(DataError, match=rf"eval: no row is left to evaluate: rows that {problem}: 1 \("):
        load(tmp_path, [good], eval_rows=[bad], max_length=30)


UNANSWERED, SPECIAL, BLANK = (
    "end with a turn that the assistant does not answer", "have a special token in the text of a prompt",
    "have an empty question or answer",
)  # fmt: skip
NO_END, DROPPED = (
    "have an answer that no end-of-turn token follows",
    "have messages, reasoning or tools that the chat template drops",
)
LOST = "lost tokens to train on by truncation"
ENDS_ONCE = CHATML.replace("'<|im_end|>\\n' }}", "('' if loop.last else '<|im_end|>\\n') }}")

DROPS_THIRD = CHATML.replace(
    "{{ '<|im_start|>' +", "{% if loop.index == 3 %}{% continue %}{% endif %}{{ '<|im_start|>' +"
)


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize(
    ("row", "length", "whole", "cut"),
    [
        (messages("Who?", SHORT, "q" * 60), 18, {UNANSWERED}, set()),  # the turn is cut off
        (messages("Who?", SHORT, "q" * 60), 30, {UNANSWERED}, {UNANSWERED}),
        (messages("Who?", SHORT, "q" * 60, "never seen"), 30, set(), {UNANSWERED, LOST}),  # its answer is
        (messages("Who?", SHORT, "Why?", LONG), 40, set(), {LOST}),
        (messages("Who?", SHORT, "<|im_start|>", SHORT), 18, {SPECIAL}, {LOST}),
        (messages("Who?", SHORT, " ", SHORT), 18, {BLANK}, {LOST}),
        (messages("", SHORT, "Who?", SHORT), 15, {BLANK}, {BLANK, LOST}),
    ],
)
def test_findings_are_about_the_part_that_is_trained_on(
    tmp_path: Path, marks: bool, row: Row, length: int, whole: set[str], cut: set[str]
) -> None:
    template = CHATML_WITH_MARKS if marks else CHATML
    assert set(found(load(tmp_path, [row], max_length=256, chat_template=template))) == whole
    assert set(found(load(tmp_path, [row], max_length=length, chat_template=template))) == cut


@pytest.mark.parametrize(
    ("template", "problem"),
    [(ENDS_ONCE, NO_END), (DROPS_THIRD, DROPPED)],
)
def test_faults_of_the_template_behind_the_cut(tmp_path: Path, template: str, problem: str) -> None:
    turns = ("Who?", SHORT, "Why?", SHORT)
    assert problem in found(load(tmp_path, [messages(*turns)], max_length=256, chat_template=template))
    assert problem not in found(load(tmp_path, [messages(*turns)], max_length=18, chat_template=template))


def test_too_few_rows_are_left_to_hold_some_out(tmp_path: Path) -> None:
    """It is said how many there were, and why they are left out."""
    rows = [messages("q" * 90, "Night."), messages("q" * 90, "Day."), messages("Who?", "I.")]
    message = rf"test_split_size is 2, but only 1 of 3 rows is used; rows that {CUT}: 2 \(.*; raise max_length"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, rows, max_length=32, test_split_size=2)


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_rows_kept_whole_for_packing_are_checked_as_they_are_evaluated(tmp_path: Path, strategy: str) -> None:
    """Training splits long rows, and the held-out ones are cut: a long row whose answer is lost is left out with its place."""
    rows = [messages("q" * 90, f"Night {number}.") for number in range(3)]
    packing = {"packing": True, "packing_strategy": strategy, "eval_packing": False, "max_length": 32}
    with pytest.raises(DataError, match=rf"held_out: no row is left to evaluate: rows that {CUT}: 1 \("):
        load(tmp_path, rows, **packing, test_split_size=1)
    rows += [messages("Who?", f"{number}") for number in range(6)]
    data = load(tmp_path, rows, **packing, test_split_size=8)
    (held_out,) = (part for part in data.parts if part.name == "held_out")
    left_out = next(each.rows for name, each in data.findings() if (name, each.problem) == ("held_out", CUT))
    assert len(held_out.rows) + left_out.count == 8
    assert left_out.count == sum(":" in place for place in str(left_out).split(",")) or "-" in str(left_out)
    assert int(held_out.rows.lengths.max()) <= 32
    # They are the tokens that a run without packing has.
    whole = load(tmp_path, rows, max_length=32).training.rows
    ids = {row.place: row.sequences[0].ids.tolist() for row in whole}
    assert all(row.sequences[0].ids.tolist() == ids[row.place] for row in held_out.rows)


def test_a_row_that_loses_its_targets_by_being_split_is_reported(tmp_path: Path) -> None:
    """Nothing predicts the first token of a packed row, so a row whose only target stands there has none."""
    tokenizer = build_tokenizer(CHATML_WITH_MARKS.replace("+ '<|im_end|>' }}{% endgen", "}}{% endgen"))
    whole = tokenizer.apply_chat_template(messages("Who?", "I")["messages"], return_dict=True)["input_ids"]
    prompt = len(whole) - 2  # without the answer and the newline behind it
    rows = [messages("Who?", "I"), messages("Who?", SHORT)]
    options = {"packing": True, "packing_strategy": "bfd_split", "max_length": prompt}
    config = SCHEMAS["sft"].model_validate(
        {"model_name_or_path": str(tmp_path), "datasets": str(write(tmp_path, rows)), **options}
    )
    data = load_data(config, tokenizer)
    (problem,) = (each for _, each in data.findings() if each.problem == CUT)
    assert (problem.rows.count, str(problem.rows).rpartition(":")[2]) == (1, "1")


def test_overlap_of_rows_that_are_cut_alike(tmp_path: Path) -> None:
    """A long row is trained on in pieces, and evaluated by its first piece."""
    rows = [messages("Who?", LONG), messages("Why?", SHORT)]
    packing = {"packing": True, "packing_strategy": "bfd_split", "eval_packing": False, "max_length": 30}
    data = load(tmp_path, rows, eval_rows=[messages("Who?", LONG), messages("When?", SHORT)], **packing)
    assert found(data)["are also trained on"] == (1, "1")


def test_pairs_that_become_equal_do_not_reach_a_batch(tmp_path: Path) -> None:
    """The negative control of `SAME`: without the check, the pair is in the batch."""
    path = write(tmp_path, [pair(SHORT, "No."), pair(LONG + "a", LONG + "b")])
    config = SCHEMAS["dpo"].model_validate({"model_name_or_path": "m", "datasets": str(path)})
    tokenizer = build_tokenizer()
    for length, used in ((256, 2), (30, 1)):
        report = prepare(config.datasets or (), tokenizer, PreprocessConfig("dpo", max_length=length))
        assert len(report.rows) == used
        batch = batch_from(report.rows, 0, 8)
        assert all(
            chosen.ids.tolist() != rejected.ids.tolist() for chosen, rejected in (row.sequences for row in report.rows)
        )
        assert batch.num_trained
        assert (SAME in [each.problem for each in report.findings]) == (used == 1)
