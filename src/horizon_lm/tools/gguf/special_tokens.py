"""The special tokens of a tokenizer and its chat template as metadata of a GGUF file.

A file names one token that llama.cpp may put before each text, one that it may put after it, and three that end an answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.generation import end_tokens

_KINDS = ("bos", "eos", "unk", "sep", "pad", "mask")
_FURTHER_ENDS = ("eot", "eom")  # llama.cpp's names of end tokens beside eos


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens as a GGUF file has them.

    Attributes:
        ids: the tokens, by the names that the package gguf has for them.
        adds_bos, adds_eos: whether ``bos`` is put before each text, and ``eos`` after it.
        chat_template: the template, or several with names; None without any.
        notes: lines on what llama.cpp does differently.
    """

    ids: Mapping[str, int]
    adds_bos: bool
    adds_eos: bool
    chat_template: str | list[dict[str, str]] | None
    notes: Sequence[str]

    def add_to(self, writer: Any) -> None:
        """Add the tokens to the package's writer of a file."""
        for name, number in self.ids.items():
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(self.adds_eos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def read_special_tokens(tokenizer: Any, folder: Path, vocab_size: int, generation_config: Any) -> SpecialTokens:
    """Return the special tokens of a tokenizer that was opened from a folder.

    Args:
        tokenizer: the tokenizer. What it adds to a text counts, whatever the files of the folder say that it adds.
        folder: the folder, for messages.
        vocab_size: rows of the embedding.
        generation_config: the generation config of the model, for the tokens that end an answer.

    Raises:
        ModelNotSupportedError: the tokenizer adds tokens that a file cannot name, or no token ends an answer.
    """
    (before, after), known_ids = _added_to_text(tokenizer), range(vocab_size)  # tokens with a row in the embedding
    ends = [number for number in end_tokens(generation_config) if number in known_ids]
    of_model = {"bos": generation_config.bos_token_id, "eos": next(iter(ends), None)}
    of_tokenizer = {name: getattr(tokenizer, f"{name}_token_id") for name in _KINDS}
    of_tokenizer = {name: number for name, number in of_tokenizer.items() if number in known_ids}
    # A token that is added to texts gets the name if no token has it yet (`setdefault`).
    for name, added, where in (("bos", before, "before"), ("eos", after, "after")):
        if added and added != [of_tokenizer.setdefault(name, added[0])]:
            raise ModelNotSupportedError(
                f"{folder}: the tokenizer puts {_shown(tokenizer, added)} {where} each text, and a GGUF file can only name "
                f"{name}_token, {_shown(tokenizer, [of_tokenizer[name]])}; change {name}_token or the tokenizer's post_processor"
            )
    ids = {name: number for name, number in {**of_model, **of_tokenizer}.items() if number in known_ids}
    if "eos" not in ids:
        raise ModelNotSupportedError(
            f"{folder}: neither the tokenizer nor generation_config.json has an end token, and llama.cpp would take another "
            "one; set eos_token in tokenizer_config.json"
        )
    further = [number for number in ends if number != ids["eos"]]
    ids |= dict(zip(_FURTHER_ENDS, further, strict=False))
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = [{"name": name, "template": text} for name, text in template.items()]
    notes = [
        *_notes_on_ends(tokenizer, further[len(_FURTHER_ENDS) :]),
        *_notes_on_texts(tokenizer, ids, before, after),
    ]
    return SpecialTokens(ids, bool(before), bool(after), template, notes)


def _added_to_text(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after each text, found by tokenizing one with and without the post-processor, which
    is removed meanwhile.
    """
    whole, backend = list(tokenizer("a")["input_ids"]), tokenizer.backend_tokenizer
    processor, backend.post_processor = backend.post_processor, None
    text_ids = backend.encode("a").ids
    backend.post_processor = processor
    starts = (start for start in range(len(whole)) if whole[start : start + len(text_ids)] == text_ids)
    start = next(starts, len(whole))
    return whole[:start], whole[start + len(text_ids) :]


def _notes_on_ends(tokenizer: Any, unnamed: Sequence[int]) -> list[str]:
    """Return a note on the end tokens that a file has no name for; none without any."""
    if not unnamed:
        return []
    return [f"a file names three end tokens, so llama.cpp may not end answers at {_shown(tokenizer, unnamed)}"]


def _notes_on_texts(tokenizer: Any, ids: Mapping[str, int], before: Sequence[int], after: Sequence[int]) -> list[str]:
    """Return notes on prompts that llama.cpp reads differently."""
    notes = []
    if tokenizer.split_special_tokens:
        notes.append("llama.cpp finds special tokens in a text, but the tokenizer does not (split_special_tokens)")
    rendered = _rendered(tokenizer)
    if rendered is None:
        return notes
    # llama.cpp renders a conversation as the tokenizer does, and reads the result as any text, where one token is enough.
    extra = [*(number for number in before if not rendered.startswith(_shown(tokenizer, [number]))), *after]
    if extra:
        notes.append(f"llama.cpp adds {_shown(tokenizer, extra)} to conversations, too, and the chat template does not")
    if "bos" in ids and tokenizer.bos_token is None and "bos_token" in str(tokenizer.chat_template):
        shown = _shown(tokenizer, [ids["bos"]])
        notes.append(f"the chat template writes bos_token, which the tokenizer does not have; llama.cpp writes {shown}")
    return notes


def _rendered(tokenizer: Any) -> str | None:
    """Return a question as the chat template renders it; None without a template, or if it needs other messages."""
    if tokenizer.chat_template is None:
        return None
    try:
        return str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
            )
        )
    except Exception:  # a template is a program and may raise any exception
        return None


def _shown(tokenizer: Any, numbers: Sequence[int]) -> str:
    """Return the texts of tokens, for messages."""
    return " ".join(map(str, tokenizer.convert_ids_to_tokens(list(numbers))))
