"""Open the tokenizer of a folder, and reject one that would fail later: for want of memory, or with a panic of its library."""

import json
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from horizon_lm.common.gguf_header import read_gguf_header
from horizon_lm.errors import ConfigError, HorizonError, first_line
from horizon_lm.model.folder import code_remedy, gguf_path, gguf_remedy, require_model_files, require_tokenizer_files
from horizon_lm.runs.data.gguf_tokenizer import build_tokenizer
from horizon_lm.runs.data.template_limits import limit_templates

_LARGEST_TOKEN = 2**31 - 1  # ids of tokens are kept as int32
_MAX_GROWTH = 64  # characters made of one; published normalizers make up to three
_MAX_PARSED_BYTES = 2**22  # of a tokenizer.json that is parsed before it is loaded; longer ones are checked afterwards
_PANIC = "PanicException"  # of pyo3, which offers no import of it


def open_tokenizer(folder: Path, trust_remote_code: bool = False, gguf_file: str | None = None) -> Any:
    """Load the tokenizer in a folder, limiting its templates and texts. Raise ConfigError if there is none, or it exceeds a limit."""
    from transformers import AutoTokenizer

    limit_templates()
    _report_panics()
    require_model_files(folder)
    _limit_growth_of_file(folder / "tokenizer.json")
    if gguf_file is None:
        require_tokenizer_files(folder)
    try:
        if gguf_file is not None:
            tokenizer = build_tokenizer(read_gguf_header(gguf_path(folder, gguf_file)))
        else:
            # trust_remote_code is passed even if it is False: without it, transformers asks on standard input.
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest > _LARGEST_TOKEN:
            raise ValueError(f"it has a token with the number {largest:,}")
        _limit_growth_of(tokenizer, folder / "tokenizer.json")
        return tokenizer
    except HorizonError:
        raise
    except Exception as error:  # the parsers of transformers and tokenizers raise anything
        if gguf_file is not None:
            place = folder / gguf_file
            raise ConfigError(f"gguf_file: {place} cannot be read ({first_line(error)}); download it again") from error
        raise ConfigError(
            f"{folder} has no tokenizer that can be read ({first_line(error)})"
            f"{code_remedy(error) or gguf_remedy(folder) or '; copy tokenizer.json and tokenizer_config.json into it'}"
        ) from error


# Texts that grow


def _limit_growth_of_file(path: Path) -> None:
    """Raise ConfigError if the normalizer in a ``tokenizer.json`` makes too many characters of one, before loading uses it. A file that is
    too long to be parsed twice is checked once it is loaded (`_limit_growth_of`).
    """
    if not path.is_file() or path.stat().st_size > _MAX_PARSED_BYTES:
        return
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # reported when it is loaded
    if isinstance(content, dict):
        _limit_growth(content.get("normalizer"), path)


def _limit_growth_of(tokenizer: Any, place: object) -> None:
    """Raise ConfigError, naming ``place``, if the normalizer of a loaded tokenizer makes too many characters of one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.normalizer is not None:
        _limit_growth(json.loads(backend.normalizer.__getstate__()), place)


def _limit_growth(normalizer: Any, place: object) -> None:
    """Raise ConfigError if a normalizer could make a text much longer: a kilobyte of replacements can make petabytes of a word."""
    if (growth := _growth(normalizer)) > _MAX_GROWTH:
        shown = f"{growth:,.0f}" if growth < 1e15 else f"{growth:.0e}"
        raise ConfigError(
            f"{place}: its normalizer makes up to {shown} characters of one, more than {_MAX_GROWTH}; download it again"
        )


def _growth(normalizer: Any) -> float:
    """Return a bound on the number of characters that a normalizer makes of one."""
    if not isinstance(normalizer, Mapping):
        return 1.0
    parts = normalizer.get("normalizers")
    growth = 1.0
    for part in parts if isinstance(parts, list) else ():
        growth = min(growth * _growth(part), 1e300)  # a number that can still be printed
    content, pattern = normalizer.get("content"), normalizer.get("pattern")
    if isinstance(content, str) and isinstance(pattern, Mapping):  # replaces each match of the pattern by the content
        replaced = pattern.get("String")
        if isinstance(replaced, str) and replaced:
            growth *= max(1.0, len(content) / len(replaced))
        else:  # a regular expression, which may match between any two characters
            growth *= len(content) + 1.0
    return growth


# Panics


def _report_panics() -> None:
    """Make all fast tokenizers of this process raise ConfigError where their library panics. Calling this again changes nothing.

    Patterns of a ``tokenizer.json`` may take more tries for a text than the library allows. It panics then, with an exception
    that is no ``Exception``, so nobody who handles errors would catch it.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    encode = TokenizersBackend._encode_plus
    if encode.__module__ != __name__:
        TokenizersBackend._encode_plus = _reporting(encode)  # type: ignore[method-assign]


def _reporting(encode: Any) -> Any:
    """Return a method that encodes as ``encode`` does, but raises ConfigError if the Rust code of the tokenizer panics."""

    @wraps(encode, assigned=())  # keeps the name of this module, by which `_report_panics` knows the method
    def reporting(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return encode(tokenizer, *args, **kwargs)
        except BaseException as error:  # a panic is no Exception
            if type(error).__name__ != _PANIC:
                raise
            raise ConfigError(
                f"{tokenizer.name_or_path}: its tokenizer fails for a text ({first_line(error)}), mostly because of a pattern in tokenizer.json; "
                "use the tokenizer of the model's publisher, or leave the text out"
            ) from error

    return reporting
