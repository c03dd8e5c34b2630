"""Fuzz the readers of checkpoints: whatever a file holds, it is loaded, or HorizonError is raised and the weights are as before.

``python -m tests.faults.fuzz_checkpoints [SECONDS] [FILE ...]`` fuzzes each file for a while, ten minutes together by default, and
writes what fails to ``tests/faults/corpus/FILE/``, which `tests/faults/test_fuzz_checkpoints.py` reads again in every run.

Checksums find any accident long before a reader fails, so most inputs get the right ones, as an attacker would write them.
"""

import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import xxhash

from horizon_lm.common.run_folders import MANIFEST
from horizon_lm.errors import HorizonError
from horizon_lm.runs.checkpoints.checkpoint import ARRAYS, BUFFERS, load_checkpoint, read_tensors, save_checkpoint
from horizon_lm.runs.checkpoints.saving import STATE
from horizon_lm.runs.checkpoints.unit_file import hash_file
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.training import resume, run_state
from tests.support.changed_bytes import changed_bytes
from tests.support.checkpointed_training import BUFFERED, digest, opened
from tests.support.training_steps import step

CORPUS = Path(__file__).with_name("corpus")
FILES = (MANIFEST, STATE, "units/block1.safetensors", BUFFERS, ARRAYS)
_POSITION = {"rows": "r", "num_rows": 3, "seed": 0, "epoch": 0, "step": 1, "order": "o"}
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1 << 70, float("nan"), float("inf"), "", "../x", "/etc/passwd", "a" * 5000, "\ud800", "\0", "\x1b[2J",
    "F32", [], {}, [None], {"a": 1}, [[[]]], [1 << 40] * 3,
)  # fmt: skip
_TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b":", b",", b"\n", b"\0", b"\xff", b"null", b"NaN", b"1e999", b"-1", b"9" * 5000, b"[" * 3000,
    b"\\ud800", b"\xef\xbb\xbf", b"\xff" * 8, b"\x00\x00\x00\x80",
)  # fmt: skip


class Target:
    """A checkpoint of which one file is replaced, and all its readers."""

    def __init__(self, folder: Path) -> None:
        settings = {"model_name_or_path": "m", "datasets": "d", "output_dir": "o"}
        self.folder, self.good = folder / "checkpoint", folder / "good"
        self.folder.mkdir()
        self.config = as_config({**settings, "resume_from_checkpoint": str(self.folder)})
        self.model, self.optimizer = opened(precision="fp32_master", moments="8bit", family=BUFFERED)
        step(self.model, self.optimizer, 0)
        self.digest = digest(self.model, self.optimizer)
        own = resume.settings_of(self.config)
        given = {"step": 1, "num_steps": 9, "config": own, "settled": own, "model_config": {"a": 1}, "data": _POSITION}
        state = {name: given.get(name, kinds[0]()) for name, kinds in run_state.FORMAT.items()}
        save_checkpoint(self.good, self.model, self.optimizer, state=state, arrays={"reference": torch.ones(3, 2)})
        shutil.copytree(self.good, self.folder, dirs_exist_ok=True)

    def read(self) -> None:
        """Do what a run does when it resumes, and what a user's program does."""
        point, _ = resume.find_resume_point(self.config)
        assert point is not None
        resume.apply_settings(self.config, point)
        resume.require_same_rows(point, _POSITION, self.config)
        resume.require_same_model(point, {"a": 1}, self.config)
        read_tensors(self.folder / ARRAYS)
        load_checkpoint(self.folder, self.model, self.optimizer)

    def failure(self, name: str, content: bytes, checksums: bool) -> str:
        """Return the error of the readers other than HorizonError, or what they have spoiled; an empty text for neither.

        Args:
            name: the file.
            content: what it holds.
            checksums: write the right checksums into the manifest.
        """
        shutil.copyfile(self.good / MANIFEST, self.folder / MANIFEST)
        (self.folder / name).write_bytes(content)
        if checksums:
            _write_checksums(self.folder, name)
        loaded = False
        try:
            self.read()
            loaded = True
        except HorizonError:
            pass
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.copyfile(self.good / name, self.folder / name)
        spoiled = not loaded and digest(self.model, self.optimizer) != self.digest
        if loaded or spoiled:
            shutil.copyfile(self.good / MANIFEST, self.folder / MANIFEST)
            load_checkpoint(self.folder, self.model, self.optimizer)
        return "rejected, but memory has changed" if spoiled else ""


