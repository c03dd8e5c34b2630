"""Compare the tokens of exported GGUF files in llama.cpp with those of the tokenizers, over what can be set in their files.

    python benchmarks/gguf_tokenizers.py --library LIBRARY [--output FILE.md]

LIBRARY is a shared library with llama.cpp's functions, as for gguf_llama_cpp.py. Models are tiny, and tokenizers are trained on the
pages of docs. A combination is wrong if llama.cpp finds other tokens and the export has no note.
"""

import argparse
import copy
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from gguf_llama_cpp import byte_fallback, byte_level, save_model
from llama_cpp_library import LlamaCpp
from peers_cpu import processor, versions
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.runs.data.gguf_tokenizer import SPLIT_BY_PRE
from horizon_lm.tools.gguf.export import FILE, export_gguf

CLASSES = {
    "byte-level": ("TokenizersBackend", "PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"),
    "byte fallback": ("TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer", "GemmaTokenizer"),
}
FLAGS: tuple[dict[str, bool], ...] = (
    {},
    {"add_bos_token": True},
    {"add_eos_token": True},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_bos_token": False, "add_eos_token": False},
)
TEXTS = ("hello world", "a", "The  dome\n\nof the\tkeeper", "caf\u00e9 <s> \u65e5\u672c", "don't: 1234")


def post_processors(tokenizer: Any) -> dict[str, Any]:
    """Return post-processors for a tokenizer, by name."""
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "</s>", "[SEP]")}

    def template(single: str, pair: str = "") -> Any:
        return processors.TemplateProcessing(
            single=single, pair=pair or f"{single} $B:1", special_tokens=list(ids.items())
        )

    level, ends = processors.ByteLevel(trim_offsets=False), (("</s>", ids["</s>"]), ("<s>", ids["<s>"]))
    return {
        "none": None,
        "ByteLevel": level,
        "bos": template("<s> $A"),
        "eos": template("$A </s>"),
        "bos and eos": template("<s> $A </s>"),
        "bos, and a pair as in BERT": template("<s> $A", "<s> $A [SEP] $B [SEP]"),
        "another first token": template("[SEP] $A"),
        "two first tokens": template("<s> [SEP] $A"),
        "two last tokens": template("$A [SEP] </s>"),
        "eos first": template("</s> $A"),
        "bos last": template("$A <s>"),
        "BertProcessing": processors.BertProcessing(*ends),
        "RobertaProcessing": processors.RobertaProcessing(*ends, trim_offsets=False, add_prefix_space=False),
        "Sequence of ByteLevel, bos": processors.Sequence([level, template("<s> $A")]),
        "Sequence of bos and eos, ByteLevel": processors.Sequence([template("<s> $A </s>"), level]),
    }


def added(text: str, **flags: bool) -> Any:
    return AddedToken(text, **{"normalized": False, **flags})


ADDED: dict[str, tuple[list[Any], Sequence[str]]] = {
    "plain and special": ([added("<tool>"), added("<b>", special=True)], ("x<tool>y", "x <b> y", "<tool><b>")),
    "normalized": ([added("<tool>", normalized=True)], ("x<tool>y", " <tool> ")),
    "composed, normalized": ([added("\u00e9", normalized=True)], ("caf\u00e9", "cafe\u0301")),
    "with spaces": ([added("two words"), added("  ")], ("x two words y", "a  b   c", "a    b")),
    "with U+2581": ([added("\u2581\u2581x")], ("a\u2581\u2581x", "a  x")),
    "with U+2581, normalized": ([added("\u2581\u2581x", normalized=True)], ("a\u2581\u2581x", "a  x")),
    "overlapping": ([added("ab"), added("bcd")], ("xabcdx", "bcd ab")),
    "one in another": ([added("<b>"), added("x<b>y")], ("x<b>y", "<b>")),
    "one in a normalized one": ([added("<b>"), added("x<b>y", normalized=True)], ("x<b>y", "<b>")),
    "runs": ([added("\n\n"), added("\n\n\n"), added("\t\t")], ("a\n\n\n\n\nb", "\n\n\n\n", "a\t\t\tb")),
    "lstrip": ([added("<l>", lstrip=True)], ("a  <l> b",)),
    "rstrip": ([added("<l>", rstrip=True)], ("a  <l> b",)),
    "single word": ([added("ab", single_word=True)], ("ab cab", "ab")),
    "named as llama.cpp names ends": ([added("<|im_end|>"), added("<|eot_id|>", special=True)], ("a<|im_end|>b",)),
    "named as unused ones": ([added("<unused1>", special=True), added("[PAD7]")], ("a<unused1>b [PAD7]",)),
}


def tokenizers_of(text: str) -> dict[str, Any]:
    """Return tokenizers that prepare text in each way that a file knows, by name."""
    spaced, normalized = byte_fallback(False, text), byte_level(SPLIT_BY_PRE["gpt-2"], text)
    spaced.backend_tokenizer.normalizer = None
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    normalized.backend_tokenizer.normalizer = normalizers.NFC()
    return {
        "byte-level": byte_level(SPLIT_BY_PRE["gpt-2"], text),
        "byte-level, NFC": normalized,
        "byte fallback": byte_fallback(False, text),
        "byte fallback, a space before text": byte_fallback(True, text),
        "byte fallback, Metaspace": spaced,
    }


