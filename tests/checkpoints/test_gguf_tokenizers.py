"""Tokenizers are read back from GGUF with the same tokens, or rejected by name."""

import json
import re
from contextlib import closing
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.runs.data import gguf_tokenizer as gguf_data
from horizon_lm.tools.gguf import export as gguf_export
from horizon_lm.tools.gguf import tokenizer as gguf_tokenizer
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
        (gguf_data.QWEN2, False, "qwen2"),
        (gguf_data.LLAMA3, True, "llama-bpe"),
        (gguf_data.LLAMA3, False, "dbrx"),
        (gguf_data.TEKKEN, True, "tekken"),
        (gguf_data.GPT4O, False, "gpt-4o"),
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


_SPLIT = {"type": "Split", "pattern": {"Regex": gguf_data.QWEN2}, "behavior": "Isolated", "invert": False}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WAY = "llama.cpp has no known name for the way"
_KIND = "only tokenizers of BPE, byte-level or with byte fallback, are written"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([_SPLIT, _BYTES], None),
        ([_SPLIT | {"behavior": "Removed", "invert": True}, _BYTES], None),
        ([_SPLIT | {"behavior": "Removed"}, _BYTES], _WAY),
        ([_SPLIT | {"behavior": "MergedWithNext"}, _BYTES], _WAY),
        ([_SPLIT | {"pattern": {"String": " "}}, _SPLIT, _BYTES], _WAY),
        ([_SPLIT | {"pattern": {"Regex": r"\\p{N}{1,3}"}}, _SPLIT, _BYTES], _WAY),
        ([_SPLIT, _BYTES | {"use_regex": True}], _WAY),
        ([_BYTES | {"use_regex": True, "add_prefix_space": True}], _WAY),
        ([_BYTES, _SPLIT], _KIND),
        ([{"type": "WhitespaceSplit"}, _BYTES], _WAY),
        ([{"type": "WhitespaceSplit"}], _KIND),
    ],
)
def test_ways_to_split_text(tmp_path: Path, parts: list[dict[str, Any]], message: str | None) -> None:
    source = save(tmp_path / "model", "llama")
    edit(source / "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": parts})
    if message is None:
        assert gguf_tokenizer.read_tokenizer(source, 1000, GenerationConfig()).split == "qwen2"
        return
    with pytest.raises(ModelNotSupportedError, match=message):
        gguf_tokenizer.read_tokenizer(source, 1000, GenerationConfig())


def test_tokenizers_that_are_not_written(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama")
    described = json.loads((source / "tokenizer.json").read_text())
    words = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    for change, message in (
        ({"model": words}, _KIND),
        ({"model": described["model"] | {"dropout": 0.1}}, "BPE with dropout, or with marks of parts of words"),
        ({"model": described["model"] | {"end_of_word_suffix": "</w>"}}, "BPE with dropout, or with marks"),
        ({"normalizer": {"type": "Lowercase"}}, "this tokenizer's way of preparing text"),
    ):
        (source / "tokenizer.json").write_text(json.dumps(described | change))
        with pytest.raises(ModelNotSupportedError, match=message):
            gguf_tokenizer.read_tokenizer(source, 1000, GenerationConfig())
    (source / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match="no tokenizer that can be read"):
        gguf_tokenizer.read_tokenizer(source, 1000, GenerationConfig())


@pytest.mark.parametrize("nested", [False, True])
def test_text_that_is_normalized(tmp_path: Path, nested: bool) -> None:
    source = save(tmp_path / "model", "llama")
    normalizer = {"type": "NFC"}
    edit(
        source / "tokenizer.json",
        normalizer={"type": "Sequence", "normalizers": [normalizer]} if nested else normalizer,
    )
    assert gguf_tokenizer.read_tokenizer(source, 1000, GenerationConfig()).notes == [
        "llama.cpp does not normalize text (NFC), so text in another form has other tokens"
    ]


def build(text_preparation: str) -> Any:
    """Return a tokenizer whose merges are those that transformers makes of scores, and whose conversations begin as its texts do."""
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
    fast.chat_template = "{{ bos_token }}" + tiny.CHATML
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


@pytest.mark.parametrize(
    ("added", "found"),
    [
        (["ab", "bcd"], ("bcd", "ab")),
        (["<b>", AddedToken("x<b>y", normalized=True)], ("x<b>y", "<b>")),
        (["abc", "bc"], None),
        (["<b>", "x<b>y"], None),
        (["\n\n", "\n\n\n"], None),
    ],
)
def test_added_tokens_in_place_of_others(tmp_path: Path, added: list[Any], found: tuple[str, str] | None) -> None:
    tokenizer = build("replace")
    tokenizer.add_tokens([AddedToken(each, normalized=False) if isinstance(each, str) else each for each in added])
    assert export(tmp_path, tokenizer) == [
        f"llama.cpp looks for the longest added token first, so it finds {longer} where the tokenizer finds {other}"
        for longer, other in ([found] if found else [])
    ]


def test_added_tokens_of_spaces(tmp_path: Path) -> None:
    """llama.cpp finds added tokens in text as it is: those with spaces that were replaced are found there, or made by merges."""
    tokenizer, runs = build("replace"), [_SPACE * length for length in (2, 3, 4)]  # of which the longest is made of two
    ids = {text: tokenizer(text.replace(_SPACE, " "), add_special_tokens=False).input_ids for text in runs}
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in runs])
    tokenizer.add_tokens([AddedToken(f"{_SPACE}x", normalized=False), AddedToken(f"{_SPACE}y", normalized=True)])
    assert export(tmp_path, tokenizer) == [
        f"llama.cpp finds the added tokens {_SPACE}y in text with spaces, but not with {_SPACE}"
    ]
    found = metadata(tmp_path / "out" / "model.gguf")
    types = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"], strict=True))
    assert [types[text] for text in (*runs, f"{_SPACE}x", " y")] == [1, 1, 1, 4, 4]
    assert {text: joined_by_score(text.replace(_SPACE, " "), found) for text in runs} == ids


