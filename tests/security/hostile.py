"""Fuzz small hostile files: whatever their values, reading one ends, or raises HorizonError, within 10 seconds and 500 MB.

``python -m tests.security.hostile [SECONDS] [FILE ...]`` reads random files for ten minutes by default, each in a process that the
kernel limits, and writes those that fail to ``tests/security/corpus/hostile/``, which `tests/security/test_hostile.py` reads again.
"""

import copy
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.security.costs import Cost, cost_of

CORPUS = Path(__file__).with_name("corpus") / "hostile"
ENDLESS = r"(([a-zA-Z_.0-9]+)+)+!"
_MODEL_TYPES = (
    "gpt2",
    "qwen3",
    "mixtral",
    "gemma3_text",
    "deepseek_v3",
    "falcon",
    "bloom",
    "mpt",
    "opt",
    "phi3",
    "gpt_oss",
    "mamba",
)
_KEYS = (
    "num_labels", "num_hidden_layers", "num_experts", "num_local_experts", "n_layer", "hidden_size", "vocab_size", "head_dim",
    "max_position_embeddings", "n_positions", "sliding_window", "layer_types", "id2label", "label2id", "text_config", "rope_scaling",
    "rope_parameters", "quantization_config", "dtype", "attn_implementation", "num_beams", "max_length", "suppress_tokens", "bad_words_ids",
    "r", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "target_parameters", "modules_to_save", "layers_pattern",
    "layers_to_transform", "layer_replication", "trainable_token_indices", "init_lora_weights", "peft_type", "num_virtual_tokens",
    "normalizer", "pre_tokenizer", "post_processor", "added_tokens", "padding", "truncation", "added_tokens_decoder", "model_max_length",
    "extra_special_tokens", "chat_template", "tokenizer_class", "weight_map", "metadata",
)  # fmt: skip
_PIECES: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: rng.choice((10**8, 2**26, 2**31, 2**63, 10**300, -1, 0, 1, -(2**63), 1e308, 5e-324, 0.5, float("nan"), float("inf"))),
    lambda rng: rng.choice((ENDLESS, ".*" * 12 + "!", "a" * 10**5, "\0", "../../x", "", "(" * 500, "[[:alpha:]]+", "a{65535}" * 9, "\ud800")),
    lambda rng: [rng.choice((1.0, 7, "a", None, [], {}, ENDLESS))] * rng.choice((1, 1000, 60_000)),
    lambda rng: {f"{rng.choice(('layers.', '', 'a'))}{n}": 4 for n in range(rng.choice((1, 1000, 60_000)))},
    lambda rng: json.loads("[" * (depth := rng.choice((10, 400))) + "]" * depth),
    lambda rng: rng.choice((None, True, False, {}, [], "float64", "auto", *_MODEL_TYPES)),
    lambda rng: {"type": "Split", "pattern": {"Regex": rng.choice((ENDLESS, r"(a*)*b", r"\w+|\s"))}, "behavior": "Isolated", "invert": False},
    lambda rng: {"type": "Replace", "pattern": {"String": rng.choice(("e", ""))}, "content": "e" * rng.choice((2, 1000))},
    lambda rng: {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * rng.choice((2, 40))},
    lambda rng: {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a", "pad_to_multiple_of": None},
    lambda rng: {"quant_method": rng.choice(("bitsandbytes", "fp8", "mxfp4", "gptq")), "load_in_4bit": True, "modules_to_not_convert": [ENDLESS]},
    lambda rng: {"rope_type": rng.choice(("yarn", "longrope", "llama3", "dynamic")), "factor": 1e300, "short_factor": [1.0] * 60_000,
                 "long_factor": [1.0], "rope_theta": 0},
)  # fmt: skip


def mutate(content: Any, rng: random.Random) -> Any:
    """Return a copy of JSON values in which a few are replaced by hostile ones, or have hostile neighbours."""
    changed = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_containers(changed))
        place = rng.choice(places[: rng.choice((1, len(places)))])
        value = rng.choice(_PIECES)(rng)
        if isinstance(place, dict):
            key = rng.choice([*place, rng.choice(_KEYS)] if rng.random() < 0.6 else _KEYS)
            place[key] = value
        elif place:
            place[rng.randrange(len(place))] = value
        else:
            place.append(value)
    return changed


def _containers(value: Any) -> Iterator[Any]:
    """Yield all mappings and lists in nested values."""
    if isinstance(value, dict | list):
        yield value
        for each in list(value.values()) if isinstance(value, dict) else value[:50]:
            yield from _containers(each)


