"""``horizon-lm export``: turn a checkpoint into a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from horizon_lm.cli import common


@common.exits
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of a run: OUTPUT_DIR/checkpoint-STEP.")],
    folder: common.Out,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Dtype of the weights: {', '.join(common.DTYPES)}. Default: that of the run's export. float32 is exact."
        ),
    ] = None,
    max_shard_size: common.ShardSize = "50GB",
    trust_remote_code: common.RemoteCode = False,
) -> None:
    common.require_dtype(dtype)
    from horizon_lm.checkpoints.export import export_checkpoint

    export_checkpoint(checkpoint, folder, dtype, max_shard_size, trust_remote_code)
    common.print_written(folder)
