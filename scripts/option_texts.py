"""Write the descriptions of options into the docstrings of `horizon_lm.stream` and `horizon_lm.from_pretrained`: python scripts/option_texts.py.

The docstrings are text in a file, because editors and `help` read them there; `OPTION_TEXTS` is the source of the options that settings
of a run have, too. `tests/repository/test_option_texts.py` fails if they differ.
"""

import re
import textwrap
from pathlib import Path

from horizon_lm.common.streaming_options import OPTION_TEXTS

DOCSTRINGS = Path(__file__).resolve().parents[1] / "src" / "horizon_lm" / "engine" / "opening" / "loading.py"
# Sentences that hold for an argument alone.
_IN_PYTHON = {
    "device": "Also simulated, or a `Device`.",
    "grad_dtype": "With several backward calls per step, float32 rounds less often.",
    "device_memory": "A number of bytes.",
    "device_micro_batch_size": "Default: the whole batch.",
    "head": "Only whole, Hugging Face's own head and loss, returns logits.",
    "head_chunk_tokens": "Default: about 64 MiB of logits in host memory, and a sixteenth of the free memory on other devices.",
    "activation_checkpoints": "With auto, the remaining memory is used for resident blocks, as planned for the first batch.",
    "expert_tile": "Default: whole blocks.",
    "check_gradients": "The first difference raises GradientMismatchError.",
    "model_name_or_path": "Also by its name in transformers, ``pretrained_model_name_or_path``.",
}
_ARGUMENT = re.compile(r"^ {8}(\w+): .*\n(?: {12}.*\n)*", re.MULTILINE)
_WIDTH = 120


def with_option_texts(source: str) -> str:
    """Return a module's source, in which the docstrings describe each option with its text, but for references such as "as in `stream`"."""
    return _ARGUMENT.sub(_described, source)


def _described(argument: re.Match[str]) -> str:
    """Return the lines of a docstring about an argument."""
    name = argument[1]
    if name not in OPTION_TEXTS or f"{name}: as in `" in argument[0]:
        return argument[0]
    text = f"{name}: {argument_text(name)}"
    lines = textwrap.wrap(text, _WIDTH - 8, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "".join(f"        {line}\n" for line in lines)


def argument_text(name: str) -> str:
    """Return the description of an argument, which begins with a lower-case letter, unless its first word is an abbreviation."""
    text = f"{OPTION_TEXTS[name]} {_IN_PYTHON.get(name, '')}".rstrip()
    return text if text[:2].isupper() else text[0].lower() + text[1:]


if __name__ == "__main__":
    DOCSTRINGS.write_text(with_option_texts(DOCSTRINGS.read_text(encoding="utf-8")), encoding="utf-8")
