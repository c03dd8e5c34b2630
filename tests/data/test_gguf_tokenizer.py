"""The tokenizer of a GGUF file finds the tokens that llama.cpp finds with its metadata, or the file is rejected by a key's name."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from horizon_lm.errors import ConfigError
from horizon_lm.model.gguf_weights import load_gguf
from horizon_lm.runs.data.gguf_tokenizer import GPT2, SPLIT_BY_PRE, SPLITS, splitter
from horizon_lm.runs.data.tokenizer_opening import open_tokenizer
from tests.e2e import tiny
from tests.support.gguf_files import TEXT, change, metadata, save

gguf = pytest.importorskip("gguf")

FILE = "model.gguf"
TEXTS = [TEXT, "the keeper", "  two spaces, and 12345", "日本語 €uro \U0001f600", "<|im_end|>\n a", "x  y   z\n\n\n"]
SPACE, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = "\u2581", 1, 2, 3, 4, 6


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a file with a tokenizer of byte-level BPE."""
    from horizon_lm.tools.gguf.export import export_gguf

    folder = tmp_path_factory.mktemp("exported")
    export_gguf(save(folder / "model", "llama"), folder / "out")
    return (folder / "out" / FILE).read_bytes()


def with_keys(folder: Path, content: bytes, **keys: Any) -> Path:
    (folder / FILE).write_bytes(content)
    change(folder / FILE, {f"tokenizer.ggml.{name}": value for name, value in keys.items()})
    return folder


def opened(folder: Path) -> Any:
    return open_tokenizer(folder, gguf_file=FILE)


def test_byte_level(exported: bytes, tmp_path: Path) -> None:
    """Tokens, special tokens and the template are those of the model's own tokenizer, also after it was saved again."""
    (tmp_path / FILE).write_bytes(exported)
    own, found = tiny.build_tokenizer(), opened(tmp_path)
    found.save_pretrained(tmp_path / "saved")
    for tokenizer in (found, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert [tokenizer(text).input_ids for text in TEXTS] == [own(text).input_ids for text in TEXTS]
        assert [tokenizer.decode(tokenizer(text).input_ids) for text in TEXTS] == TEXTS
        assert (tokenizer.eos_token, tokenizer.bos_token) == (own.eos_token, own.bos_token)
        assert tokenizer.chat_template == own.chat_template


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "smollm", "tekken", "deepseek-coder", "default", None])
def test_ways_to_split(exported: bytes, tmp_path: Path, name: str | None) -> None:
    """``tokenizer.ggml.pre`` decides, not the architecture; without it, llama.cpp's default."""
    found = opened(with_keys(tmp_path, exported, pre=name))
    expected = splitter(SPLIT_BY_PRE[name or "default"])
    for text in TEXTS:
        assert found.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) == expected.pre_tokenize_str(text)
    assert found.backend_tokenizer.model.ignore_merges == (name in ("llama-bpe", "tekken"))


def test_names_of_ways() -> None:
    """A file gets the name that is read as the way that it was written for; each name has one way."""
    for (pattern, ignores_merges), name in SPLITS.items():
        way = SPLIT_BY_PRE[name]
        assert way.ignores_merges == ignores_merges
        assert (None if way.patterns == (GPT2,) else way.patterns[0]) == pattern


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(True, False), (False, True), (True, True), (False, None)])
def test_tokens_around_a_text(exported: bytes, tmp_path: Path, adds_bos: bool, adds_eos: bool | None) -> None:
    found = opened(
        with_keys(tmp_path, exported, bos_token_id=0, eos_token_id=1, add_bos_token=adds_bos, add_eos_token=adds_eos)
    )
    inner = tiny.build_tokenizer()("the keeper", add_special_tokens=False).input_ids
    assert found("the keeper").input_ids == [*[0] * adds_bos, *inner, *[1] * bool(adds_eos)]
    assert found("the keeper", add_special_tokens=False).input_ids == inner


def test_a_token_before_text_by_default(exported: bytes, tmp_path: Path) -> None:
    """Files that do not say so begin with the first token if llama.cpp's way to split text has it so."""
    for pre, adds in (("llama-bpe", True), ("gpt-2", False)):
        found = opened(with_keys(tmp_path, exported, bos_token_id=0, add_bos_token=None, pre=pre))
        assert (found("the").input_ids[0] == 0) == adds


def test_tokens_that_end_an_answer(exported: bytes, tmp_path: Path) -> None:
    folder = with_keys(tmp_path, exported, eos_token_id=1, eot_token_id=2)
    assert load_gguf(folder, FILE, torch.float32).generation_config.eos_token_id == [1, 2]