def _write_checksums(folder: Path, name: str) -> None:
    """Write a manifest whose checksums are right, unless it is no JSON any more."""
    try:
        outer = json.loads((folder / MANIFEST).read_bytes())
        if name != MANIFEST:
            outer["checkpoint"]["files"][name] = {
                "size": (folder / name).stat().st_size,
                "xxh3_128": hash_file(folder / name),
            }
        text = json.dumps(outer["checkpoint"], separators=(",", ":"), sort_keys=True)
        outer["xxh3_128"] = xxhash.xxh3_128_hexdigest(text.encode())
        (folder / MANIFEST).write_text(json.dumps(outer))
    except (ValueError, KeyError, TypeError, RecursionError):
        return


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Return a copy with a few random changes, of its bytes or, if it is JSON or begins with it, of its structure."""
    if rng.random() < 0.3:
        return changed_bytes(content, rng, _TOKENS)
    is_json = content.startswith(b"{")
    size = len(content) if is_json else int.from_bytes(content[:8], "little")
    try:
        tree = json.loads(content if is_json else content[8 : 8 + size])
    except ValueError:
        return changed_bytes(content, rng, _TOKENS)
    for _ in range(rng.choice((1, 1, 2, 5))):
        _change_node(tree, rng)
    text = json.dumps(tree).encode()
    if is_json:
        return text
    text = text.ljust(size) if rng.random() < 0.8 else text
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _change_node(tree: Any, rng: random.Random) -> None:
    """Change a random value, key or entry of nested lists and dicts."""
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.85:
            node = node[key]
            continue
        kind = rng.randrange(6)
        if kind == 0:
            del node[key]
        elif kind == 1:
            node[key] = deepcopy(node[rng.choice(keys)])
        elif kind == 2 and isinstance(node, dict):
            node[str(rng.choice(_VALUES))] = node.pop(key)
        elif kind == 3 and type(node[key]) in (int, float):
            node[key] += rng.choice((-1, 1, 4096, 1 << 62))
        else:
            node[key] = deepcopy(rng.choice(_VALUES))
        return


def fuzz(target: Target, name: str, seed: int, stop: Callable[[int], bool]) -> str:
    """Read mutations of a file until ``stop``, given their number, or until one fails.

    Returns:
        the error of the input that failed, which is then in the corpus; an empty text if none did.
    """
    start, rng, count = (target.good / name).read_bytes(), random.Random(seed), 0
    while not stop(count):
        content, checksums = mutate(start, rng), rng.random() < 0.9
        count += 1
        if error := target.failure(name, content, checksums):
            (CORPUS / name).mkdir(parents=True, exist_ok=True)
            (CORPUS / name / hashlib.sha256(content).hexdigest()[:12]).write_bytes(content)
            return error
    return ""


def main(arguments: list[str]) -> int:
    """Fuzz each file for some seconds, print a line for each, and return the number of files that failed."""
    seconds, failed = float(arguments[0]) if arguments else 600.0, 0
    names = arguments[1:] or FILES
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            target, last, slowest, total = Target(Path(folder)), time.monotonic(), 0.0, 0
            end = last + seconds / len(names)

            def stop(count: int, end: float = end) -> bool:
                nonlocal last, slowest, total
                slowest, last, total = max(slowest, time.monotonic() - last), time.monotonic(), count
                return last > end

            error = fuzz(target, name, time.time_ns(), stop)
        failed += bool(error)
        print(f"{name}: {total:,} inputs, the slowest took {slowest:.2f} s; {error or 'no failure'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
