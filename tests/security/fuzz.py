"""Fuzz the readers of files that Horizon-LM writes or is given: whatever the bytes, a reader returns or raises HorizonError.

``python -m tests.security.fuzz [SECONDS] [READER ...]`` fuzzes each reader for a while, ten minutes by default, and writes what
fails to ``tests/security/corpus/READER/``, which `tests/security/test_fuzz.py` reads again in every run of the tests.
"""

import hashlib
import json
import random
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import xxhash

from horizon_lm.common.gguf_header import read_gguf_header
from horizon_lm.common.run_folders import MANIFEST
from horizon_lm.errors import HorizonError
from horizon_lm.model.config_limits import require_sane_config
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from horizon_lm.model.files.weight_files import read_headers
from horizon_lm.planning.arithmetic.catalog import published, read_profile
from horizon_lm.runs.checkpoints.manifest import FORMAT, VERSION, read_manifest, verify
from horizon_lm.runs.config.load import read_run_config
from horizon_lm.runs.data.json_rows import read_rows
from horizon_lm.runs.objective.reference import PairFile
from horizon_lm.runs.run_files import PLAN, SETTINGS, load_run
from horizon_lm.tools.report.page import write_report
from horizon_lm.tools.translate import translate_file
from tests.report import report_run
from tests.support.changed_bytes import changed_bytes

CORPUS = Path(__file__).with_name("corpus")
Reader = Callable[[Path], object]

_METRICS = (
    b'{"step": 1, "loss": 2.5, "learning_rate": 1e-5, "tokens_total": 10, "trained_tokens_per_second": 1.0, "tokens_per_second": '
    b'1.0, "device_bytes_peak": 1, "host_bytes": 2, "seconds": 1.0}\n{"step": 2, "eval_loss": 2.0}\n'
)
_TENSORS = json.dumps({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
                       "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}).encode()  # fmt: skip
_GGUF = (
    b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    + struct.pack("<Q", 17) + b"llama.block_count" + struct.pack("<II", 4, 2)
    + struct.pack("<Q", 4) + b"list" + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 1) + b"x"
    + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 8, 0, 0)
)  # fmt: skip
_TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}},
        report_run.span("forward", "block.0", 0, 0.0, 5.0),
        report_run.span("backward", "block.0", 0, 5.0, 5.0),
        report_run.taken("device bytes", 1.0, 1000),
    ],
    "otherData": {"steps": [report_run.step(1, 0.0, 10.0)]},
}
_MANIFEST = {
    "format": FORMAT, "version": VERSION, "step": 3, "precision": "bf16", "moments": None, "dtypes": {"a": "bfloat16"},
    "files": {"state.json": {"size": 2, "xxh3_128": xxhash.xxh3_128_hexdigest(b"{}")}}, "packages": {"torch": "2"},
    "tensors": [{"file": "state.json", "tensor": "a", "start": 0, "length": 1, "dtype": "BF16", "shape": [1], "offset": 0,
                 "xxh3_64": "0"}],
}  # fmt: skip
_SHOWN = 32  # one in this many valid files is also shown, which takes long


def _report(name: str) -> Reader:
    """Return a reader of one file of a run's folder, which is read and, if possible, shown."""

    def read(path: Path) -> object:
        folder = path.parent / "run"
        folder.mkdir(exist_ok=True)
        for other in folder.iterdir():
            other.unlink()
        (folder / SETTINGS).write_text("seed: 1\n")
        (folder / name).write_bytes(path.read_bytes())
        run = load_run(folder)
        if path.stat().st_size % _SHOWN == 0:
            write_report(folder, path.parent / "report.html")
        return run

    return read


def _index(path: Path) -> object:
    folder = path.parent / "index"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_bytes(path.read_bytes())
    (folder / "weights.safetensors").write_bytes(len(_TENSORS).to_bytes(8, "little") + _TENSORS + bytes(32))
    return Checkpoint(folder).headers()


def _manifest(path: Path) -> object:
    """Read the manifest of a checkpoint with this content, under a checksum that is right whenever there can be one."""
    folder = path.parent / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_bytes(b"{}")
    content = path.read_bytes()
    with suppress(ValueError, RecursionError):
        content = json.dumps(json.loads(content), separators=(",", ":"), sort_keys=True).encode()
    (folder / MANIFEST).write_bytes(
        b'{"xxh3_128": "%s", "checkpoint": %s}' % (xxhash.xxh3_128_hexdigest(content).encode(), content)
    )
    manifest = read_manifest(folder)
    verify(folder, manifest)
    return manifest


