"""The special and added tokens of a tokenizer, and its chat template, as metadata of a GGUF file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.generation import end_tokens

_LONGEST = 200  # characters of tokens whose beginnings are compared


def leave_out(described: dict[str, Any], vocab_size: int) -> list[str]:
    """Remove added tokens without a row in the embedding from ``described``, such as Gemma 3's for images. Return a note on them."""
    added = described["added_tokens"]
    lost = [each["content"] for each in added if each["id"] >= vocab_size]
    if not lost:
        return []
    described["added_tokens"] = [each for each in added if each["id"] < vocab_size]
    for token in lost:
        described["model"]["vocab"].pop(token, None)
    return [f"the added tokens {', '.join(lost)} are left out, because the model has no embedding of them"]


def notes_on_added(added: list[dict[str, Any]]) -> list[str]:
    """Return notes on the added tokens that llama.cpp finds elsewhere in text."""
    notes, flags = [], ("lstrip", "rstrip", "single_word")
    if spaced := [each["content"] for each in added if any(each[flag] for flag in flags)]:
        notes.append(
            f"llama.cpp ignores that the added tokens {', '.join(spaced)} take spaces around them, or must be words"
        )
    if pair := next(_hidden_tokens(added), None):
        notes.append(
            f"llama.cpp looks for the longest added token first, so it finds {pair[0]} where the tokenizer finds {pair[1]}"
        )
    return notes


def _hidden_tokens(added: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield pairs of added tokens that overlap in some text, where llama.cpp finds the first one of the pair, and a tokenizer the second one.

    llama.cpp looks for the longest token first. A tokenizer takes the token that begins first, and looks for tokens in text as it is before
    those in normalized text.
    """
    texts = [each["content"] for each in added if len(each["content"]) <= _LONGEST]
    beginning: dict[str, list[str]] = {}  # tokens, by each text that they begin with
    for text in texts:
        for length in range(1, len(text)):
            beginning.setdefault(text[:length], []).append(text)
    for text in texts:
        for start in range(1, len(text)):  # where a longer token may begin, inside of this one
            longer = (each for each in beginning.get(text[start:], ()) if len(each) > len(text))
            # Of runs of one character, both find the longest.
            yield from ((each, text) for each in longer if len({*text, *each}) > 1)
    normalized = [each["content"] for each in added if each["normalized"]]
    for text in (each["content"] for each in added if not each["normalized"]):
        yield from ((each, text) for each in normalized if text in each)


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
