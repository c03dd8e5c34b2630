"""A model to ask: streamed, and with its tokenizer."""

from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError


def open_model(
    name: str, device: str, device_memory: int | None, precision: str, gguf_file: str | None, trust_remote_code: bool,
    allow_unproven_model: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the streamed model of a folder or hub id in evaluation mode, and its tokenizer."""
    import horizon_lm
    from horizon_lm.model.source import local_folder
    from horizon_lm.training.setup import choose_device, open_tokenizer

    if (Path(name).expanduser() / "model" / "config.json").is_file():
        raise ConfigError(f"{name} is a run; its model is in {Path(name) / 'model'}")
    saved = sorted(Path(name).expanduser().glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    if saved and not (Path(name).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"{name} is a run that has not left its model yet; as it was on the way, it is in {saved[-1]}"
        )
    try:
        folder: Path = local_folder(name)
    except ConfigError as error:
        run = Path(name).expanduser().parent
        hint = f"; the run in {run} has not left its model yet" if (run / "metrics.jsonl").is_file() else ""
        raise ConfigError(str(error).removeprefix("model_name_or_path: ") + hint) from error
    model = horizon_lm.from_pretrained(
        folder,
        device=choose_device(device),
        precision=precision,
        device_memory=device_memory,
        gguf_file=gguf_file,
        trust_remote_code=trust_remote_code,
        allow_unproven_model=allow_unproven_model,
    )
    return model.eval(), open_tokenizer(folder, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
