"""llama.cpp in a process of its own, in which each question is answered by a copy: a file that ends it ends the copy alone."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llama_cpp_library import LlamaCpp

LONGEST = 60  # seconds for an answer: llama.cpp computes without end if no element of a head is rotated


class LlamaCppProcess:
    """llama.cpp, asked for the logits and tokens of files; the answers are None if it does not open a file, ends at it, or goes on for ever."""

    def __init__(self, library: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._answer = Path(self._folder.name) / "answer.pt"
        command = [sys.executable, __file__, str(library), str(self._answer)]
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._folder.cleanup()

    def logits(self, file: Path, ids: Sequence[int], vocab_size: int) -> torch.Tensor | None:
        """Return the logits of a text, shape (T, V)."""
        return self._ask("logits", str(file), list(ids), vocab_size)

    def tokens(self, file: Path, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the tokens of texts, with those that are added."""
        return self._ask("tokens", str(file), list(texts))

    def _ask(self, *question: Any) -> Any:
        self._answer.unlink(missing_ok=True)
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()
        return torch.load(self._answer, weights_only=True) if self._answer.exists() else None


def answer(llama_cpp: LlamaCpp, kind: str, file: str, values: list[Any], vocab_size: int = 0) -> Any:
    """Return the logits of tokens, or the tokens of texts."""
    with llama_cpp.opened(Path(file)) as model:
        if kind == "logits":
            return llama_cpp.logits(model, values, vocab_size)
        return [llama_cpp.tokens(model, text) for text in values]


def main() -> None:
    llama_cpp, target = LlamaCpp(Path(sys.argv[1])), Path(sys.argv[2])
    for line in sys.stdin:
        if (copy := os.fork()) == 0:
            signal.alarm(LONGEST)
            try:
                torch.save(answer(llama_cpp, *json.loads(line)), target.with_suffix(".part"))
                target.with_suffix(".part").replace(target)
            finally:
                os._exit(0)
        os.waitpid(copy, 0)
        print(flush=True)


if __name__ == "__main__":
    main()
