"""``horizon-lm export``: turn a checkpoint into a Hugging Face folder, or such a folder into a GGUF file."""

from pathlib import Path
from typing import Annotated

import typer

from horizon_lm.cli import common, outputs
from horizon_lm.errors import ConfigError
from horizon_lm.runs.checkpoints.new_folder import require_new


@common.exits
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint of a run, OUTPUT_DIR/checkpoint-STEP; for GGUF a model, OUTPUT_DIR/model."),
    ],
    folder: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The folder to write, or the file NAME.gguf; it must not exist."),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Dtype of the weights: {', '.join(common.DTYPES)}. Default: that of the run's export. float32 is exact."
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            help="safetensors; or gguf, one file for llama.cpp (Llama, Mistral, Qwen, Gemma, Phi-3 and other models; extra gguf)."
        ),
    ] = "safetensors",
    max_shard_size: common.ShardSize = "50GB",
    trust_remote_code: common.RemoteCode = False,
) -> None:
    if (format := format.lower()) not in ("safetensors", "gguf"):
        raise ConfigError(f"--format {format}: choose safetensors or gguf")
    remedy = ", and quantize the file with llama.cpp's llama-quantize" if format == "gguf" else ""
    common.require_written(dtype, max_shard_size, remedy=remedy)
    if format == "gguf":
        target = folder.expanduser() if folder.suffix == ".gguf" else outputs.new_folder(folder)
        require_new(target)
        from horizon_lm.tools.gguf.export import export_gguf, file_of

        exported, file = export_gguf(checkpoint, target, dtype), file_of(target)
        common.print_written(file, options=f" --gguf-file {file.name}")
        for note in exported.notes:
            print(f"note: {note}")
        return
    folder = outputs.new_folder(folder, remedy=", or add --format gguf" if folder.suffix == ".gguf" else "")
    from horizon_lm.runs.checkpoints.export import export_checkpoint

    export_checkpoint(checkpoint, folder, dtype, max_shard_size, trust_remote_code)
    common.print_written(folder, options=" --trust-remote-code" if trust_remote_code else "")