def _pairs(path: Path) -> object:
    return PairFile(path, 3, "0" * 64).values


# Each reader with a valid file to start from.
READERS: dict[str, tuple[Reader, bytes]] = {
    "run file": (lambda path: read_run_config(str(path)), b"model_name_or_path: m\ndatasets: [{path: owner/rows}]\nseed: &a 1\n"),
    "foreign run file": (  # with what it leaves out accepted
        lambda path: translate_file(str(path), accept=("excess_length_strategy", "datasets.type", "warmup_ratio")),
        b"base_model: m\ndatasets: [{path: owner/rows, type: alpaca}]\nsequence_len: 512\nlearning_rate: 1.0e-4\nmicro_batch_size: 2\n",
    ),
    "rows": (lambda path: list(read_rows(str(path))), b'{"text": "a"}\n{"text": "\\u00e9", "n": [1, 2.5e3, null]}\n'),
    "list of rows": (lambda path: list(read_rows(str(path))), b'[{"text": "a"},\n {"text": "b", "n": [true, -1]}]\n'),
    "config": (require_sane_config, b'{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "a": [1, {"b": 2}]}'),
    "header": (read_headers, len(_TENSORS).to_bytes(8, "little") + _TENSORS + bytes(32)),
    "index": (_index, b'{"metadata": {}, "weight_map": {"a": "weights.safetensors", "b": "weights.safetensors"}}'),
    "manifest": (_manifest, json.dumps(_MANIFEST, separators=(",", ":"), sort_keys=True).encode()),
    "gguf": (read_gguf_header, _GGUF + bytes(-len(_GGUF) % 32 + 32)),
    "profile": (read_profile, json.dumps(asdict(published()["h200"])).encode()),
    "pairs": (_pairs, bytes(200)),
    "metrics": (_report("metrics.jsonl"), _METRICS),
    "samples": (_report("samples.jsonl"), b'{"step": 1, "samples": [{"prompt": "a", "answer": "<script>"}]}\n'),
    "plan": (_report(PLAN), json.dumps(report_run.plan()).encode()),
    "trace": (_report("trace.json"), json.dumps(_TRACE).encode()),
    "settings": (_report(SETTINGS), b"seed: 1\nmodel_name_or_path: <b>\ndatasets: [{path: a}]\n"),
}  # fmt: skip

_TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b":", b",", b"\n", b"\0", b"\xff", b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0",
    b"9" * 5000, b"[" * 3000, b'{"a":' * 2000, b"\\ud800", b"\x1b[2J", b"</script>", b"!!python/object:os.system ", b"*a", b"&a ",
    b"<<: ", b"- ", b"? ", b"\t", b"\xef\xbb\xbf", b"\x00\x00\x00\x80", b"\xff" * 8, b"18446744073709551616", b"'", b"#", b"|\n", b"%YAML",
)  # fmt: skip


def check(reader: Reader, content: bytes, folder: Path) -> str:
    """Return the error that a reader raises for this content, other than HorizonError; an empty text for none."""
    path = folder / "input"
    path.write_bytes(content)
    try:
        reader(path)
    except HorizonError:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fuzz(name: str, folder: Path, seed: int, stop: Callable[[int], bool]) -> str:
    """Read mutations of a valid file and of the corpus until ``stop``, given their number, or until one fails.

    Returns:
        the error of the input that failed, which is then in the corpus; an empty text if none did.
    """
    reader, start = READERS[name]
    seeds = [start, *(path.read_bytes() for path in sorted((CORPUS / name).glob("*")))]
    rng, count = random.Random(seed), 0
    while not stop(count):
        content = changed_bytes(rng.choice(seeds), rng, _TOKENS)
        count += 1
        if error := check(reader, content, folder):
            (CORPUS / name).mkdir(parents=True, exist_ok=True)
            (CORPUS / name / hashlib.sha256(content).hexdigest()[:12]).write_bytes(content)
            return error
    return ""


def main(arguments: list[str]) -> int:
    """Fuzz each reader for some seconds, print a line for each, and return the number of readers that failed."""
    import tempfile

    seconds = float(arguments[0]) if arguments else 600.0
    failed = 0
    for name in arguments[1:] or READERS:
        end, total = time.monotonic() + seconds, 0

        def stop(count: int, end: float = end) -> bool:
            nonlocal total
            total = count
            return time.monotonic() > end

        with tempfile.TemporaryDirectory() as folder:
            error = fuzz(name, Path(folder), time.time_ns(), stop)
        failed += bool(error)
        print(f"{name}: {total:,} inputs; {error or 'no failure'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
