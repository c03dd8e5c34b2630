"""The ``horizon-lm`` command. A subcommand's module is imported only when it runs, because importing torch takes seconds."""

import logging
import os
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from horizon_lm.cli.common import (
    exits,
    print_version,
    require_options,
    require_texts,
    require_threads,
    without_garbage_collection,
)
from horizon_lm.cli.leaving import flush_stdout, leave
from horizon_lm.common.signals import interrupt_on_stop_signals
from horizon_lm.common.visible import visible
from horizon_lm.errors import EXIT_CODES

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # libraries read it when they are imported

_COMMANDS = {
    "plan": "Compute the memory, disk space and time that a run needs, before anything is downloaded.",
    "train": "Train a model with the settings of a YAML file, and export it to OUTPUT_DIR/model.",
    "run": "Run a training script of transformers, TRL or accelerate as it is, with its models streamed.",
    "inspect": "Show the tokens that a run would train on, statistics, and likely mistakes in the data.",
    "init": "Print a run file to start from, or translate one of another trainer.",
    "generate": "Answer a prompt with a model that may be larger than the device's memory.",
    "eval": "Run lm-eval tasks on a model that may be larger than the device's memory.",
    "checkpoints": "List the checkpoints of a run, and verify their files.",
    "export": "Turn a checkpoint into a Hugging Face folder, or a model into a GGUF file.",
    "merge": "Merge adapters into their base, one unit of the model at a time.",
    "report": "Write an HTML page about a run: loss, speed, memory compared with the plan, timeline of a step.",
    "doctor": "Benchmark this machine (about a minute), and print what a bug report needs.",
    "version": "Print the versions of Horizon-LM and of the packages that its numbers depend on.",
}
_FOREIGN_COMMANDS = {  # commands of other programs, or of their subcommands
    **{name: f"use train, with objective: {name} in the run file" for name in ("sft", "dpo", "pretrain")},
    **dict.fromkeys(("fit", "finetune", "lora"), "use train"),
    **dict.fromkeys(("chat", "infer", "inference", "predict"), "use generate"),
    **dict.fromkeys(("merge-lora", "merge_lora", "fuse"), "use merge"),
    "preprocess": "use inspect",
    "evaluate": "use eval",
}
_STARTS_THREADS = ("plan", "train", "run", "inspect", "generate", "eval", "export", "merge", "doctor")
# Run settings are not declared as options: any setting of the schema can override the run file.
_ACCEPT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
# Options of other commands may also be written with underscores, as settings are.
_ACCEPT_UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}
# What follows the name of a script belongs to it.
_FIRST_ARGUMENT_ENDS_OPTIONS = {"allow_interspersed_args": False}
_CODES = "  ".join(f"{code} {meaning.partition(':')[0]}," for code, meaning in EXIT_CODES.items()).rstrip(",")


class _LazyCommand(TyperCommand):
    """A subcommand whose module is imported only when its arguments are parsed."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=_COMMANDS[name])

    @exits
    def make_context(self, info_name: str | None, args: list[str], *others: Any, **extra: Any) -> Any:
        """Import the function of the command, and parse the arguments as a typer command made of this function does."""
        require_texts(args)
        if self.name in _STARTS_THREADS:
            require_threads()
        with without_garbage_collection():
            function = getattr(import_module(f"horizon_lm.cli.{self.name}"), str(self.name))
        takes_settings = self.name in ("plan", "train", "inspect")
        settings: dict[str, Any] = _ACCEPT_SETTINGS if takes_settings else _ACCEPT_UNDERSCORES
        if self.name == "run":
            settings = settings | _FIRST_ARGUMENT_ENDS_OPTIONS
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        single.command(self.name, help=self.help, context_settings=settings)(function)
        command = typer.main.get_command(single)
        given = list(args)  # which parsing empties
        context = command.make_context(info_name, args, *others, **extra)
        is_completing = context.resilient_parsing
        if takes_settings and not is_completing:
            require_options(str(self.name), given, [option for each in command.params for option in each.opts])
        return context


class _Commands(TyperGroup):
    """The group of all subcommands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"commands": {name: _LazyCommand(name) for name in _COMMANDS}})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name. Fail with a hint for one that other programs have."""
        if hint := _FOREIGN_COMMANDS.get(args[0]):
            ctx.fail(f"No such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="horizon-lm",
    cls=_Commands,
    help="Train large language models from host RAM.",
    epilog=f"Exit codes: {_CODES}.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=print_version,
            is_eager=True,
            help="Print the versions of Horizon-LM, torch, transformers and numba.",
        ),
    ] = False,
) -> None:
    """Train large language models from host RAM."""


def show_warnings_as_lines() -> None:
    """Print warnings as lines, as errors are printed, without the place in the code. FutureWarning, which is for programmers, is ignored
    unless options of Python say something about warnings.
    """
    warnings.formatwarning = lambda message, *place, **line: f"{visible(f'warning: {message}')}\n"
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)


def main() -> None:
    """Run the installed command."""
    show_warnings_as_lines()
    # transformers and PEFT import bitsandbytes. On some machines it logs that it lacks a library or kernels, which nothing here needs.
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    interrupt_on_stop_signals()
    code = 0
    try:
        app()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        code = end.code
    except OSError:
        code = flush_stdout("\n")  # reports that it cannot be written to, if that is the error
        if not code:
            raise
    leave(code)
