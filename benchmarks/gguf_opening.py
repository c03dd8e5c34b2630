"""Compare GGUF files that are opened with llama.cpp, and with the models that they were written from.

    python benchmarks/gguf_opening.py --library LIBRARY --source FOLDER [--output FILE.md] [--only ARCHITECTURE ...]

LIBRARY is a shared library with llama.cpp's functions: libllama.so, or the extension module of the package xllamacpp. FOLDER is
llama.cpp's source, as the source distribution of the package llama-cpp-python has it in ``vendor/llama.cpp``: its converter makes
files, and it names the keys that files may have. Models are tiny and have random weights.

A case is right if logits or tokens are those of llama.cpp, or if the file is rejected by the name of the key that is the reason.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
from gguf_headers import Header, added, others
from gguf_llama_cpp import TOKENS, byte_fallback, sample_texts, save_model
from gguf_opening_cases import AROUND, CHANGED, CONTROLS, CONVERTED, EXPORTED, VARIANTS, Files, Names
from gguf_opening_grids import (
    OPENED_ALONE,
    OUTCOMES,
    REJECTED,
    SAME,
    WRONG,
    Logits,
    alterations,
    header_grid,
    opened,
    tokenizer_outcome,
)  # fmt: skip
from llama_cpp_process import LlamaCppProcess
from peers_cpu import processor, versions

from horizon_lm.errors import ConfigError
from horizon_lm.model.gguf_architectures import ARCHITECTURES
from horizon_lm.model.gguf_other_architectures import OTHER_ARCHITECTURES
from horizon_lm.runs.data.gguf_tokenizer import SPLIT_BY_PRE
from horizon_lm.tools.gguf.export import FILE, export_gguf

# A file of each architecture, whose metadata are changed.
BASES = {
    name: file
    for file in (
        "gemma", "gemma2", "gemma3_text", "granite", "llama", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "smollm3", "bloom", "falcon", "gpt2", "lfm2", "mamba", "nemotron, half of a head", "qwen3_5_text", "qwen3_5_moe_text",
        "stablelm, biases, half of a head", "starcoder2",
    )
    for name in [file.partition(",")[0]]
}  # fmt: skip

PARTS = ["models", "variants", "changed", "headers", "controls", "splits", "tokenizers"]


class Page:
    """The lines of the result, and the number of cases that are wrong."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cases = self.wrong = 0

    def table(self, text: str, heads: list[str]) -> None:
        """Begin a table."""
        self.lines += ["", text, "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]

    def row(self, cells: list[str], cases: int, wrong: int) -> None:
        """Add a row with a number of cases."""
        self.lines.append(f"| {' | '.join(cells)} |" + (" **wrong**" if wrong else ""))
        self.cases, self.wrong = self.cases + cases, self.wrong + wrong
        print(self.lines[-1], flush=True)

    def outcomes(self, name: str, found: Counter[str], moved: bool = True) -> None:
        """Add a row with the numbers of outcomes."""
        cases = sum(found[each] for each in OUTCOMES)
        cells = [str(found[each]) for each in OUTCOMES]
        self.row(
            [name, str(cases), *cells[:1], *([str(found["moved"])] if moved else []), *cells[1:]], cases, found[WRONG]
        )


def models(page: Page, logits: Logits, files: Files, only: list[str], parts: list[str]) -> None:
    """Compare files of models, of others with parts that may not be supported, and with several keys changed."""
    page.table(
        f"Median relative differences between the logits of {TOKENS} tokens of an opened file, and those of llama.cpp, of the model that the\n"
        "file was written from, of llama.cpp with the file that is exported again, and of the same text backwards, as a control. The converter\n"
        "leaves the windows of Mistral and Qwen 2 out, which llama.cpp does not have, and those of Phi-3 are switched off in llama.cpp: they are\n"
        "left out in the comparison with it.",
        ["file", "model", "llama.cpp", "the model", "again", "control"],
    )
    for part, maker, cases in (
        ("models", "export", EXPORTED),
        ("models", "converter", CONVERTED),
        ("variants", "converter", VARIANTS),
    ):
        for name in cases if part in parts else ():
            if not only or name.partition(",")[0] in only:
                model, file = files.exported(name) if maker == "export" else files.converted(name)
                cells, good = logits.row(file, model, kept=part == "models")
                page.row([maker, name, *cells], 1, not good)
    for name, keys in CHANGED if "changed" in parts else ():
        if not only or name.partition(",")[0] in only:
            cells, good = logits.row(Header(files.exported(name)[1]).write(files.folder / "changed.gguf", keys), None)
            page.row(["changed", f"{name}: `{keys}`", *cells], 1, not good)


def headers(page: Page, logits: Logits, files: Files, names: Names, only: list[str]) -> None:
    """Compare files of each architecture with other metadata."""
    page.table(
        "Files with one key changed: each of the file's keys is left out, has other values and values of other types, and each other key that\n"
        "llama.cpp knows is added. In the cases that moved, llama.cpp computes something else than with the unchanged file. llama.cpp alone does not\n"
        "open numbers of another width or type, lists of another length, and values that it checks and does not use.",
        ["model", "cases", OUTCOMES[0], "moved", *OUTCOMES[1:]],
    )
    for model_type, name in BASES.items():
        if not only or model_type in only:
            file = files.of(name)
            header = Header(file)
            page.outcomes(model_type, header_grid(logits, header, file, alterations(header, names.keys)))
    known = {each.name for each in (ARCHITECTURES | OTHER_ARCHITECTURES).values()}
    found, header = Counter[str](), Header(files.exported("llama")[1])
    for name in sorted({*names.architectures} - known):
        try:
            opened(header.write(files.folder / "changed.gguf", {"general.architecture": name}))
            found[WRONG] += 1
        except ConfigError as error:
            found[REJECTED if f"general.architecture: {name} " in str(error) else WRONG] += 1
    page.outcomes("other architectures", found)


def controls(page: Page, logits: Logits, files: Files, only: list[str]) -> None:
    """Compare files whose changed key Horizon-LM is not shown; the grid has to find them wrong."""
    page.table(
        "The same for keys that Horizon-LM is not shown, as a control: the grid has to find them wrong.",
        ["model", "key", "cases", WRONG],
    )
    for name, key in CONTROLS:
        if not only or name.partition(",")[0] in only:
            file = files.of(name)
            header = Header(file)
            key = f"{header.architecture}.{key}"
            layers = header.values[f"{header.architecture}.block_count"]
            values = others(header.values[key], layers) if key in header.values else added(layers)
            found = header_grid(logits, header, file, ({key: value} for value in values), hidden={key})
            page.row([name, key, str(sum(found[each] for each in OUTCOMES)), str(found[WRONG])], 1, not found[WRONG])


def tokenizers(page: Page, llama_cpp: LlamaCppProcess, files: Files, names: Names, text: str, parts: list[str]) -> None:
    """Compare tokens."""
    texts = sample_texts(text)
    texts += [f"{each}<s>  {each}</s>" for each in texts[:60]]
    page.table(
        f"Tokens of {len(texts)} texts with each way to split text that is known here or in llama.cpp (`tokenizer.ggml.pre`), and with the\n"
        "algorithm of SentencePiece.",
        ["tokenizer", "token before", "after", "outcome"],
    )
    changed, plain = files.folder / "changed.gguf", Header(files.exported("llama")[1])
    cases = {name: (plain, {"tokenizer.ggml.pre": name}) for name in sorted({*SPLIT_BY_PRE, *names.splits})}
    for prepend in (True, False):
        model, tokenizer = files.folder / f"fallback-{prepend}", byte_fallback(prepend, text)
        save_model(model / "model", "llama", {"vocab_size": len(tokenizer)})
        tokenizer.save_pretrained(model / "model")
        export_gguf(model / "model", model / "out")
        label = f"byte fallback, {'a space before text' if prepend else 'none'}"
        cases[label] = Header(model / "out" / FILE), {}
    for number, (name, (header, keys)) in enumerate(cases.items() if "splits" in parts else ()):
        before, after = AROUND[number % len(AROUND)]
        keys = keys | {"tokenizer.ggml.add_bos_token": before, "tokenizer.ggml.add_eos_token": after}
        outcome, said = tokenizer_outcome(llama_cpp, header, changed, keys, texts)
        wrong = outcome in (WRONG, OPENED_ALONE) or (outcome != SAME and name in SPLIT_BY_PRE)
        page.row([name, str(before), str(after), outcome], 1, wrong)
        if wrong:
            print(f"  {said}"[:200], file=sys.stderr)
    if "tokenizers" not in parts:
        return
    page.table("Tokens of 60 texts, with one key of the tokenizer changed.", ["tokenizer", "cases", *OUTCOMES])
    for label, header in (
        ("byte-level BPE", plain),
        *((name, header) for name, (header, keys) in cases.items() if not keys),
    ):
        found = Counter[str]()
        for keys in tokenizer_changes(header, names):
            outcome, said = tokenizer_outcome(llama_cpp, header, changed, keys, texts[:20] + texts[-40:])
            found[outcome] += 1
            if outcome in (WRONG, OPENED_ALONE):
                print(f"{outcome}: {label}: {str(keys)[:100]} {said}"[:400], file=sys.stderr, flush=True)
        page.outcomes(label, found, moved=False)


def tokenizer_changes(header: Header, names: Names) -> Iterator[dict[str, object]]:
    """Yield changes of a tokenizer: each of its keys left out or changed, and each other one that llama.cpp knows added."""
    for key in [*names.tokenizer_keys, "tokenizer.ggml.unheard_of"]:
        values = others(header.values[key], 2) if key in header.values else iter([None, *added(2)])
        yield from ({key: value} for value in values if value is not None or key in header.values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--release", default="", help="the releases of llama.cpp, for the page")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="model types, for a part of the grid")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="parts of the grid")
    parser.add_argument("--folder", type=Path, help="where files are kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = "\n".join(path.read_text("utf-8") for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))[:12])
    page, llama_cpp, names = Page(), LlamaCppProcess(args.library), Names(args.source)
    with tempfile.TemporaryDirectory() as name:
        files = Files(args.folder or Path(name), args.source, text)
        logits = Logits(llama_cpp, files.folder)
        models(page, logits, files, args.only, args.parts)
        of_models, logits.worst = logits.worst, 0.0
        if "headers" in args.parts:
            headers(page, logits, files, names, args.only)
        of_headers = logits.worst
        if "controls" in args.parts:
            controls(page, logits, files, args.only)
        if {"splits", "tokenizers"} & set(args.parts):
            tokenizers(page, llama_cpp, files, names, text, args.parts)
    llama_cpp.close()
    summary = (
        f"{page.cases:,} cases, {page.wrong} wrong. The largest difference of logits is {of_models:.4f} of models, and {of_headers:.4f} "
        "of files with a changed key."
    )
    lines = [
        "# Opened GGUF files beside llama.cpp",
        "",
        f"{date.today().isoformat()}, {processor()}. {versions('torch', 'transformers', 'tokenizers', 'gguf')}. {args.release}".rstrip(),
        "Tiny models with random weights in float32; llama.cpp keeps keys and values in float16.",
        "",
        "Command: `python benchmarks/gguf_opening.py --library LIBRARY --source FOLDER`",
        "",
        summary,
        *page.lines,
    ]
    print(summary)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
