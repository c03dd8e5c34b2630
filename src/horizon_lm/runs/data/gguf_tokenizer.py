"""Build the tokenizer of a GGUF file for transformers. It gives the tokens that llama.cpp gives by the file's metadata.

Each key ``tokenizer.ggml.*`` is used, or is known to change nothing, or the file is rejected by its name.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from horizon_lm.common.gguf_header import GgufHeader
from horizon_lm.errors import ConfigError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = r"\p{N}"  # each alone
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX|DIGITS"
_CASED += r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _CASED.replace("SUFFIX", "").replace("DIGITS", r"\p{N}")
GPT4O = _CASED.replace("SUFFIX", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")
_QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    _PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")
_THREE_DIGITS = "[0-9][0-9][0-9]"
_SYMBOLS = r"[\p{P}\$\+<=>\^~\|]+"
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"


class Split(NamedTuple):
    """A way to split text.

    Attributes:
        patterns: regular expressions. Each splits the parts that those before it have left; its matches become parts of their own.
        ignores_merges: a part that is a token is taken as it is, whatever the merges are.
        adds_bos: a BOS token is added before each text, unless a file says otherwise (``add_bos_token``).
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_NAMES = {
    Split((GPT2,)): "gpt-2 phi-2 gigachat mpt olmo jais trillion exaone4 mellum a.x-4.0",
    Split((DIGITS, GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    Split((QWEN2,)): "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan kormo grok-2",
    Split((_QWEN35,)): "qwen35",
    Split(
        (LLAMA3,), ignores_merges=True, adds_bos=True
    ): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    Split((LLAMA3,), ignores_merges=True): "glm4",
    Split((LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    Split((TEKKEN,), ignores_merges=True, adds_bos=True): "tekken",
    Split((GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    Split(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm",
    Split(_DEEPSEEK_CODER): "deepseek-coder",
    Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, _THREE_DIGITS)): "falcon",
    Split((_BLOOM,)): "bloom gpt3-finnish poro-chat",
    Split((_BLOOM, DIGITS)): "viking",
    Split((_SYMBOLS, GPT2, r"\p{N}+", _THREE_DIGITS)): "default",
}
SPLIT_BY_PRE = {name: split for split, names in _NAMES.items() for name in names.split()}
# The names that exported files get, by the expression and by whether merges are ignored. None stands for GPT-2's expression alone, `DIGITS`
# for GPT-2's after digits were split.
SPLITS = {
    (None, False): "gpt-2",
    (DIGITS, False): "smollm",
    (QWEN2, False): "qwen2",
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (TEKKEN, True): "tekken",
    (GPT4O, False): "gpt-4o",
}


_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "\u2581"
_BYTES = [f"<0x{number:02X}>" for number in range(256)]
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_ID_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_LLAMA_DEFAULT_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # if a file with its algorithm does not say so
# Texts of tokens that end a generation. llama.cpp takes such a token for a special one, whatever its type.
_END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
})  # fmt: skip
_USED = {
    "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix",
    *(f"{name}_token_id" for name in _ID_KEYS.values()),
}  # fmt: skip
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...] | None] = {
    "add_sep_token": (False,),
    "cls_token_id": None,  # of tokenizers that are not opened
    "eom_token_id": None,  # end a generation (`horizon_lm.model.gguf_weights`)
    "eot_token_id": None,
    "fim_mid_token_id": None,  # of prompts with a gap
    "fim_pad_token_id": None,
    "fim_pre_token_id": None,
    "fim_rep_token_id": None,
    "fim_sep_token_id": None,
    "fim_suf_token_id": None,
    "mask_token_id": None,
    "middle_token_id": None,
    "normalizer.lowercase": (False,),
    "normalizer.strip_accents": (False,),
    "precompiled_charsmap": None,  # of the algorithm t5
    "prefix_token_id": None,
    "remove_extra_whitespaces": None,  # of the algorithm t5
    "seperator_token_id": None,
    "suffix_token_id": None,
    "token_type_count": None,  # of the algorithm bert
}


def build_tokenizer(header: GgufHeader) -> Any:
    """Return the tokenizer of a file.

    Raises:
        ConfigError: the file has none, or one with an algorithm, a key or a value that is not supported.
    """
    from transformers import PreTrainedTokenizerFast

    metadata = {
        name.removeprefix(_PREFIX): value for name, value in header.metadata.items() if name.startswith(_PREFIX)
    }
    for name, value in metadata.items():
        allowed = _WITHOUT_EFFECT.get(name, ())  # values; None for any
        if name not in _USED and allowed is not None and value not in allowed:
            raise _rejected(header, name, value)
    algorithm = metadata.get("model")
    if algorithm not in ("gpt2", "llama"):
        raise _rejected(header, "model", algorithm)
    tokens = _token_texts(header, metadata)
    ids = {
        name: metadata.get(f"{key}_token_id", _LLAMA_DEFAULT_IDS.get(name) if algorithm == "llama" else None)
        for name, key in _ID_KEYS.items()
    }
    for name, number in ids.items():
        if number is not None and not 0 <= number < len(tokens):
            raise _rejected(header, f"{_ID_KEYS[name]}_token_id", number)
    if algorithm == "gpt2":
        backend, adds_bos = _byte_level_bpe(header, metadata, tokens)
    else:
        backend, adds_bos = _score_bpe(header, metadata, tokens), True
    _add_whole_tokens(backend, header, metadata.get("token_type", []), tokens)
    adds = {"bos_token": metadata.get("add_bos_token", adds_bos), "eos_token": metadata.get("add_eos_token", False)}
    _add_bos_and_eos(backend, header, {name: ids[name] for name, is_added in adds.items() if is_added}, tokens)
    special = _special_tokens(header, ids, metadata.get("token_type", []), tokens)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = _chat_templates(header.metadata)
    return tokenizer


def _rejected(header: GgufHeader, name: str, value: Any) -> ConfigError:
    """Return the error of a key that the tokenizer cannot be opened with."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return ConfigError(
        f"gguf_file: {header.path}: {_PREFIX}{name}: {shown} is not supported; open the model's Hugging Face folder instead, which has "
        "its own tokenizer"
    )


def _token_texts(header: GgufHeader, metadata: Mapping[str, Any]) -> list[str]:
    """Return the texts of all tokens; raise ConfigError if a text is there twice, or the list of types or scores has another length."""
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(metadata.get("tokens") or ())]
    if not tokens:
        raise ConfigError(
            f"gguf_file: {header.path} has no {_PREFIX}tokens; open the model's Hugging Face folder instead"
        )
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        raise _rejected(header, "tokens", next(text for text in tokens if text in seen or seen.add(text)))  # type: ignore[func-returns-value]
    for name in ("token_type", "scores"):
        if name in metadata and len(metadata[name]) != len(tokens):
            raise ConfigError(
                f"gguf_file: {header.path}: {_PREFIX}{name} has {len(metadata[name]):,} values for {len(tokens):,} tokens; download it again"
            )
    return tokens


def _special_tokens(
    header: GgufHeader, ids: Mapping[str, int | None], types: list[int], tokens: list[str]
) -> dict[str, str]:
    """Return the special tokens for transformers, which finds each of them in text.

    Raises:
        ConfigError: llama.cpp does not find the BOS or the EOS token in text.
    """
    found = {}
    for name, number in ids.items():
        if number is None:
            continue
        if _is_found_whole(tokens[number], types[number] if types else _NORMAL):
            found[name] = tokens[number]
        elif name in ("bos_token", "eos_token"):  # the message names the id, the text and the type of the token
            raise _rejected(
                header, f"{_ID_KEYS[name]}_token_id: {number}: {tokens[number]!r} with {_PREFIX}token_type", _NORMAL
            )
    return found


def _is_found_whole(text: str, kind: int) -> bool:
    """Return whether llama.cpp looks for a token in text before it splits the text. ``kind``: the token's ``token_type``."""
    return kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or text in _END_TEXTS


def _add_whole_tokens(backend: Any, header: GgufHeader, types: list[int], tokens: list[str]) -> None:
    """Add the tokens of a file that are found in text before it is split (`_is_found_whole`) to a tokenizer."""
    from tokenizers import AddedToken

    found = [
        (text, kind != _USER_DEFINED or text in _END_TEXTS)
        for text, kind in zip(tokens, types or [_NORMAL] * len(tokens), strict=True)
        if _is_found_whole(text, kind)
    ]
    name = str(header.metadata.get("general.name", "")).lower()
    takes_spaces = (
        "phi-3" in name or "phi3" in name
    )  # llama.cpp has this rule for the files of Phi-3, which do not say so
    leave_spaces = {"<unk>", "<s>", "<|endoftext|>"}
    added = [
        AddedToken(text, normalized=False, special=special, rstrip=takes_spaces and text not in leave_spaces)
        for text, special in found
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _add_bos_and_eos(backend: Any, header: GgufHeader, ids: Mapping[str, int | None], tokens: list[str]) -> None:
    """Make a tokenizer begin and end each text with the tokens in ``ids``, BOS and EOS; raise ConfigError if one has no id."""
    from tokenizers import processors

    for name, number in ids.items():
        if number is None:
            raise _rejected(header, f"add_{name}", True)
    texts = {name: tokens[number] for name, number in ids.items() if number is not None}
    before, after = ([texts[name]] if name in texts else [] for name in ("bos_token", "eos_token"))
    if texts:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(tokens[number], number) for number in dict.fromkeys(ids.values()) if number is not None],
        )


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template of a file, or all of them by their names if it has several."""
    default: str | None = metadata.get(_TEMPLATE)
    named = {
        name.removeprefix(f"{_TEMPLATE}."): text for name, text in metadata.items() if name.startswith(f"{_TEMPLATE}.")
    }
    return {**({} if default is None else {"default": default}), **named} if named else default


# Byte-level BPE


def _byte_level_bpe(header: GgufHeader, metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Any, bool]:
    """Return the byte-level BPE tokenizer with a file's merges, and whether its way to split text implies that BOS is added."""
    from tokenizers import Tokenizer, decoders, models

    name = metadata.get("pre", "default")
    split = SPLIT_BY_PRE.get(name)
    if split is None:
        raise _rejected(header, "pre", name)
    vocab = {text: number for number, text in enumerate(tokens)}
    merges = []
    for text in dict.fromkeys(metadata.get("merges", ())):  # of equal ones, the first counts
        cut = text.find(" ", 1)
        first, second = text[:cut], text[cut + 1 :]
        if cut < 0 or not {first, second, first + second} <= vocab.keys():
            raise _rejected(header, "merges", text)
        merges.append((first, second))
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=split.ignores_merges))
    backend.pre_tokenizer = splitter(split)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def splitter(split: Split) -> Any:
    """Return the pre-tokenizer that splits text by the patterns of ``split``, and then maps bytes to the letters of byte-level BPE."""
    from tokenizers import Regex, pre_tokenizers

    *others, last = split.patterns
    splits_as_gpt2 = last == GPT2  # the expression that ByteLevel has built in
    parts: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern == DIGITS
        else pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in (others if splits_as_gpt2 else split.patterns)
    ]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_as_gpt2)
    return pre_tokenizers.Sequence([*parts, level]) if parts else level


