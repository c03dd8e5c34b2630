"""Law: rows of every format are recognized, converted, trained on and, if they are wrong, rejected with the name of the field.

The rows come from the fields that a format requires: a new format whose fields are known is tested without a line here.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.errors import DataError
from horizon_lm.runs.config.datasets import FORMATS, RowFormat
from horizon_lm.runs.config.run import SCHEMAS
from tests.e2e.tiny import build_tokenizer
from tests.support.prepared_rows import ANSWER, USER, prepared, write

VALUES: dict[str, Any] = {
    "messages": [USER, ANSWER],
    "conversations": [{"from": "human", "value": "Who?\nNow"}, {"from": "gpt", "value": "The keeper."}],
    "chosen": "At dusk. The keeper.",
    "rejected": "At dusk. Rain.",
}
"""Values of fields that are no plain text."""
ROWS = [
    pytest.param(each, objective, fields, id=f"{each.name}, {objective}, {'+'.join(fields)}")
    for each in FORMATS
    for objective in each.objectives
    for fields in each.required
]
EACH = pytest.mark.parametrize(("row_format", "objective", "fields"), ROWS)


def row_of(fields: tuple[str, ...], number: int = 0) -> dict[str, Any]:
    return {name: VALUES.get(name, f"The {name} of night {number}.") for name in fields}


def tokens_of(path: Path, objective: str, **settings: Any) -> list[Any]:
    """Return the tokens of each row, and the tokens among them that are trained on."""
    table, _ = prepared(path, objective=objective, **settings)
    return [[(each.ids.tolist(), each.ids[each.trained].tolist()) for each in row.sequences] for row in table]


@EACH
def test_rows_are_recognized_and_named(
    tmp_path: Path, row_format: RowFormat, objective: str, fields: tuple[str, ...]
) -> None:
    """By their fields, by the setting, and with fields of other names, in any file, the same tokens are trained on."""
    rows = [row_of(fields, number) for number in range(3)]
    expected = tokens_of(write(tmp_path, rows), objective)
    assert len(expected) == 3
    assert tokens_of(write(tmp_path, rows), objective, format=row_format.name) == expected
    assert tokens_of(write(tmp_path, json.dumps(rows), "rows.json"), objective) == expected
    renamed = [{f"their_{name}": value for name, value in row.items()} for row in rows]
    columns = {name: f"their_{name}" for name in fields}
    assert tokens_of(write(tmp_path, renamed), objective, columns=columns) == expected
    changed = [row_of(fields, number + 1) for number in range(3)]
    assert set(fields) <= VALUES.keys() or tokens_of(write(tmp_path, changed), objective) != expected  # control


@EACH
def test_the_last_field_is_trained_on(
    tmp_path: Path, row_format: RowFormat, objective: str, fields: tuple[str, ...]
) -> None:
    """To its end; the fields before it are prompts, and no target."""
    (row,) = tokens_of(write(tmp_path, [row_of(fields)]), objective)
    tokenizer = build_tokenizer()
    texts = [tokenizer.decode(trained) for _, trained in row]
    *prompts, answer = [row_of(fields)[name] for name in fields]
    last = answer if isinstance(answer, str) else "The keeper."
    assert last.removeprefix("At dusk.") in texts[-1]
    for prompt in prompts if len(row) == 1 else ():
        assert prompt not in texts[-1]


@EACH
def test_a_wrong_field_is_named(tmp_path: Path, row_format: RowFormat, objective: str, fields: tuple[str, ...]) -> None:
    for name in fields:
        lacking = {other: value for other, value in row_of(fields).items() if other != name}
        for row in (row_of(fields) | {name: 7}, lacking):
            path = write(tmp_path, [row_of(fields), row])
            with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{name}"):
                prepared(path, objective=objective, format=row_format.name)


@EACH
def test_other_objectives_are_named(
    tmp_path: Path, row_format: RowFormat, objective: str, fields: tuple[str, ...]
) -> None:
    for other in SCHEMAS.keys() - set(row_format.objectives):
        path = write(tmp_path, [row_of(fields)])
        with pytest.raises(DataError, match=f"{row_format.name} format are not supported with objective: {other}"):
            prepared(path, objective=other)
        with pytest.raises(DataError, match=f"format: {row_format.name} is not supported with objective: {other}"):
            prepared(path, objective=other, format=row_format.name)
