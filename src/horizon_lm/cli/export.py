"""``horizon-lm export``: turn a checkpoint into a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from horizon_lm.cli.common import exits
from horizon_lm.errors import ConfigError

_DTYPES = ("bfloat16", "float16", "float32")


@exits
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of a run: OUTPUT_DIR/checkpoint-STEP.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Dtype of the weights: {', '.join(_DTYPES)}. Default: that of the run's export. float32 is exact."
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a file.")] = "50GB",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code shipped with the model.")] = False,
) -> None:
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"--dtype {dtype}: choose one of {', '.join(_DTYPES)}")
    from horizon_lm.checkpoints.export import export_checkpoint

    export_checkpoint(checkpoint, folder, dtype, max_shard_size, trust_remote_code)
    print(f'The model is in {folder}. Try it:\n  horizon-lm generate {folder} "..."')
