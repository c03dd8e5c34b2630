"""Hostile folders of adapters: each is one clear error before PEFT spends time or memory on it, and nothing outside is read."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.model import hf_config, skeletons
from horizon_lm.model.adapter_config import require_quick_names
from horizon_lm.model.freezing import _compile
from horizon_lm.model.quantization import expected_codecs, four_bits
from horizon_lm.model.units import find_parts
from tests.e2e import tiny
from tests.e2e.command import run
from tests.security.costs import cost_of
from tests.security.folder_edits import changed, link, text
from tests.support.thinned_cases import without

peft = pytest.importorskip("peft")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ENDLESS = r"(([a-z_.0-9]+)+)+!"
SLOW = "takes more than 1 second to compare with the names"
# As Unsloth writes it.
PUBLISHED = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|k_proj|v_proj|o_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|v_proj|o_proj)))"
)


def huge_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((90_000_000).to_bytes(8, "little") + b"{" + b" " * 90_000_000)


def only_xlora(folder: Path) -> None:
    base = json.loads((folder / CONFIG).read_text())["base_model_name_or_path"]
    (folder / CONFIG).write_text(
        json.dumps(
            {"peft_type": "XLORA", "base_model_name_or_path": base, "hidden_size": 32, "adapters": {"a": "owner/name"}}
        )
    )


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "target_modules": (changed(CONFIG, target_modules=ENDLESS), SLOW),
    "polynomial": (changed(CONFIG, target_modules=".*" * 12 + "!"), SLOW),
    "a name in a list": (changed(CONFIG, modules_to_save=[ENDLESS]), SLOW),
    "exclude_modules": (changed(CONFIG, exclude_modules=ENDLESS), SLOW),
    "rank_pattern": (changed(CONFIG, rank_pattern={ENDLESS: 4}), SLOW),
    "alpha_pattern": (changed(CONFIG, alpha_pattern={ENDLESS: 4}), SLOW),
    "layers_pattern": (changed(CONFIG, layers_pattern=ENDLESS, layers_to_transform=[0]), SLOW),
    "many names": (changed(CONFIG, target_modules=[f"m{n}" for n in range(200_000)]), "200,.* names, too many"),
    "many ranks": (changed(CONFIG, rank_pattern={f"m{n}": 4 for n in range(1000)}), "rank_pattern has 1,000 names"),
    "rank of a billion": (changed(CONFIG, r=10**9), "r is 1,000,000,000, more than"),
    "rank of other weights": (changed(CONFIG, r=10**5), "the rank 100,000 is not that of"),
    "layers a million times": (changed(CONFIG, layer_replication=[[0, 10**6]]), "layer_replication is not streamed"),
    "iterations": (changed(CONFIG, init_lora_weights="pissa_niter_1000000000"), "has 100000000 iterations"),
    "adapters of the hub": (only_xlora, "XLORA is not streamed"),
    "nested": (text(CONFIG, "[" * 100_000), "cannot be read"),
    "huge config": (text(CONFIG, '{"a": [' + "{}," * 300_000 + "1]}"), "has 300,000 values"),
    "huge header": (huge_header, "a header of 90,000,000 bytes"),
    "link to weights": (link(WEIGHTS, "../elsewhere"), "elsewhere, outside of"),
    "link to a config": (link(CONFIG, "../elsewhere"), "elsewhere, outside of"),
}  # fmt: skip
SHOWN = ("rank_pattern", "layers a million times", "link to weights")  # by the command line, too


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_lm.model.pattern_trial.MAX_SECONDS", 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of adapters, beside that of their base."""
    here = tmp_path_factory.mktemp("adapters")
    base = AutoModelForCausalLM.from_pretrained(tiny.save_model(here / "model"))
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(here / "adapter")
    return here / "adapter"


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").write_bytes((saved / WEIGHTS).read_bytes())
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


MANY = ("polynomial", "a name in a list", "exclude_modules", "alpha_pattern", "layers_pattern")


@pytest.mark.parametrize("name", without(CASES, MANY))
def test_adapters_are_rejected_at_little_cost(name: str, folder: Path) -> None:
    edit, message = CASES[name]
    edit(folder)
    cost = cost_of(lambda: horizon_lm.from_pretrained(folder, device="cpu"))
    assert cost.problem == ""
    assert re.search(message, cost.message), cost


@pytest.mark.parametrize("name", SHOWN)
def test_merge_rejects(name: str, folder: Path, tmp_path: Path) -> None:
    CASES[name][0](folder)
    result = run("merge", folder, tmp_path / "merged")
    assert result.exit_code == 2, result.stderr
    assert "\n" not in result.stderr.strip()
    assert not (tmp_path / "merged").exists()


def test_merge_copies_nothing_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    link("tokenizer.json", "../elsewhere")(folder)
    result = run("merge", folder, tmp_path / "merged")
    assert result.exit_code == 2
    assert "tokenizer.json leads to" in result.stderr


def test_a_published_pattern_is_quick() -> None:
    layers = [
        f"model.layers.{n}.{part}" for n in range(80) for part in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm")
    ]
    require_quick_names(
        {"target_modules": PUBLISHED, "rank_pattern": {r"layers\.\d+\.self_attn\..*_proj": 8}}, layers, "here"
    )


def test_patterns_of_a_run_file(saved: Path, tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    result = run("train", "--model_name_or_path", saved.parent / "model", "--datasets", rows, "--device", "cpu", "--max_steps", 1,
                 "--use_peft", "--lora_target_modules", ENDLESS, "--output_dir", tmp_path / "run")  # fmt: skip
    assert result.exit_code == 2
    assert f"lora_target_modules: the pattern {ENDLESS} {SLOW}" in result.stderr


def test_patterns_of_a_quantized_model(saved: Path) -> None:
    """The modules that a config leaves out are regular expressions, too."""
    source = saved.parent / "model"
    parts = find_parts(skeletons.open_skeleton(source, hf_config.load_config(source, trust_remote_code=False)))
    with pytest.raises(ConfigError, match=r"quantization_config: the pattern .* takes more than 1 second to compare"):
        expected_codecs(parts, {**four_bits(), "llm_int8_skip_modules": [ENDLESS]})


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("layers.20.*", "model.layers.20.mlp.up.weight", True),
        ("layers.2.*", "model.layers.20.mlp.up.weight", False),
        ("layers.*.up", "model.layers.20.mlp.up.weight", True),
        ("l*e*s.*up.w*t", "model.layers.20.mlp.up.weight", True),
        ("l*e*s.*up.w", "model.layers.20.mlp.up.weight", False),
        ("*", "model.layers.20.mlp.up.weight", True),
        ("a*b*c", "x.ab.b.c.d", True),
        ("*.".join("a" * 40) + "*!", "a." * 4000, False),
    ],
)
def test_patterns_of_trainable_weights(pattern: str, name: str, fits: bool) -> None:
    """Also with many stars, in a time that grows with the length of the name."""
    assert (_compile(pattern).search(name) is not None) == fits
