"""``horizon-lm eval``: run tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) on a streamed model."""

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from horizon_lm.cli.common import exits
from horizon_lm.errors import ConfigError, first_line


@dataclass(frozen=True, slots=True)
class Results:
    """What was measured. ``table``: for people, in Markdown; ``content``: all of it, as lm-eval has it."""

    table: str
    content: dict[str, Any]


def load_tasks(names: Sequence[str]) -> list[Any]:
    """Tasks by their names in lm-eval, or from YAML files.

    Raises:
        ConfigError: lm-eval is not installed, or one of them cannot be loaded.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            "eval needs lm-eval, which is not installed: pip install lm_eval, or Horizon-LM with its extra eval"
        ) from error
    wanted = [name.strip() for text in names for name in text.split(",") if name.strip()]
    if not wanted:
        raise ConfigError("--tasks: name one, or a YAML file")
    files = [name for name in wanted if name.endswith((".yaml", ".yml"))]
    for name in files:
        if not Path(name).is_file():
            raise ConfigError(f"--tasks: there is no file {name}")
    found: dict[str, Any] = {}
    with _quiet():
        manager = TaskManager(include_defaults=len(files) < len(wanted))
        for name in wanted:
            file = Path(name).resolve()
            # A task's data lie beside it, wherever the command is run.
            with contextlib.chdir(file.parent) if name in files else contextlib.nullcontext():
                try:
                    found |= manager.load(str(file) if name in files else name)["tasks"]
                except Exception as error:  # of YAML, of Jinja, of the hub, of the task's own Python
                    where = " (its paths start in its folder)" if name in files else ""
                    raise ConfigError(f"--tasks: {name} cannot be loaded{where}: {first_line(error)}") from error
    return list(found.values())


def evaluate_model(
    model: Any, tokenizer: Any, tasks: list[Any], num_fewshot: int | None, limit: int | None, batch_size: int,
    apply_chat_template: bool,
) -> Results:  # fmt: skip
    """Measure a streamed model.

    Raises:
        ConfigError: a chat template is wanted that there is not, or lm-eval refuses the settings.
    """
    if apply_chat_template and tokenizer.chat_template is None:
        raise ConfigError("--apply-chat-template: the tokenizer has no chat template; remove the option")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import make_table

    with _quiet():
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        # The weights are in host memory; logits come from where they are computed.
        harness._device = model._horizon.engine.device.torch_device
        try:
            results = simple_evaluate(
                model=harness, tasks=tasks, num_fewshot=num_fewshot, limit=limit, batch_size=batch_size,
                apply_chat_template=apply_chat_template, log_samples=False,
            )  # fmt: skip
        except ValueError as error:  # more examples than there are rows, and the like
            raise ConfigError(f"lm-eval refuses: {first_line(error)}") from error
    assert results is not None
    return Results(make_table(results), dict(results))


def write_results(results: Results, path: Path) -> None:
    """As JSON. ConfigError if the file cannot be written."""
    try:
        path.write_text(json.dumps(results.content, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, lm-eval does not explain how it is used otherwise, nor lets git complain that a folder is not of its own."""
    from lm_eval import evaluator

    logger, commit = logging.getLogger("lm_eval"), evaluator.get_git_commit_hash
    before = logger.level
    logger.setLevel(logging.ERROR)
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        logger.setLevel(before)
        evaluator.get_git_commit_hash = commit


@exits
def eval(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or hub id.")],
    tasks: Annotated[
        list[str],
        typer.Option(
            "--tasks", help="A task of lm-eval by its name, or a YAML file with one, whose paths start in its folder; may repeat."
        ),
    ],
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question; the task's number without it.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many questions of each task, to try it.")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Ask through the chat template.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions in one forward.")] = 8,
    output: Annotated[Path | None, typer.Option(help="A JSON file for all results.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    device_memory: Annotated[str | None, typer.Option(help="What buffers may take, such as 300MiB.")] = None,
    precision: Annotated[str, typer.Option(help="Of the weights in host memory: bf16, fp32_master, float32.")] = "bf16",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model.")] = False,
    allow_unproven_model: Annotated[
        bool, typer.Option(help="Open a model that was not found equal to plain autograd.")
    ] = False,
) -> None:  # fmt: skip
    if output is not None and output.is_dir():
        raise ConfigError(f"--output: {output} is a folder; name a file in it")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {output.parent}; make it")
    from horizon_lm.cli.common import open_model
    from horizon_lm.quantities import parse_bytes

    memory = None if device_memory is None else parse_bytes(device_memory)
    loaded = load_tasks(tasks)
    streamed, tokenizer = open_model(model, device, memory, precision, None, trust_remote_code, allow_unproven_model)
    results = evaluate_model(streamed, tokenizer, loaded, num_fewshot, limit, batch_size, apply_chat_template)
    print(results.table)
    if output is not None:
        write_results(results, output)
        print(f"results: {output}")
