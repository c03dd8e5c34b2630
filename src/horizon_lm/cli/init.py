"""``horizon-lm init``: write a run file to start from, or translate one of another trainer."""

import sys
from typing import Annotated

import typer

from horizon_lm.cli.common import exits


@exits
def init(
    objective: Annotated[
        str | None, typer.Argument(help="sft, pretrain or dpo.", metavar="[sft|pretrain|dpo]", show_default=False)
    ] = None,
    translate: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE", help="A file of TRL, LLaMA-Factory or Axolotl to translate."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept", metavar="NAME", help="Accept that this setting of FILE changes the numbers. Repeatable."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Add all other settings, commented out.")] = False,
) -> None:
    from horizon_lm.common.quantities import counted
    from horizon_lm.common.visible import visible
    from horizon_lm.errors import ConfigError
    from horizon_lm.runs.config.run import SCHEMAS
    from horizon_lm.runs.config.text import START_HEADING, START_VALUES, start_file
    from horizon_lm.tools.translate import translate_file

    if objective is not None and objective not in SCHEMAS:
        raise ConfigError(f"{objective!r} is not an objective; choose one of {', '.join(SCHEMAS)}")
    if accept and translate is None:
        raise ConfigError("--accept is for a file that is translated; add --from FILE")
    if translate is not None:
        translation = translate_file(translate, objective, accept or ())
        print(visible(translation.text(full)), end="")
        # To standard error, because standard output is usually redirected into the run file.
        for effect, left_out in (
            ("accepted, changing the numbers", translation.left_out.numbers),
            ("left out, changing nothing", translation.left_out.nothing),
        ):
            if left_out:
                print(f"{counted(len(left_out), 'setting')} of {visible(translate)} {effect}:", file=sys.stderr)
            for name, reason in left_out.items():
                print(visible(f"  {name}: {reason}"), file=sys.stderr)
        for name in translation.not_needed:
            print(visible(f"--accept {name} is not needed: no such setting changes the numbers"), file=sys.stderr)
        return
    chosen = objective or "sft"
    print(start_file(SCHEMAS[chosen], START_VALUES[chosen], START_HEADING[chosen], full), end="")
