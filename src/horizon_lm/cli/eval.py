"""``horizon-lm eval``."""

from pathlib import Path
from typing import Annotated

import typer

from horizon_lm.cli.exits import exits
from horizon_lm.errors import ConfigError


@exits
def evaluate(
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
    """Measure a model with tasks of lm-eval while it is streamed from host memory, so it need not fit on the device."""
    if output is not None and output.is_dir():
        raise ConfigError(f"--output: {output} is a folder; name a file in it")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {output.parent}; make it")
    from horizon_lm.cli.evaluation import evaluate_model, load_tasks, write_results
    from horizon_lm.cli.opening import open_model
    from horizon_lm.units import parse_bytes

    memory = None if device_memory is None else parse_bytes(device_memory)
    loaded = load_tasks(tasks)
    streamed, tokenizer = open_model(model, device, memory, precision, None, trust_remote_code, allow_unproven_model)
    results = evaluate_model(streamed, tokenizer, loaded, num_fewshot, limit, batch_size, apply_chat_template)
    print(results.table)
    if output is not None:
        write_results(results, output)
        print(f"results: {output}")
