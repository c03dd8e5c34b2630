"""``horizon-lm merge``: merge adapters into their base."""

from typing import Annotated

import typer

from horizon_lm.cli import common, outputs


@common.exits
def merge(
    adapter: Annotated[str, typer.Argument(help="The folder or hub id of PEFT's adapters.")],
    folder: common.Out,
    model: Annotated[
        str | None, typer.Option("--base", "--model", help="The base. Default: the one that the adapters name.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"Dtype of the weights: {', '.join(common.DTYPES)}. Default: that of the base.")
    ] = None,
    max_shard_size: common.ShardSize = "50GB",
    trust_remote_code: common.RemoteCode = False,
) -> None:
    remedy = f"; then horizon-lm export FOLDER {folder} --format gguf" if folder.suffix == ".gguf" else ""
    folder = outputs.new_folder(folder, remedy=remedy)
    common.require_written(dtype, max_shard_size)
    from horizon_lm.tools.merge import merge_adapter

    merge_adapter(adapter, folder, common.find_base(model), dtype, max_shard_size, trust_remote_code)
    common.print_written(folder, options=" --trust-remote-code" if trust_remote_code else "")
