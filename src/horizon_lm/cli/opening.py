"""A model to ask: streamed, and with its tokenizer."""

from pathlib import Path
from typing import Any


def open_model(
    name: str, device: str, device_memory: int | None, precision: str, gguf_file: str | None, trust_remote_code: bool
) -> tuple[Any, Any]:
    """The streamed model of a folder or hub id in evaluation mode, and its tokenizer."""
    import horizon_lm
    from horizon_lm.model.source import local_folder
    from horizon_lm.training.setup import choose_device, open_tokenizer

    folder: Path = local_folder(name)
    model = horizon_lm.from_pretrained(
        folder,
        device=choose_device(device),
        precision=precision,
        device_memory=device_memory,
        gguf_file=gguf_file,
        trust_remote_code=trust_remote_code,
    )
    return model.eval(), open_tokenizer(folder, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
