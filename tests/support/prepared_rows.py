"""Rows of conversations, written to files and prepared for training."""

import json
from pathlib import Path
from typing import Any

from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.config.run import SCHEMAS
from horizon_lm.runs.data.chat_template import TokenizedConversation
from horizon_lm.runs.data.conversations import Conversation
from horizon_lm.runs.data.examples import ROWS_INSPECTED
from horizon_lm.runs.data.packing import pack_rows
from horizon_lm.runs.data.preprocess import PreprocessConfig, prepare
from horizon_lm.runs.training.rows import RunData, load_data
from tests.e2e.tiny import CHATML, build_tokenizer

USER, ANSWER = {"role": "user", "content": "Who?\nNow"}, {"role": "assistant", "content": "The keeper."}


def write(tmp_path: Path, rows: Any, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(
        rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def write_late_fault(path: Path) -> Path:
    """Write rows that are valid as far as they are looked at before a model is, and no JSON behind these."""
    path.write_text('{"text": "a"}\n' * ROWS_INSPECTED + "no JSON\n")
    return path


def prepared(path: Path, *, objective: str = "sft", chat_template: str | None = CHATML, **settings: Any) -> Any:
    dataset = {
        name: settings.pop(name)
        for name in ("columns", "format", "max_samples", "fraction", "weight")
        if name in settings
    }
    options = PreprocessConfig(objective, **settings)
    report = prepare([DatasetConfig(path=str(path), **dataset)], build_tokenizer(chat_template), options)
    return pack_rows(report.rows, options.packing, options.max_length)[0], report


def load(
    folder: Path, rows: list[dict[str, Any]], *, objective: str = "sft", eval_rows: list[dict[str, Any]] | None = None,
    chat_template: str = CHATML, **settings: Any,
) -> RunData:  # fmt: skip
    """Return the rows of a run, prepared as `train` and `inspect` do."""
    if eval_rows is not None:
        settings["eval_datasets"] = str(write(folder, eval_rows, "eval.jsonl"))
    settings |= {"model_name_or_path": str(folder), "datasets": str(write(folder, rows)), "objective": objective}
    return load_data(SCHEMAS[objective].model_validate(settings), build_tokenizer(chat_template))


def conversation(*contents: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation([{"role": roles[n % 2], "content": c} for n, c in enumerate(contents)])


def trained_text(tokenizer: Any, row: TokenizedConversation) -> str:
    return tokenizer.decode(row.ids[row.assistant])


def messages(*contents: str) -> dict[str, Any]:
    return {"messages": list(conversation(*contents).messages)}
