"""Ways of byte-level BPE to split text, by llama.cpp's names of them (``tokenizer.ggml.pre``)."""

from typing import NamedTuple

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