class Grid:
    """Exports of one model with many tokenizers.

    Args:
        llama_cpp: llama.cpp.
        folder: an empty folder.
        tokenizer: the first tokenizer, by whose size the model is made.
    """

    def __init__(self, llama_cpp: LlamaCpp, folder: Path, tokenizer: Any) -> None:
        self._llama_cpp, self._model, self._out = llama_cpp, folder / "model", folder / "out"
        save_model(self._model, "llama", {"vocab_size": len(tokenizer) + 3})

    def outcome(self, tokenizer: Any, texts: Sequence[str], config: dict[str, Any], without_processor: bool) -> str:
        """Return the outcome of an export with a tokenizer, as transformers opens it from a folder with these keys in its config."""
        tokenizer.save_pretrained(self._model)
        _edit(self._model / "tokenizer_config.json", config)
        if without_processor:
            _edit(self._model / "tokenizer.json", {"post_processor": None})
        real = AutoTokenizer.from_pretrained(self._model)
        shutil.rmtree(self._out, ignore_errors=True)
        try:
            notes = export_gguf(self._model, self._out).notes
        except ModelNotSupportedError:
            return "rejected"
        with self._llama_cpp.opened(self._out / FILE) as opened:
            equal = all(self._llama_cpp.tokens(opened, text) == real(text).input_ids for text in texts)
        return "equal" if equal else "other tokens, with a note" if notes else "wrong"


def _edit(path: Path, keys: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def post_processor_rows(llama_cpp: LlamaCpp, text: str) -> Iterator[tuple[str, Counter[str]]]:
    """Yield the number of each outcome, by kind and class of a tokenizer."""
    for kind, classes in CLASSES.items():
        base = byte_level(SPLIT_BY_PRE["gpt-2"], text) if kind == "byte-level" else byte_fallback(False, text)
        base.add_special_tokens({"additional_special_tokens": ["[SEP]"]})
        with tempfile.TemporaryDirectory() as folder:
            grid = Grid(llama_cpp, Path(folder), base)
            for name in classes:
                outcomes = Counter[str]()
                for (processor_name, each), flags in product(post_processors(base).items(), FLAGS):
                    tokenizer = copy.deepcopy(base)
                    tokenizer.backend_tokenizer.post_processor = each or processors.ByteLevel()
                    found = grid.outcome(tokenizer, TEXTS, {"tokenizer_class": name, **flags}, each is None)
                    outcomes[found] += 1
                    if found == "wrong":
                        print(f"wrong: {kind}, {name}, {processor_name}, {flags}", flush=True)
                yield f"{kind}, {name}", outcomes


def added_token_rows(llama_cpp: LlamaCpp, text: str) -> Iterator[tuple[str, Counter[str]]]:
    """Yield the number of each outcome, by kind of a tokenizer, over kinds of added tokens."""
    for kind, base in tokenizers_of(text).items():
        outcomes = Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            grid = Grid(llama_cpp, Path(folder), base)
            for name, (tokens, texts) in ADDED.items():
                tokenizer = copy.deepcopy(base)
                tokenizer.add_tokens(tokens)
                found = grid.outcome(tokenizer, texts, {}, False)
                outcomes[found] += 1
                if found == "wrong":
                    print(f"wrong: {kind}, {name}", flush=True)
        yield kind, outcomes


def end_token_rows(llama_cpp: LlamaCpp, text: str) -> Iterator[tuple[str, bool]]:
    """Yield for lists of end tokens in generation_config.json whether llama.cpp ends answers at them, and not at another token."""
    tokenizer = byte_level(SPLIT_BY_PRE["gpt-2"], text)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<1>", "<2>", "<3>"]})
    for ends in (["</s>"], ["</s>", "<1>"], ["<2>", "</s>", "<1>"]):
        numbers = tokenizer.convert_tokens_to_ids(ends)
        with tempfile.TemporaryDirectory() as folder:
            model, out = Path(folder) / "model", Path(folder) / "out"
            save_model(model, "llama", {"vocab_size": len(tokenizer)})
            tokenizer.save_pretrained(model)
            _edit(model / "generation_config.json", {"eos_token_id": numbers})
            export_gguf(model, out)
            with llama_cpp.opened(out / FILE) as opened:
                found = [number for number in range(len(tokenizer)) if llama_cpp.ends_answer(opened, number)]
        yield " ".join(ends), found == sorted(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--release", default="", help="the release of llama.cpp, for the page")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    llama_cpp = LlamaCpp(args.library)
    text = "\n".join(path.read_text("utf-8") for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))[:4])
    outcomes = ("equal", "rejected", "other tokens, with a note", "wrong")
    lines = [
        "# Tokens of exported GGUF files in llama.cpp",
        "",
        f"{date.today().isoformat()}, {processor()}. {versions('transformers', 'tokenizers', 'gguf')}. {args.release}".rstrip(),
        "",
        "Command: `python benchmarks/gguf_tokenizers.py --library LIBRARY`",
    ]
    for title, rows in (
        (
            "Post-processors, each with all settings of add_bos_token and add_eos_token",
            post_processor_rows,
        ),
        ("Kinds of added tokens", added_token_rows),
    ):
        lines += ["", f"{title}:", "", f"| tokenizer | {' | '.join(outcomes)} |", "|---" * (1 + len(outcomes)) + "|"]
        for name, found in rows(llama_cpp, text):
            lines.append(f"| {name} | {' | '.join(str(found[each]) for each in outcomes)} |")
            print(lines[-1], flush=True)
    lines += ["", "End tokens of generation_config.json, and whether llama.cpp ends answers at them alone:", ""]
    lines += ["| end tokens | llama.cpp's |", "|---|---|"]
    for name, equal in end_token_rows(llama_cpp, text):
        lines.append(f"| {name} | {'the same' if equal else 'others'} |")
        print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