def test_an_unknown_token_that_text_cannot_have(tmp_path: Path) -> None:
    """llama.cpp finds tokens of the type unknown in text."""
    source = save(tmp_path / "model", "llama", vocab_size=len(build("replace")))
    build("replace").save_pretrained(source)
    added = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    edit(source / "tokenizer.json", added_tokens=[each for each in added if each["content"] != "<unk>"])
    edit(source / "tokenizer_config.json", unk_token=None)
    gguf_export.export_gguf(source, tmp_path / "out")
    assert metadata(tmp_path / "out" / "model.gguf")["tokenizer.ggml.token_type"][0] == 1


def template(single: str) -> Any:
    """Return a post-processor that adds tokens of `build` to each text."""
    ids = [("<unk>", 0), ("<s>", 1), ("</s>", 2)]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids)


_LEVEL = processors.ByteLevel(trim_offsets=False)
PROCESSORS: dict[str, Any] = {
    "none": None,
    "bytes": _LEVEL,
    "bos": template("<s> $A"),
    "eos": template("$A </s>"),
    "both": template("<s> $A </s>"),
    "a sequence": processors.Sequence([_LEVEL, template("<s> $A")]),
    "bert": processors.BertProcessing(("</s>", 2), ("<s>", 1)),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=False, add_prefix_space=False),
}
FLAGS: dict[str, dict[str, bool]] = {
    "no flags": {},
    "bos": {"add_bos_token": True},
    "eos": {"add_eos_token": True},
    "both": {"add_bos_token": True, "add_eos_token": True},
    "neither": {"add_bos_token": False, "add_eos_token": False},
}