def test_several_templates(exported: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(exported)
    change(tmp_path / FILE, {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"})
    assert opened(tmp_path).chat_template == {"default": "a", "tool_use": "b"}


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"model": "t5"}, "tokenizer.ggml.model: 't5' is not supported; open the model's Hugging Face folder"),
    ({"model": None}, "tokenizer.ggml.model: None"),
    ({"pre": "unheard-of"}, "tokenizer.ggml.pre: 'unheard-of'"),
    ({"tokens": None}, "has no tokenizer.ggml.tokens"),
    ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 values for"),
    ({"merges": ["a b c d e"]}, "tokenizer.ggml.merges: 'a b c d e'"),
    ({"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id: 1000000"),
    ({"bos_token_id": None, "add_bos_token": True}, "tokenizer.ggml.add_bos_token: True"),
    ({"add_sep_token": True}, "tokenizer.ggml.add_sep_token: True"),
    ({"normalizer.lowercase": True}, "tokenizer.ggml.normalizer.lowercase: True"),
    ({"tokens": 5}, "cannot be read .*; download it again"),
    ({"eos_token_id": "a"}, "cannot be read .*; download it again"),
    ({"merges": [1]}, "cannot be read .*; download it again"),
    ({"suppress_tokens": [1]}, r"tokenizer.ggml.suppress_tokens: \[1\]"),
]


@pytest.mark.parametrize(("keys", "message"), REJECTED, ids=str)
def test_keys_that_are_not_followed(exported: bytes, tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    folder = with_keys(tmp_path, exported, **keys)
    with pytest.raises(ConfigError, match=f"gguf_file: .*{message}"):
        opened(folder)


def test_tokens_that_are_not_found_in_text(exported: bytes, tmp_path: Path) -> None:
    """transformers finds special tokens in text, and llama.cpp only those that have such a type."""
    expected = opened(with_keys(tmp_path, exported))("keeper of the dome").input_ids
    letter = metadata(tmp_path / FILE)["tokenizer.ggml.tokens"].index("e")
    for name in ("bos", "eos"):
        folder = with_keys(tmp_path, exported, **{f"{name}_token_id": letter})
        with pytest.raises(
            ConfigError, match=f"tokenizer.ggml.{name}_token_id: {letter}: 'e' .*tokenizer.ggml.token_type"
        ):
            opened(folder)
    for name in ("padding", "unknown"):
        found = opened(with_keys(tmp_path, exported, **{f"{name}_token_id": letter}))
        assert found("keeper of the dome").input_ids == expected


def test_a_token_that_is_there_twice(exported: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(exported)
    tokens = metadata(tmp_path / FILE)["tokenizer.ggml.tokens"]
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.tokens"):
        opened(with_keys(tmp_path, exported, tokens=[*tokens[:-1], tokens[0]]))


# Scores instead of merges


WORDS = [
    "the",
    "keeper",
    "keep",
    "th",
    "he",
    "ke",
    "ep",
    "er",
    f"{SPACE}the",
    f"{SPACE}k",
    "kee",
    "per",
    f"{SPACE * 2}",
    f"{SPACE * 4}",
]
LETTERS = sorted({letter for word in WORDS for letter in word} | set("abcdxyz."))
TOKENS = ["<unk>", "<s>", "</s>", "<tool>", "\n\n", *(f"<0x{number:02X}>" for number in range(256)), *LETTERS, *WORDS]
TYPES = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(LETTERS + WORDS)]
SCORES = (
    [0.0] * (5 + 256) + [-100.0] * len(LETTERS) + [-float(number) for number in range(len(WORDS) - 2)] + [-1e9, -1e9]
)
SCORED = ["the keeper keeps the  keep", " the", "a    b", "<tool>the\n\nkeeper", "éx <s>the", "keeperthekeep", ""]


def joined_by_score(text: str, before: bool) -> list[int]:
    """Return the tokens of a text without special ones, as llama.cpp joins them: the best pair first, then the leftmost."""
    ids, parts = {token: number for number, token in enumerate(TOKENS)}, list((" " * before + text).replace(" ", SPACE))
    while True:
        ranked = [
            (SCORES[ids[one + other]], -index)
            for index, (one, other) in enumerate(pairwise(parts))
            if one + other in ids
        ]
        if not ranked:
            break
        index = -max(ranked)[1]
        parts[index : index + 2] = ["".join(parts[index : index + 2])]
    return [
        number
        for part in parts
        for number in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


def expected_tokens(text: str, before: bool) -> list[int]:
    """Return the tokens of a text: those that are found in it as they are, and those of the parts between them."""
    for number in (3, 4, 1):
        left, found, right = text.partition(TOKENS[number])
        if found:
            return [*expected_tokens(left, before), number, *expected_tokens(right, before)]
    return joined_by_score(text, before) if text else []


def scored(folder: Path, exported: bytes, **keys: Any) -> Path:
    kept: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": TOKENS,
        "token_type": TYPES,
        "scores": SCORES,
        "merges": None,
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": None}
    return with_keys(folder, exported, **kept | ids | keys)


@pytest.mark.parametrize("before", [True, False, None])
def test_scores(exported: bytes, tmp_path: Path, before: bool | None) -> None:
    """``add_space_prefix`` decides on the space before text, and is true in files without it; so is ``add_bos_token``."""
    found = opened(scored(tmp_path, exported, add_space_prefix=before, add_bos_token=None, add_eos_token=None))
    for text in SCORED:
        assert found(text).input_ids == [1, *expected_tokens(text, before is not False)], text
    assert (found.bos_token, found.eos_token, found.unk_token) == ("<s>", "</s>", "<unk>")
    assert found.decode(found("the keeper é").input_ids, skip_special_tokens=True) == "the keeper é"


def test_scores_that_merges_cannot_follow(exported: bytes, tmp_path: Path) -> None:
    same = [*SCORES[: -len(WORDS)], *[-1.0] * len(WORDS)]
    for keys, message in (
        ({"scores": same}, "tokenizer.ggml.scores"),
        ({"scores": None}, "tokenizer.ggml.scores: None"),
        ({"tokens": [*TOKENS[:-1], "qx"]}, "tokenizer.ggml.tokens: 'qx'"),  # q alone is no token
        ({"tokens": [text.replace("<0x00>", "<0x>") for text in TOKENS]}, "tokenizer.ggml.tokens: 'without <0x00>'"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(scored(tmp_path, exported, **keys))
