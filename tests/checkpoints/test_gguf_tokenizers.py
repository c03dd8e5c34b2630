"""Tokenizers are read back from GGUF with the same tokens, or rejected by name."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from horizon_lm.checkpoints import gguf_export
from horizon_lm.data import gguf_splits
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from tests.e2e import tiny
from tests.support.gguf_files import GEMMA, PADDED, TEXT, metadata, save

pytest.importorskip("gguf")

_SPACE = "\u2581"
_WORDS = (
    "The dome of the observatory opens at dusk, and the keeper counts the stars one by one.   What does the keeper do when "
    "the rain comes?  The keeper closes the dome and waits for the wind; don't keep the keeper waiting: 1234567 stars.\n\n"
)
TEXTS = [
    TEXT,
    "the keeper",
    "x" * 9,
    "spaces      of      six",
    "日本語 €uro \U0001f600",
    "counts the stars\t",
    "a ▁ literal",
]


@pytest.mark.parametrize(
    ("split", "ignore_merges", "name"),
    [
        (gguf_splits.QWEN2, False, "qwen2"),
        (gguf_splits.LLAMA3, True, "llama-bpe"),
        (gguf_splits.LLAMA3, False, "dbrx"),
        (gguf_splits.TEKKEN, True, "tekken"),
        (gguf_splits.GPT4O, False, "gpt-4o"),
    ],
)
def test_splits(tmp_path: Path, split: str, ignore_merges: bool, name: str) -> None:
    source = save(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.model.ignore_merges = ignore_merges
    parts = [
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.save_pretrained(source)
    gguf_export.export_gguf(source, tmp_path / "out")
    assert metadata(tmp_path / "out" / "model.gguf")["tokenizer.ggml.pre"] == name
    read = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    assert read.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT) == (
        tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    )


def test_digits_alone(tmp_path: Path) -> None:
    """SmolLM2 and Granite 3 take digits alone, which transformers' reader does not know."""
    source = save(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(source)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for individual in (True, False):
        digits = pre_tokenizers.Digits(individual_digits=individual)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
        tokenizer.save_pretrained(source)
        if individual:
            notes = gguf_export.export_gguf(source, tmp_path / "out").notes
            assert notes == ["transformers' reader does not take digits alone, as llama.cpp does"]
            assert metadata(tmp_path / "out" / "model.gguf")["tokenizer.ggml.pre"] == "smollm"
        else:
            with pytest.raises(ModelNotSupportedError, match=r"llama\.cpp has no known name for the way"):
                gguf_export.export_gguf(source, tmp_path / "other")


def test_tokenizers_without_a_name(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(source)
    for pre_tokenizer, message in (
        (pre_tokenizers.Metaspace(), "only tokenizers of BPE, byte-level or with byte fallback, are written"),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), "llama.cpp has no known name for the way"),
    ):
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.backend_tokenizer.save(str(source / "tokenizer.json"))
        with pytest.raises(ModelNotSupportedError, match=message):
            gguf_export.export_gguf(source, tmp_path / "out")
    (source / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        gguf_export.export_gguf(source, tmp_path / "out")


def build(text_preparation: str) -> Any:
    """Return a tokenizer whose merges are those that transformers makes of scores."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE)
    trainer = trainers.BpeTrainer(vocab_size=230, show_progress=False)
    draft.train_from_iterator([_WORDS], trainer)
    learned = [token for token, _ in sorted(draft.get_vocab().items(), key=lambda each: each[1])]
    special, runs = ["<unk>", "<s>", "</s>"], [_SPACE * length for length in (2, 3, 4)]
    tokens = special + [f"<0x{number:02X}>" for number in range(256)] + runs + learned
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    scores = {token: -float(number) for token, number in vocab.items()}
    if text_preparation != "replace":
        scores |= dict.fromkeys(runs, -1e9)  # as in Llama's and Mistral's
    tokenizer = Tokenizer(
        models.BPE(vocab, generate_merges(vocab, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", _SPACE)
    if text_preparation == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
    elif text_preparation == "replace":
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=text_preparation, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = tiny.CHATML
    return fast


def export(folder: Path, tokenizer: Any, model_type: str = "llama", **settings: Any) -> list[str]:
    """Write a model with a tokenizer to folder/out, and return the notes."""
    source = save(folder / "model", model_type, vocab_size=len(tokenizer) + 3, **settings)
    (source / "tokenizer.json").unlink()
    tokenizer.save_pretrained(source)
    return gguf_export.export_gguf(source, folder / "out").notes


def joined_by_score(text: str, found: dict[str, Any]) -> list[int]:
    """Return the tokens of a text without special ones, as llama.cpp joins them: the best pair first, then the leftmost."""
    ids = {token: number for number, token in enumerate(found["tokenizer.ggml.tokens"])}
    scores = found["tokenizer.ggml.scores"]
    parts = list((" " * found["tokenizer.ggml.add_space_prefix"] + text).replace(" ", _SPACE))
    while True:
        joined = [one + other for one, other in pairwise(parts)]
        ranked = [(scores[ids[token]], -index) for index, token in enumerate(joined) if token in ids]
        if not ranked:
            break
        index = -max(ranked)[1]
        parts[index : index + 2] = [joined[index]]
    return [
        number
        for part in parts
        for number in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


@pytest.mark.parametrize(
    ("model_type", "settings", "preparation"),
    [
        ("llama", {}, "first"),
        ("mistral", {"sliding_window": None}, "first"),
        ("phi3", PADDED, "prepend"),
        ("gemma2", GEMMA, "replace"),
        ("gemma3_text", GEMMA, "replace"),
    ],
)
def test_byte_fallback(tmp_path: Path, model_type: str, settings: dict[str, Any], preparation: str) -> None:
    tokenizer = build(preparation)
    notes = export(tmp_path, tokenizer, model_type, **settings)
    assert any("llama.cpp adds one more" in note for note in notes) == (preparation == "first")
    found = metadata(tmp_path / "out" / "model.gguf")
    assert found["tokenizer.ggml.model"] == "llama"
    assert "tokenizer.ggml.merges" not in found
    assert found["tokenizer.ggml.add_space_prefix"] == (preparation != "replace")
    types = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"], strict=True))
    assert [types[token] for token in ("<unk>", "<s>", "<tool>", "<0x41>", "e", f"[PAD{len(tokenizer)}]")] == [
        2, 3, 4, 6, 1, 5,
    ]  # fmt: skip

    read = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    for text in [*TEXTS, "one</s>two", "one<tool>two"]:
        assert read(text).input_ids == tokenizer(text).input_ids, text
    for text in TEXTS:
        assert joined_by_score(text, found) == tokenizer(text, add_special_tokens=False).input_ids, text
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "chat_template"):
        assert getattr(read, name) == getattr(tokenizer, name)
    assert tokenizer.get_vocab().items() <= read.get_vocab().items()  # the reader adds tokens of its own


@pytest.mark.parametrize("preparation", ["prepend", "replace", "first", "always", "never"])
def test_a_space_before_text(tmp_path: Path, preparation: str) -> None:
    """llama.cpp prepares text as the tokenizer does, or the command says where it adds a space."""
    tokenizer = build(preparation)
    notes = export(tmp_path, tokenizer)
    found = metadata(tmp_path / "out" / "model.gguf")
    equal = joined_by_score(" the keeper", found) == tokenizer(" the keeper", add_special_tokens=False).input_ids
    assert equal == (notes == [])


def test_added_tokens_that_are_found_elsewhere(tmp_path: Path) -> None:
    tokenizer = build("prepend")
    tokenizer.add_tokens([AddedToken("<star>", normalized=True), AddedToken("<dome>", rstrip=True, normalized=False)])
    assert tokenizer.tokenize("one<star>") != [*tokenizer.tokenize("one"), "<star>"]
    assert tokenizer("<dome> one").input_ids == tokenizer("<dome>one").input_ids
    assert export(tmp_path, tokenizer) == [
        "llama.cpp finds the added tokens <star> anywhere in text, but the tokenizer only after a space",
        "llama.cpp ignores that the added tokens <dome> take spaces around them, or must be words",
    ]


def test_tokens_that_are_added_to_text_are_stated(tmp_path: Path) -> None:
    """llama.cpp adds a first token to text of SentencePiece unless the file says otherwise."""
    tokenizer = build("first")
    export(tmp_path / "with", tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    export(tmp_path / "without", tokenizer)
    for folder, added in (("with", True), ("without", False)):
        found = metadata(tmp_path / folder / "out" / "model.gguf")
        assert found["tokenizer.ggml.add_bos_token"] is added
        assert found["tokenizer.ggml.add_eos_token"] is False


def part_merges(merges: list[Any]) -> None:
    """Move one of two merges of a token behind those of others."""
    index = next(index for index, (one, other) in enumerate(pairwise(merges)) if "".join(one) == "".join(other))
    merges.append(merges.pop(index))


def drop_merge(merges: list[Any]) -> None:
    merges.remove(["t", "he"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda described: part_merges(described["model"]["merges"]),
            "no score of '.*' has the effect of its merges",
        ),
        (
            lambda described: drop_merge(described["model"]["merges"]),
            "llama.cpp joins 't' and 'he', which no merge does",
        ),
        (lambda described: described["model"]["vocab"].pop("<0x41>"), "this kind of BPE with byte fallback"),
        (lambda described: described["model"].update(dropout=0.1), "this kind of BPE with byte fallback"),
        (lambda described: described["pre_tokenizer"].update(split=True), "this tokenizer's way of preparing text"),
        (lambda described: described.update(normalizer={"type": "NFC"}), "this tokenizer's way of preparing text"),
    ],
)
def test_byte_fallback_that_llama_cpp_does_not_have(tmp_path: Path, change: Any, message: str) -> None:
    tokenizer = build("first")
    source = save(tmp_path / "model", "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(source)
    described = json.loads((source / "tokenizer.json").read_text())
    change(described)
    (source / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ModelNotSupportedError, match=message):
        gguf_export.export_gguf(source, tmp_path / "out")


def test_added_tokens_without_an_embedding(tmp_path: Path) -> None:
    """A Gemma 3 for text has a token for images; other tokens that the model does not have are an error."""
    source = save(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(source)
    size = len(tokenizer)
    tokenizer.add_tokens(["<keeper>", "<dome>", "<star>", "<image>"])
    tokenizer.save_pretrained(source)
    notes = gguf_export.export_gguf(source, tmp_path / "out").notes
    assert notes == ["the added tokens <image> are left out, because the model has no embedding of them"]
    tokens = metadata(tmp_path / "out" / "model.gguf")["tokenizer.ggml.tokens"]
    assert tokens[size:] == ["<keeper>", "<dome>", "<star>"]

    smaller = save(tmp_path / "smaller", "llama", vocab_size=300)
    with pytest.raises(ConfigError, match="tokens, but the model 300; use the tokenizer of the model"):
        gguf_export.export_gguf(smaller, tmp_path / "other")

    path = smaller / "tokenizer.json"
    described = json.loads(path.read_text())
    described["model"]["vocab"]["far"] = 10**15  # a list of that many would not fit into memory
    path.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="has 1,000,000,000,000,001 tokens, but the model 300"):
        gguf_export.export_gguf(smaller, tmp_path / "other")
