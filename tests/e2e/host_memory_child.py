"""Load, train two steps, save; print the resident memory after each stage. test_host_memory runs it in a subprocess."""

import json
import re
import sys
import threading
import time
from pathlib import Path

import torch

import horizon_lm
from tests.support import tiny_models

ROWS, LENGTH, CHUNK = 2, 64, 64


def resident() -> int:
    """Return the anonymous resident bytes, without the page cache of files."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


class Peak(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.002)


def step(model, optimizer, vocabulary: int) -> float:
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main(folder: str, precision: str, output: str) -> None:
    torch.set_num_threads(1)
    tiny = horizon_lm.stream(tiny_models.build("llama", tie_word_embeddings=True), precision=precision)
    tiny_optimizer = horizon_lm.AdamW(tiny)
    for _ in range(2):
        step(tiny, tiny_optimizer, 90)  # load every import and kernel that training needs
    del tiny, tiny_optimizer
    interpreter = resident()
    peak = Peak()
    peak.start()

    model = horizon_lm.from_pretrained(folder, precision=precision, head_chunk_tokens=CHUNK)
    loaded = peak.bytes
    optimizer = horizon_lm.AdamW(model, lr=1e-5)
    losses = [step(model, optimizer, 1000) for _ in range(2)]
    trained = peak.bytes
    model.save_pretrained(output)
    stats = horizon_lm.stats(model)
    print(json.dumps({
        "interpreter": interpreter, "loaded": loaded, "trained": trained, "saved": peak.bytes, "losses": losses,
        "num_params": sum(p.numel() for p in model.parameters()),
        "weights": sum(v for k, v in stats["host_bytes_by_kind"].items() if k in ("weights", "low_halves")),
        "device": stats["device_bytes_peak"],
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