class Folders:
    """A tiny model, adapters of it and a run, whose files are replaced one by one.

    Args:
        here: folder for them.
    """

    def __init__(self, here: Path) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        from tests.e2e import tiny

        self.here, self.rows = here, here / "rows.jsonl"
        self.rows.write_text('{"text": "hello there"}\n')
        self.model, self.adapter, self.run = tiny.save_model(here / "model"), here / "adapter", here / "run"
        base = AutoModelForCausalLM.from_pretrained(self.model)
        config = peft.LoraConfig(target_modules=["q_proj"], r=4, task_type="CAUSAL_LM")
        peft.get_peft_model(base, config).save_pretrained(self.adapter)
        self.run.mkdir()
        (self.run / "config.yaml").write_text("seed: 1\nmodel_name_or_path: m\n")

    def read_model(self, folder: Path) -> None:
        """Read all that a run reads of a model before it reads the rows, and encode a text."""
        from horizon_lm.runs.admission.inputs import fetch_source
        from horizon_lm.runs.config import SftConfig
        from horizon_lm.runs.training.setup import check_weights, load_tokenizer

        config = SftConfig(model_name_or_path=str(folder), datasets=str(self.rows))
        model = fetch_source(config).model
        load_tokenizer(config, model)
        check_weights(config, model)

    def read_adapter(self, folder: Path) -> None:
        import horizon_lm

        horizon_lm.from_pretrained(folder, device="cpu")

    def read_settings(self, folder: Path) -> None:
        """Read a run file as each command does."""
        from horizon_lm.errors import HorizonError
        from horizon_lm.runs.config.load import read_run_config
        from horizon_lm.runs.run_files import load_run
        from horizon_lm.tools.translate import translate_file

        for reader in (read_run_config, translate_file):
            try:
                reader(str(folder / "config.yaml"))
            except HorizonError:
                continue
        load_run(folder)

    def cost(self, file: str, content: bytes) -> Cost:
        """Return what it costs to read a folder in which a file has this content."""
        source, reader = self._of(file)
        folder = self.here / "hostile"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        (folder / file).write_bytes(content)
        return cost_of(lambda: reader(folder))

    def start(self, file: str) -> Any:
        """Return the content of a file to start from."""
        path = self._of(file)[0] / file
        return json.loads(path.read_text()) if path.suffix == ".json" and path.exists() else {}

    def _of(self, file: str) -> tuple[Path, Callable[[Path], None]]:
        if file == "adapter_config.json":
            return self.adapter, self.read_adapter
        return (self.run, self.read_settings) if file == "config.yaml" else (self.model, self.read_model)


FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "model.safetensors.index.json", "adapter_config.json", "config.yaml",
)  # fmt: skip


def hostile(file: str, start: Any, rng: random.Random) -> bytes:
    """Return a small hostile file."""
    if file == "config.yaml":
        return _yaml(rng).encode()
    return json.dumps(mutate(start, rng)).encode()


def _yaml(rng: random.Random) -> str:
    """Return YAML whose anchors, aliases and merge keys refer to each other at random."""
    lines = ["a0: &a0 {k: 1, l: [1, 2]}"]
    for n in range(1, rng.choice((3, 30, 300))):
        others = ", ".join(f"*a{rng.randrange(max(0, n - 3), n)}" for _ in range(rng.choice((1, 2, 9))))
        lines.append(
            rng.choice(
                (
                    f"a{n}: &a{n} {{<<: [{others}]}}",
                    f"a{n}: &a{n} [{others}]",
                    f"a{n}: &a{n} {{x: [{others}], <<: *a0}}",
                )
            )
        )
    lines += rng.sample(
        ('b: "\\UFFFFFFFF"', "c: !!binary x", "d: &a0 1", "e: 0x" + "f" * 9999, "seed: [" + "[" * 900, "? x"),
        rng.randrange(3),
    )
    return "\n".join(lines) + "\n"


def fuzz(folders: Folders, file: str, seed: int, stop: Callable[[int], bool]) -> tuple[int, str]:
    """Read hostile files until ``stop``, given their number, or until one fails; return the number and the failure.

    The file that failed is then in the corpus.
    """
    rng, count, start = random.Random(seed), 0, folders.start(file)
    while not stop(count):
        content = hostile(file, start, rng)
        count += 1
        if problem := folders.cost(file, content).problem:
            (CORPUS / file).mkdir(parents=True, exist_ok=True)
            (CORPUS / file / hashlib.sha256(content).hexdigest()[:12]).write_bytes(content)
            return count, problem
    return count, ""


def main(arguments: list[str]) -> int:
    """Fuzz all files for some seconds together, print a line for each, and return the number of those that failed."""
    seconds, failed = float(arguments[0]) if arguments else 600.0, 0
    files = arguments[1:] or FILES
    with tempfile.TemporaryDirectory() as here:
        folders = Folders(Path(here))
        for file in files:
            end = time.monotonic() + seconds / len(files)
            count, problem = fuzz(folders, file, time.time_ns(), lambda _, end=end: time.monotonic() > end)  # type: ignore[misc]
            failed += bool(problem)
            print(f"{file}: {count:,} inputs; {problem or 'no failure'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