def edit(path: Path, **keys: Any) -> None:
    """Replace keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "LlamaTokenizer", "GemmaTokenizer"])
def test_tokens_that_are_added_to_text(tmp_path: Path, tokenizer_class: str) -> None:
    """What llama.cpp adds to a text is what the tokenizer adds, whatever tokenizer_config.json says that it adds."""
    source = save(tmp_path / "model", "llama", vocab_size=len(build("never")))
    flags_of_class = FLAGS if tokenizer_class == "TokenizersBackend" else {"both": FLAGS["both"]}
    for (name, processor), (flagged, flags) in product(PROCESSORS.items(), flags_of_class.items()):
        tokenizer = build("never")
        tokenizer.backend_tokenizer.post_processor = processor or template("$A")
        tokenizer.save_pretrained(source)
        if processor is None:
            edit(source / "tokenizer.json", post_processor=None)
        edit(source / "tokenizer_config.json", tokenizer_class=tokenizer_class, **flags)
        real = AutoTokenizer.from_pretrained(source)
        found = written(gguf_tokenizer.read_tokenizer(source, len(tokenizer), GenerationConfig()), tmp_path)
        added = [found["tokenizer.ggml.bos_token_id"]] * found["tokenizer.ggml.add_bos_token"]
        ended = [found["tokenizer.ggml.eos_token_id"]] * found["tokenizer.ggml.add_eos_token"]
        assert [*added, *joined_by_score("the keeper", found), *ended] == real("the keeper").input_ids, (name, flagged)


def written(tokenizer: gguf_tokenizer.Tokenizer, folder: Path) -> dict[str, Any]:
    """Return the metadata of a file that has a tokenizer and nothing else."""
    import gguf

    with closing(gguf.GGUFWriter(folder / "tokenizer.gguf", "llama")) as writer:
        tokenizer.add_to(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
    return metadata(folder / "tokenizer.gguf")


@pytest.mark.parametrize(
    ("single", "message"),
    [
        ("<unk> $A", "the tokenizer puts <unk> before each text, and a GGUF file can only name bos_token, <s>"),
        ("<s> <unk> $A", "the tokenizer puts <s> <unk> before each text"),
        ("</s> $A", "the tokenizer puts </s> before each text"),
        ("$A <s>", "the tokenizer puts <s> after each text, and a GGUF file can only name eos_token, </s>"),
        ("$A </s> </s>", "the tokenizer puts </s> </s> after each text"),
        ("$A $A", "the tokenizer puts a after each text"),
    ],
)
def test_tokens_that_a_file_cannot_add(tmp_path: Path, single: str, message: str) -> None:
    tokenizer = build("never")
    tokenizer.backend_tokenizer.post_processor = template(single)
    with pytest.raises(ModelNotSupportedError, match=re.escape(message)):
        export(tmp_path, tokenizer)


def test_tokens_that_end_answers(tmp_path: Path) -> None:
    """llama.cpp ends answers at eos, eot and eom: those that transformers ends them at."""
    tokenizer = build("never")
    tokenizer.add_tokens(["<1>", "<2>", "<3>"], special_tokens=True)
    first = tokenizer.convert_tokens_to_ids("<1>")
    tokenizer.save_pretrained(tmp_path)

    def read(*ends: int | None) -> tuple[dict[str, Any], list[str]]:
        settings = GenerationConfig(eos_token_id=list(ends) or None)
        read = gguf_tokenizer.read_tokenizer(tmp_path, len(tokenizer), settings)
        found = written(read, tmp_path)
        return {
            name: found[f"tokenizer.ggml.{name}_token_id"]
            for name in ("eos", "eot", "eom")
            if f"tokenizer.ggml.{name}_token_id" in found
        }, read.notes

    assert read() == ({"eos": 2}, [])
    assert read(2) == ({"eos": 2}, [])
    assert read(2, first) == ({"eos": 2, "eot": first}, [])
    assert read(first, 2, first + 1) == ({"eos": 2, "eot": first, "eom": first + 1}, [])
    assert read(first, len(tokenizer)) == ({"eos": 2, "eot": first}, [])  # one that the model does not have
    found, notes = read(2, first, first + 1, first + 2)
    assert found == {"eos": 2, "eot": first, "eom": first + 1}
    assert notes == ["a file names three end tokens, so llama.cpp may not end answers at <3>"]

    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    assert read(first, first + 1) == ({"eos": first, "eot": first + 1}, [])
    with pytest.raises(ModelNotSupportedError, match="neither the tokenizer nor generation_config"):
        read()


CONVERSATION = "llama.cpp adds {} to conversations, too, and the chat template does not"


@pytest.mark.parametrize(
    ("single", "chat_template", "settings", "notes"),
    [
        ("<s> $A", "{{ bos_token }}" + tiny.CHATML, {}, []),
        ("<s> $A", tiny.CHATML, {}, [CONVERSATION.format("<s>")]),
        ("<s> $A </s>", "{{ bos_token }}" + tiny.CHATML, {}, [CONVERSATION.format("</s>")]),
        ("<s> $A </s>", tiny.CHATML, {}, [CONVERSATION.format("<s> </s>")]),
        ("<s> $A", None, {}, []),
        ("<s> $A", "{{ raise_exception('no') }}", {}, []),
        ("$A", tiny.CHATML, {}, []),
        (
            "$A",
            "{{ bos_token }}" + tiny.CHATML,
            {"bos_token": None},
            ["the chat template writes bos_token, which the tokenizer does not have; llama.cpp writes <unk>"],
        ),
        (
            "$A",
            None,
            {"split_special_tokens": True},
            ["llama.cpp finds special tokens in a text, but the tokenizer does not (split_special_tokens)"],
        ),
    ],
)
def test_prompts_that_llama_cpp_reads_differently(
    tmp_path: Path, single: str, chat_template: str | None, settings: dict[str, Any], notes: list[str]
) -> None:
    tokenizer = build("never")
    tokenizer.backend_tokenizer.post_processor, tokenizer.chat_template = template(single), chat_template
    tokenizer.save_pretrained(tmp_path)
    edit(tmp_path / "tokenizer_config.json", **settings)
    found = gguf_tokenizer.read_tokenizer(tmp_path, len(tokenizer), GenerationConfig(bos_token_id=0))
    assert found.notes == notes


def test_several_chat_templates(tmp_path: Path) -> None:
    tokenizer = build("never")
    tokenizer.chat_template = {"default": tiny.CHATML, "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(tmp_path)
    found = written(gguf_tokenizer.read_tokenizer(tmp_path, len(tokenizer), GenerationConfig()), tmp_path)
    assert found["tokenizer.chat_template"] == tiny.CHATML
    assert found["tokenizer.chat_template.tool_use"] == "{{ tools }}"


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
        (lambda described: described["model"].update(dropout=0.1), "BPE with dropout, or with marks of parts of words"),
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
    described["model"]["vocab"]["far"] = 10**9  # a list of that many would not fit into memory
    path.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="has 1,000,000,001 tokens, but the model 300"):
        gguf_export.export_gguf(smaller, tmp_path / "other")