# BPE by scores, with byte fallback


def _score_bpe(header: GgufHeader, metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Return the BPE tokenizer of a file with scores: of all pairs, the one whose token has the highest score is joined first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {text: number for number, text in enumerate(tokens)}
    if missing := next((text for text in _BYTES if text not in vocab), None):
        raise _rejected(header, "tokens", f"without {missing}")
    if "scores" not in metadata:
        raise _rejected(header, "scores", None)
    types = metadata.get("token_type") or [_NORMAL] * len(tokens)
    score_of_joined = {  # without tokens that are found before text is split, which no merge makes
        text: score
        for text, score, kind in zip(tokens, metadata["scores"], types, strict=True)
        if not _is_found_whole(text, kind)
    }
    merges = _merges(header, score_of_joined, vocab)
    unknown = metadata.get("unknown_token_id", _LLAMA_DEFAULT_IDS["unk_token"])
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    adds_space = metadata.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_space else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if adds_space else parts)
    return backend


def _merges(header: GgufHeader, scores: Mapping[str, float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that join pairs in the order of the scores of their tokens: the highest first, and for one token, longer parts first.

    Raises:
        ConfigError: no merges have this effect, because different tokens have the same score, or a part of a token is no token.
    """
    pairs = sorted(_pairs(scores), key=lambda pair: (-scores["".join(pair)], -len(pair[0]), -len(pair[1])))
    token_by_score: dict[float, str] = {}
    for first, second in pairs:
        token = first + second
        if first not in vocab or second not in vocab:
            raise _rejected(header, "tokens", token)
        same_score = token_by_score.setdefault(scores[token], token)  # the first token with this score
        # Runs of one letter may share a score, since longer parts go first.
        if same_score != token and len(set(token + same_score)) > 1:
            raise _rejected(header, "scores", [same_score, token])
    return pairs


def _pairs(scores: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield each pair of texts that make a token when joined, and that earlier merges may have made: tokens of ``scores``, or letters."""
    for token in scores:
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if (cut == 1 or first in scores) and (cut == len(token) - 1 or second in scores):
                yield first, second
