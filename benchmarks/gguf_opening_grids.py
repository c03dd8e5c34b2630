"""The grids of gguf_opening.py: what Horizon-LM makes of a file, beside what llama.cpp makes of it."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gguf_headers import Header, added, others
from gguf_llama_cpp import TOKENS
from llama_cpp_process import LlamaCppProcess
from transformers import AutoModelForCausalLM

from horizon_lm.common.gguf_header import GgufHeader, read_gguf_header
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.model.gguf_architectures import ARCHITECTURES
from horizon_lm.model.gguf_weights import load_gguf
from horizon_lm.runs.data.tokenizer_opening import open_tokenizer
from horizon_lm.tools.gguf.export import FILE, export_gguf

IDS = torch.randint(5, 1000, (1, TOKENS), generator=torch.Generator().manual_seed(1))
SAME, REJECTED, NOT_OPENED, OPENED_ALONE, WRONG = OUTCOMES = (
    "the same", "rejected by its name", "opened by neither", "opened by Horizon-LM alone", "wrong",
)  # fmt: skip


def apart(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the median relative difference of logits; 0 if both have none, because numbers became too large, and 1 if one has."""
    kept = [each.isfinite().all(dim=1) for each in (logits, expected)]
    if not torch.equal(*kept):
        return 1.0
    logits, expected = logits[kept[0]], expected[kept[0]]
    difference = (logits - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    return difference.median().item() if len(difference) else 0.0


def opened(file: Path, hidden: Collection[str] = ()) -> Any:
    """Return the model of a file that is read as if it lacked the hidden keys."""

    def read(path: Path) -> GgufHeader:
        header = read_gguf_header(path)
        return header._replace(metadata={key: value for key, value in header.metadata.items() if key not in hidden})

    with mock.patch("horizon_lm.model.gguf_weights.read_gguf_header", read):
        return load_gguf(file.parent, file.name, torch.float32)


def attempt(open_file: Callable[[], Any], keys: Collection[str]) -> tuple[Any, str, str]:
    """Return what opening a file with changed keys returns, or None; the outcome, empty where llama.cpp decides; and the error."""
    try:
        return open_file(), "", ""
    except ConfigError as error:
        message = str(error)
        return None, REJECTED if any(key in message for key in keys) else "", message
    except Exception as error:
        return None, WRONG, f"{type(error).__name__}: {error}"


class Logits:
    """Compares the logits of files.

    Attributes:
        worst: the largest difference of logits that counted as the same.
    """

    def __init__(self, llama_cpp: LlamaCppProcess, folder: Path) -> None:
        self._llama_cpp, self._changed, self._folder, self.worst = llama_cpp, folder / "changed.gguf", folder, 0.0
        self.moved = 0

    @torch.no_grad()
    def of(self, model: Any, as_in_llama_cpp: bool = False) -> torch.Tensor:
        """Return the logits of a model; as llama.cpp should have them, for which the windows of Phi-3 are switched off there."""
        window = getattr(model.config, "sliding_window", None)
        if as_in_llama_cpp and model.config.model_type == "phi3":
            model.config.sliding_window = None
        logits = model(IDS).logits[0]
        if window is not None:
            model.config.sliding_window = window
        return logits

    def in_llama_cpp(self, file: Path, vocab_size: int) -> torch.Tensor | None:
        """Return the logits of a file in llama.cpp, if it opens it."""
        return self._llama_cpp.logits(file, IDS[0].tolist(), vocab_size)

    @torch.no_grad()
    def row(self, file: Path, original: Path | None, kept: bool = True) -> tuple[list[str], bool]:
        """Return the differences of an opened file's logits, and whether they are as they should be.

        Differences are those to llama.cpp, to the model that it was written from (whose settings are all in it if ``kept`` is true), to
        llama.cpp with the file that is exported of it again, and to the same text backwards.
        """
        try:
            model = opened(file)
        except ConfigError as error:
            header, message = Header(file), str(error).partition(".gguf")[2]
            lacks = re.search(r"[\w.]+ is missing|has no tensor [\w.]+", message)
            names = [*header.values, *(f"tensor {name}" for name in header.tensors)]
            reason = next((name for name in names if re.search(rf"{re.escape(name)}( is|:)", message)), None)
            reason = lacks[0] if lacks else reason
            return [f"rejected by `{reason}`", "", "", ""], reason is not None
        ours, control = self.of(model), apart(model(IDS.flip(1)).logits[0], self.of(model))
        theirs = self.in_llama_cpp(file, ours.shape[1])
        difference = 0.0 if theirs is None else apart(theirs, self.of(model, as_in_llama_cpp=True))
        good = difference < 0.02 * control and (theirs is not None or original is not None)
        shown = ["not opened" if theirs is None else f"{difference:.4f}", "", "", f"{control:.2f}"]
        self.worst = max(self.worst, difference)
        if original is not None:
            source = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
            difference = apart(self.of(source), ours)
            good, shown[1] = good and (not kept or difference < 1e-4), f"{difference:.1e}"
        if model.config.model_type in ARCHITECTURES:
            ours = self.of(model, as_in_llama_cpp=True)
            shown[2], again = self._again(model, file, ours, 0.02 * control)
            good = good and again
        return shown, good

    def _again(self, model: Any, file: Path, ours: torch.Tensor, tolerance: float) -> tuple[str, bool]:
        """Export an opened model; return its difference in llama.cpp, or why it is not exported, and whether that is as it should be."""
        folder = self._folder / f"again-{len(list(self._folder.iterdir()))}"
        model.save_pretrained(folder / "model")
        open_tokenizer(file.parent, gguf_file=file.name).save_pretrained(folder / "model")
        try:
            export_gguf(folder / "model", folder / "out")
        except ModelNotSupportedError as error:
            return f"rejected: {str(error).partition('/model: ')[2][:60]}", True
        theirs = self.in_llama_cpp(folder / "out" / FILE, ours.shape[1])
        difference = 1.0 if theirs is None else apart(theirs, ours)
        return f"{difference:.4f}", difference < tolerance

    def header_outcome(
        self,
        header: Header,
        keys: Mapping[str, Any],
        plain: torch.Tensor,
        tolerance: float,
        hidden: Collection[str] = (),
    ) -> tuple[str, str]:
        """Return the outcome of a file with other metadata, and what happened."""
        file, name = header.write(self._changed, keys), next(iter(keys))
        model, outcome, message = attempt(lambda: opened(file, hidden), keys)
        if outcome:
            return outcome, message
        theirs = self.in_llama_cpp(file, plain.shape[1] if model is None else model.config.vocab_size)
        if model is None:
            return (NOT_OPENED if theirs is None else WRONG), message
        if theirs is None:
            return OPENED_ALONE, name
        try:
            difference = apart(theirs, self.of(model, as_in_llama_cpp=True))
        except Exception as error:
            return WRONG, f"{type(error).__name__}: {error}"
        if difference > tolerance:
            return WRONG, f"the logits differ by {difference:.4f}"
        self.worst = max(self.worst, difference)
        self.moved += theirs.shape != plain.shape or apart(theirs, plain) > tolerance
        return SAME, ""


def alterations(header: Header, names: Sequence[str], short: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield changes of a file's metadata: each key left out or changed, and each of llama.cpp's other keys added."""
    prefix, layers = f"{header.architecture}.", header.values[f"{header.architecture}.block_count"]
    for key in [name for name in header.values if name.startswith(prefix)]:
        yield from ({key: value} for value in others(header.values[key], layers))
    for key in [prefix + name for name in [*names, "unheard_of"] if prefix + name not in header.values]:
        yield from ({key: value} for value in added(layers))


def header_grid(
    logits: Logits, header: Header, file: Path, changes: Iterator[dict[str, Any]], hidden: Collection[str] = ()
) -> Counter[str]:
    """Return the numbers of outcomes of changes of a file's metadata, and those in which llama.cpp computes something else than before.

    Changes that add a key are left out once each type of values is rejected by the key's name.
    """
    header.shorten()
    model = opened(file)
    plain = logits.in_llama_cpp(file, model.config.vocab_size)
    tolerance = max(0.003, 3 * apart(plain, logits.of(model)))
    outcomes, rejected = Counter[str](), Counter[str]()
    logits.moved = 0
    for keys in changes:
        key = next(iter(keys))
        if len(keys) == 1 and key not in header.values and rejected[key] >= 3:
            continue
        outcome, said = logits.header_outcome(header, keys, plain, tolerance, hidden)
        outcomes[outcome] += 1
        rejected[key] += 1 if outcome == REJECTED else -100
        if outcome in (WRONG, OPENED_ALONE) and not hidden:
            print(f"{outcome}: {keys} {said}", file=sys.stderr, flush=True)
    outcomes["moved"] = logits.moved
    return outcomes


def tokenizer_outcome(
    llama_cpp: LlamaCppProcess, header: Header, file: Path, keys: Mapping[str, Any], texts: Sequence[str]
) -> tuple[str, str]:
    """Return the outcome of a file with another tokenizer, and what happened."""
    header.write(file, keys)
    tokenizer, outcome, message = attempt(lambda: open_tokenizer(file.parent, gguf_file=file.name), keys)
    if outcome:
        return outcome, message
    theirs = llama_cpp.tokens(file, texts)
    if tokenizer is None:
        return (NOT_OPENED if theirs is None else WRONG), message
    if theirs is None:
        return OPENED_ALONE, ""
    found = [tokenizer(text).input_ids for text in texts]
    other = [text for text, ours, llama in zip(texts, found, theirs, strict=True) if ours != llama]
    return (WRONG, f"{len(other)} texts, such as {other[0]!r}") if other else (SAME, "")
