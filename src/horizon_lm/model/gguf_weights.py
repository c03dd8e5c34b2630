"""The weights of a GGUF file, dequantized."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.finite import require_finite
from horizon_lm.model.folder import gguf_path, require_model_files
from horizon_lm.model.gguf_header import read_gguf_header


def load_gguf(folder: Path, gguf_file: str, dtype: torch.dtype) -> Any:
    """Return the model of a GGUF file, dequantized to a dtype and all in memory; raise ConfigError if it cannot be read."""
    from transformers import AutoModelForCausalLM, GgufConfig

    require_model_files(folder)
    read_gguf_header(gguf_path(folder, gguf_file))
    opened: Any  # by its annotation, transformers' method returns a model alone
    try:
        with _without_progress_bars():
            opened = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=gguf_file, dtype=dtype, quantization_config=GgufConfig(dequantize=True),
                trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # transformers' parsers raise anything
        raise ConfigError(
            f"gguf_file: {folder / gguf_file} cannot be opened ({first_line(error)}). It needs pip install "
            "gguf accelerate (or the extra gguf), and an architecture that transformers reads from GGUF"
        ) from error
    model, found = opened
    if missing := sorted(found["missing_keys"]):  # transformers would initialise them
        raise ConfigError(
            f"gguf_file: {folder / gguf_file} has no weights for {len(missing)} tensors of a {type(model).__name__}, for example "
            f"{missing[0]}; if it is a part of a model, join all parts first: llama-gguf-split --merge FIRST_PART OUT"
        )
    for name, parameter in model.named_parameters():
        require_finite(name, parameter.data, folder / gguf_file)
    return model


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Context manager: let transformers show no progress bars, which would go to standard error."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    bar, was_enabled = reader.tqdm, logging.is_progress_bar_enabled()
    reader.tqdm = partial(bar, disable=True)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        reader.tqdm = bar
        if was_enabled:
            logging.enable_progress_bar()
