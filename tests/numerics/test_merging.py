"""A merged folder is its base, in which what the adapters change has PEFT's values: for every kind of adapters and of bases."""

import json
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="needs the whole installation")

from tests.census.tiny_models import model_types
from tests.support import merged_adapters
from tests.support.thinned_cases import thinned

pytestmark = pytest.mark.filterwarnings("ignore")
PROVEN = set(json.loads((Path(__file__).parents[2] / "src/horizon_lm/model/proven.json").read_text())["types"])
# Each kind of base, and each way to change one, at least once.
SAMPLE = [
    ("float32", "olora"), ("float32", "Vera"), ("float32", "Adamss"), ("bf16", "pissa"), ("bf16", "AdaLora"), ("tied", "modules_to_save=lm_head"),
    ("tied", "target_modules=lm_head"), ("tied bf16", "modules_to_save=both"), ("tied bf16", "target_modules=embed_tokens"),
    ("biases", "bias=all"), ("tied biases", "bias=lora_only"), ("buffers", "lora"), ("buffers bf16", "bias=all"),
    ("experts", "dora"), ("nf4", "Shira"), ("nested nf4", "bias=all"),
    ("mxfp4", "modules_to_save=lm_head"), ("fp8 experts", "lora"), ("fp8", "Psoft"),
    ("int4", "dora"), ("int4 experts", "lora"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "kind"), thinned(SAMPLE, every=2))
def test_merged_folders(tmp_path: Path, base: str, kind: str) -> None:
    assert merged_adapters.compare(tmp_path, base, kind) == []


# PEFT's own forward of two kinds fails with the shapes of DeepSeek's attention.
FAILING = [
    (base, kind) for base in ("buffers", "buffers bf16", "fp8 experts", "int4 experts") for kind in ("Gralora", "OFT")
]
ALL = [(base, kind) for base in merged_adapters.BASES for kind in merged_adapters.KINDS if (base, kind) not in FAILING]
ALL += [(base, kind) for base in ("biases", "tied biases", "nested nf4") for kind in merged_adapters.OF_BIASES]


@pytest.mark.slow
@pytest.mark.parametrize(("base", "kind"), ALL)
def test_all_merged_folders(tmp_path: Path, base: str, kind: str) -> None:
    assert merged_adapters.compare(tmp_path, base, kind) == []


# transformers opens a folder of the first as another model; PEFT reads adapters of the second under names that it does not have.
NOT_READ = {"emu3", "laguna"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(PROVEN & set(model_types("causal")) - NOT_READ))
def test_all_types(tmp_path: Path, model_type: str) -> None:
    assert merged_adapters.compare_type(tmp_path, model_type) == []
