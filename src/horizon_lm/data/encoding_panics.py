"""Turn a panic of the tokenizers library into an error that names the tokenizer.

Patterns of a ``tokenizer.json`` may take more tries for a text than the library allows. It panics then, with an exception
that is no ``Exception``, so nobody who handles errors would catch it.
"""

from functools import wraps
from typing import Any

from horizon_lm.errors import ConfigError, first_line

_PANIC = "PanicException"  # of pyo3, which offers no import of it


def report_panics() -> None:
    """Let all fast tokenizers raise ConfigError where their library panics. Calling this again changes nothing."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    encode = TokenizersBackend._encode_plus
    if encode.__module__ != __name__:
        TokenizersBackend._encode_plus = _reporting(encode)  # type: ignore[method-assign]


def _reporting(encode: Any) -> Any:
    """Return a method that encodes, and raises ConfigError if the Rust code of the tokenizer panics."""

    @wraps(encode, assigned=())
    def reporting(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return encode(tokenizer, *args, **kwargs)
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            raise ConfigError(
                f"{tokenizer.name_or_path}: its tokenizer fails for a text ({first_line(error)}), mostly because of a pattern in tokenizer.json; "
                "use the tokenizer of the model's publisher, or leave the text out"
            ) from error

    return reporting
