"""``horizon-lm merge``: merge adapters into their base."""

from pathlib import Path
from typing import Annotated

import typer

from horizon_lm.cli.common import exits
from horizon_lm.errors import ConfigError

_DTYPES = ("bfloat16", "float16", "float32")


@exits
def merge(
    adapter: Annotated[str, typer.Argument(help="The folder or hub id of PEFT's adapters.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    model: Annotated[str | None, typer.Option(help="The base. Default: the one that the adapters name.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"Dtype of the weights: {', '.join(_DTYPES)}. Default: that of the base.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a file.")] = "50GB",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code shipped with the model.")] = False,
) -> None:
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"--dtype {dtype}: choose one of {', '.join(_DTYPES)}")
    from horizon_lm.checkpoints.merge import merge_adapter

    merge_adapter(adapter, folder, model, dtype, max_shard_size, trust_remote_code)
    print(f'The model is in {folder}. Try it:\n  horizon-lm generate {folder} "..."')
