"""Show how the rows of a run are tokenized and which tokens are trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from horizon_lm.cli.inspected_rows import ShownSequence, shown_sequences
from horizon_lm.cli.inspection_page import batch_page
from horizon_lm.common.quantities import counted
from horizon_lm.common.visible import visible
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.positions import positions_of
from horizon_lm.runs.admission.inputs import fetch_source
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.findings import reject_errors
from horizon_lm.runs.data.tokenize import RowFlag
from horizon_lm.runs.data.vision import vision_of
from horizon_lm.runs.training.rows import RunData, load_data
from horizon_lm.runs.training.samples import end_line
from horizon_lm.runs.training.setup import load_tokenizer

_TRAINED, _CONTEXT, _SPECIAL, _IMAGE, _PADDING = "bold green", "", "magenta", "cyan", "dim"


@dataclass(frozen=True)
class Inspection:
    """The rows of a run, prepared as for training.

    Attributes:
        config: settings of the run.
        tokenizer: its tokenizer.
        data: its rows.
        generation_config: that of its model.
    """

    config: RunConfig
    tokenizer: Any
    data: RunData
    generation_config: Any

    def numbers(self) -> dict[str, Any]:
        """Return statistics of the training rows."""
        training = self.data.training
        rows, packed, report = training.rows, training.packed, self.data.report
        tokens, targets = int(packed.num_tokens.sum()), int(packed.num_targets.sum())
        numbers: dict[str, Any] = {
            "rows_read": report.num_read,
            "cut": report.found.flagged[RowFlag.TRUNCATED].count,
            "left_out": report.num_read - len(report.rows),
            "held_out": {part.name: len(part.rows) for part in self.data.parts if part is not training},
            "rows": len(rows),
            "tokens": tokens,
            "trained": targets,
            "share_trained": round(targets / tokens, 4),
            "length": {
                name: int(np.quantile(rows.lengths, share))
                for name, share in (("shortest", 0), ("median", 0.5), ("90%", 0.9), ("99%", 0.99), ("longest", 1))
            },
            "steps_per_epoch": self.data.loader.sampler.steps_per_epoch,
            "rows_per_step": self.config.rows_per_step,
        }
        if num_images := sum(part.image_sizes().size for part in rows.parts):
            numbers["images"] = num_images
            numbers["image_tokens"] = int(sum(part.image_sizes().sum() for part in rows.parts))
        if "date" in self.data.origin:
            numbers["date_in_template"] = self.data.origin["date"]
        if packed is not rows:
            numbers["packed_rows"] = len(packed)
            numbers["packed_fill"] = round(tokens / (len(packed) * (self.config.max_length or 1)), 4)
        return {name: value for name, value in numbers.items() if value != {}}

    def as_json(self) -> dict[str, Any]:
        """Return statistics and findings as JSON values."""
        findings = [
            {
                "data": name, "error": finding.is_error, "rows": finding.rows.count, "what": finding.problem,
                "remedy": finding.remedy, "places": finding.rows.places,
            }
            for name, finding in self.data.findings()
        ]  # fmt: skip
        return {"numbers": self.numbers(), "end_tokens": self.end_tokens(), "findings": findings}

    def end_tokens(self) -> dict[str, Any]:
        """Return the tokens that end the answers that are trained on, with their numbers."""
        ends = self.data.report.rows.end_tokens()
        return dict(zip(self.tokenizer.convert_ids_to_tokens(ends), ends, strict=True))

    def reject_errors(self) -> None:
        """Raise DataError if training would reject the rows."""
        reject_errors([finding for _, finding in self.data.findings()])


def inspect_run(config: RunConfig) -> Inspection:
    """Prepare the rows of a run as training does, without loading its model."""
    model = fetch_source(config).model
    tokenizer = load_tokenizer(config, model)
    skeleton = model.skeleton()
    vision = vision_of(model, config.image_max_pixels, config.image_min_pixels)
    data = load_data(config, tokenizer, positions_of(skeleton), vision=vision)
    return Inspection(config, tokenizer, data, skeleton.generation_config)


def write_page(inspection: Inspection, num_batches: int, num_rows: int, file: Path) -> None:
    """Write a page with batches and their images; raise ConfigError if it cannot be written."""
    batches = [inspection.data.loader.batch(step) for step in range(num_batches)]
    page = batch_page(inspection.tokenizer, inspection.data.training.packed, batches, num_rows)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file}: cannot be written ({first_line(error)})") from error


def show(inspection: Inspection, num_batches: int, num_rows: int) -> None:
    """Print batches, statistics and findings, in colour on a terminal."""
    console = Console(soft_wrap=True)
    for step in range(num_batches):
        _show_batch(console, inspection, inspection.data.loader.batch(step), step, num_rows)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in inspection.numbers().items():
        table.add_row(name.replace("_", " "), Text(visible(_in_words(value))))
    if ends := inspection.end_tokens():
        table.add_row("end tokens", Text(visible(", ".join(ends))))
    console.print(table)
    if line := end_line(inspection.tokenizer, inspection.generation_config, list(ends.values())):
        console.print(Text(visible(line)))
    found = inspection.data.finding_lines()
    for finding, line in found:
        console.print(Text(visible(line), style="bold red" if finding.is_error else "yellow"))
    if not found:
        console.print("no likely mistakes found")


def _in_words(value: Any) -> str:
    """Return a statistic for people."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(each)}" for name, each in value.items())
    return value if isinstance(value, str) else f"{value:,}"


def _show_batch(console: Console, inspection: Inspection, batch: Batch, step: int, num_rows: int) -> None:
    """Print the first rows of a batch."""
    num_sequences, length = batch.input_ids.shape
    answers_per_row = num_sequences // len(batch.places)
    count = counted(len(batch.places), "row") + ("" if answers_per_row == 1 else f", {num_sequences} answers")
    console.print(f"batch {step + 1}: {count} of {counted(length, 'token')}, {batch.num_trained:,} trained on")
    console.print("trained tokens are green, or between [[ and ]] without colour; special tokens are shown verbatim\n")
    for shown in shown_sequences(batch, inspection.data.training.packed, num_rows):
        console.print(Text(visible(shown.title), style="underline"))
        console.print(_render_sequence(console, inspection.tokenizer, batch, shown), "\n")


def _render_sequence(console: Console, tokenizer: Any, batch: Batch, shown: ShownSequence) -> Text:
    """Render one sequence of a batch."""
    text, last_example, was_trained = Text(), 0, False
    for piece in shown.pieces(tokenizer, batch):
        if piece.example != last_example and text:
            text.append("\n-- next example in this packed row --\n", style="cyan")
        if console.color_system is None and piece.trained != was_trained:
            text.append("[[" if piece.trained else "]]")
        last_example, was_trained = piece.example, piece.trained
        style = f"{_TRAINED if piece.trained else _CONTEXT} {_SPECIAL if piece.special else ''}".strip()
        text.append(visible(piece.text), style=style if piece.image is None else _IMAGE)
    if console.color_system is None and was_trained:
        text.append("]]")
    if num_padding := batch.input_ids.shape[1] - shown.num_tokens:
        text.append(f" + {num_padding} padding tokens", style=_PADDING)
    return text
