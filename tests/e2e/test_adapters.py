"""Runs that train adapters: equal to plain PEFT, resumed exactly, and exported as PEFT writes them."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, get_scheduler, set_seed

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.training.early_mistakes import mistakes_in_run
from horizon_lm.runs.training.loop import seed_step
from tests.e2e import resuming, tiny
from tests.e2e.command import run
from tests.e2e.resuming import SAVING, Runs, assert_resumes
from tests.support import tiny_models
from tests.support.thinned_cases import thinned

pytestmark = pytest.mark.filterwarnings("ignore")
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_dropout": 0.0},
    "dora": {"use_dora": True},
    "a copy of the embedding": {"lora_modules_to_save": ["embed_tokens", "lm_head"]},
    "lora of the embedding": {"lora_target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return resuming.settings(tmp_path_factory.mktemp("rows"), model) | LORA


def plain_losses(settings: dict[str, Any], batches: list[Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the same adapters with plain PEFT, and return the losses and the adapters as PEFT saves them."""
    set_seed(42)
    model = AutoModelForCausalLM.from_pretrained(settings["model_name_or_path"], dtype=torch.float32)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=32, lora_dropout=settings.get("lora_dropout", 0.05),
        target_modules=settings["lora_target_modules"], modules_to_save=settings.get("lora_modules_to_save"),
        use_rslora=settings.get("use_rslora", False), use_dora=settings.get("use_dora", False),
    )  # fmt: skip
    model = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], settings["learning_rate"], weight_decay=0.0
    )
    scheduler = get_scheduler("cosine", optimizer, 2, len(batches))
    losses = []
    for step, batch in enumerate(batches, 1):
        seed_step(42, step)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, peft.get_peft_model_state_dict(model)


@pytest.mark.parametrize("kind", thinned(KINDS, every=4))
def test_a_run_equals_plain_peft(base: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """The same adapters are drawn, the same dropout, and the same losses follow, for 20 steps."""
    batches: list[Any] = []

    def watched(model: Any, batch: Any) -> Any:
        batches.append({**batch.inputs(), "labels": batch.labels})
        return model(**batches[-1]).loss

    settings = base | KINDS[kind] | {"precision": "float32", "max_steps": 20, "logging_steps": 1}
    result = horizon_lm.train(
        {**settings, "output_dir": str(tmp_path / "run")}, objective=watched, print_fn=lambda _: None
    )
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    ours = [line["loss"] for line in lines if "loss" in line]
    losses, adapters = plain_losses(settings, batches)
    assert ours == pytest.approx(losses, rel=3e-6)
    saved = load_file(result.model_dir / "adapter_model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in saved.items()} == {
        n: (t.shape, t.dtype) for n, t in adapters.items()
    }
    for name, value in adapters.items():
        assert torch.allclose(saved[name], value, rtol=1e-4, atol=2e-6), name


def test_adapters_of_experts_in_tiles(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    """A run in tiles is resumed exactly, and exports the adapters of a run with whole blocks."""
    tokenizer = tiny.build_tokenizer()
    tiny_models.build("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    settings = base | {
        "model_name_or_path": str(tmp_path / "mixture"), "lora_target_modules": ["q_proj"], "lora_dropout": 0.0,
        "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }  # fmt: skip
    assert_resumes(runs, settings | {"expert_tile": 3}, tmp_path, (4,))
    runs.train({**settings, **SAVING, "expert_tile": None, "output_dir": str(tmp_path / "blocks")})
    saved = [next((tmp_path / name / "model").rglob("adapter_model.safetensors")) for name in ("whole", "blocks")]
    tiles, blocks = map(load_file, saved)
    assert sum(".experts." in name for name in tiles) == 12  # in three blocks
    assert tiles.keys() == blocks.keys()
    assert all(map(torch.equal, tiles.values(), (blocks[name] for name in tiles)))


def test_a_checkpoint_has_the_adapters_alone(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    runs.train({**base, **SAVING, "output_dir": str(tmp_path / "run")})
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert [path.name for path in (checkpoint / "units").iterdir()] == ["outer.safetensors"]
    manifest = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]
    assert set(manifest["base"]) == {"embed", "block0", "block1", "head"}


def test_another_base_is_rejected(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    """One changed weight of the base suffices; the checkpoint is intact, and the unit is named."""
    cut = {**base, "output_dir": str(tmp_path / "run")}
    runs.interrupt(cut, stop_after=3)
    folder = Path(tiny.save_model(tmp_path / "other"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 0.5
    model.save_pretrained(folder)
    changed = {**cut, "model_name_or_path": str(folder), "resume_with_changes": True}
    with pytest.raises(ConfigError, match="adapters of another base: the weights of block1 differ"):
        horizon_lm.train(changed, print_fn=lambda _: None)


@pytest.mark.parametrize("saves_adapters", [False, True])
def test_a_checkpoint_of_another_kind_of_training(
    runs: Runs, base: dict[str, Any], tmp_path: Path, saves_adapters: bool
) -> None:
    """One error, before anything is prepared, without a remedy that cannot help; and the same if the model is loaded in Python."""
    full = {name: value for name, value in base.items() if name not in LORA}
    cut, other = (base, full) if saves_adapters else (full, base)
    runs.interrupt({**cut, "output_dir": str(tmp_path / "run")}, stop_after=2)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    saved, own = ("adapters", "all weights") if saves_adapters else ("all weights", "adapters")
    message = f"{checkpoint} is of a training of {saved}, and this model trains {own}"
    for wanted, output in (("auto", "run"), (str(checkpoint), "new")):
        places = {"resume_from_checkpoint": wanted, "output_dir": str(tmp_path / output)}
        changed, lines = {**other, **places, "resume_with_changes": True}, list[str]()
        with pytest.raises(ConfigError, match=message) as caught:
            horizon_lm.train(changed, print_fn=lines.append)
        told = str(caught.value)
        assert ("use_peft and the lora settings" in told, "resume_with_changes" in told) == (True, False)
        assert ("another output_dir" in told) == (wanted == "auto")
        assert [str(each) for each in mistakes_in_run(as_config(changed))] == [told]
        assert (lines, (tmp_path / "new").exists()) == ([], False)
    model = horizon_lm.from_pretrained(base["model_name_or_path"], device="cpu")
    if not saves_adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    with pytest.raises(ConfigError, match=message):
        horizon_lm.load_checkpoint(checkpoint, model, horizon_lm.AdamW(model, lr=1e-3))


@pytest.mark.parametrize("kind", ["lora", "a copy of the embedding", "lora of the embedding"])
def test_exported_adapters(base: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """The folder of the run, and that of a checkpoint of its last step, load in plain PEFT and give the same logits."""
    settings = (
        base
        | KINDS[kind]
        | {"max_steps": 6, "save_steps": 5, "output_dir": str(tmp_path / "run"), "precision": "float32"}
    )
    result = horizon_lm.train(settings, print_fn=lambda _: None)
    assert run("export", tmp_path / "run" / "checkpoint-5", tmp_path / "exported").exit_code == 0
    new = tmp_path / "new"
    new.touch()
    ids = torch.arange(3, 30)[None]
    logits = {}
    for folder in (result.model_dir, tmp_path / "exported"):
        modes = {path.stat().st_mode for path in folder.iterdir() if path.name.startswith("adapter_")}
        assert modes == {new.stat().st_mode}  # any new file's
        plain = AutoModelForCausalLM.from_pretrained(base["model_name_or_path"], dtype=torch.float32)
        plain = peft.PeftModel.from_pretrained(plain, folder).eval()
        streamed = horizon_lm.from_pretrained(folder, device="cpu", precision="float32").eval()
        logits[folder] = plain(ids).logits
        assert torch.equal(streamed(ids).logits, logits[folder])
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == base["model_name_or_path"]
        assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32, "LORA")
        assert {t.dtype for t in load_file(folder / "adapter_model.safetensors").values()} == {torch.float32}
    assert not torch.equal(*logits.values())  # after steps 6 and 5


def test_a_relative_base_is_found_from_anywhere(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters name their base by its whole path: in the folder of the run, in that of a checkpoint, and of a further run."""
    whole = Path(base["model_name_or_path"])
    monkeypatch.chdir(whole.parent)
    settings = base | {"model_name_or_path": f"./{whole.name}", "max_steps": 2, "save_steps": 1}
    said: list[str] = []
    first = horizon_lm.train(settings | {"output_dir": str(tmp_path / "run")}, print_fn=said.append)
    assert f"\n  horizon-lm merge {first.model_dir} OUT\n" in said[-1]
    checkpoint = tmp_path / "run" / "checkpoint-1"
    for folder in (first.model_dir, checkpoint):  # as an earlier version has written them
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(whole)
    old = first.model_dir / "adapter_config.json"
    old.write_text(old.read_text().replace(json.dumps(str(whole)), json.dumps(f"./{whole.name}")))
    more = {name: value for name, value in settings.items() if not name.startswith("lora_")}
    more |= {"adapter_name_or_path": str(first.model_dir), "output_dir": str(tmp_path / "more")}
    assert str(whole) in (horizon_lm.train(more, print_fn=lambda _: None).model_dir / "adapter_config.json").read_text()

    monkeypatch.chdir(tmp_path)
    assert run("export", checkpoint, "exported").exit_code == 0
    assert run("merge", "exported", "merged").exit_code == 0
    for command in (["generate", first.model_dir, "Who?", "--max-new-tokens", 2], ["merge", first.model_dir, "again"]):
        lost = run(*command)
        assert (lost.exit_code, "name the base with --base" in lost.stderr) == (2, True)
        assert run(*command, "--base", whole).exit_code == 0
    for file in first.model_dir.glob("*token*"):  # adapters that were saved without a tokenizer
        file.unlink()
    assert run("generate", first.model_dir, "Who?", "--max-new-tokens", 2, "--base", whole).exit_code == 0


def test_going_on_with_an_adapter(base: dict[str, Any], tmp_path: Path) -> None:
    """A run that starts from the adapters of another begins with their loss, and trains the same tensors."""
    first = horizon_lm.train({**base, "output_dir": str(tmp_path / "first")}, print_fn=lambda _: None)
    more = {name: value for name, value in base.items() if not name.startswith("lora_")}
    more |= {"adapter_name_or_path": str(first.model_dir), "output_dir": str(tmp_path / "second")}
    second = horizon_lm.train(more, print_fn=lambda _: None)
    assert second.eval_loss_before == pytest.approx(first.eval_loss_after, rel=1e-6)
    names = [set(load_file(each.model_dir / "adapter_model.safetensors")) for each in (first, second)]
    assert names[0] == names[1]


def test_the_reference_has_the_adapters_that_a_run_goes_on_with(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first update the model is its own reference. Other adapters on the same base have values of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"prompt": f"Night {n}? ", "chosen": "The keeper counts.", "rejected": "Rain."} for n in range(6)]
    pairs = [{"path": str(tiny.write_jsonl(tmp_path / "pairs.jsonl", rows))}]
    settings = base | {"max_steps": 3, "warmup_steps": 0, "learning_rate": 0.05}
    for number, rate in enumerate((0.05, 0.02)):
        first = horizon_lm.train(
            settings, learning_rate=rate, output_dir=str(tmp_path / f"sft {number}"), print_fn=lambda _: None
        )
        more = {name: value for name, value in settings.items() if not name.startswith("lora_")}
        more |= {
            "objective": "dpo",
            "datasets": pairs,
            "adapter_name_or_path": str(first.model_dir),
            "test_split_size": 1,
        }
        dpo = horizon_lm.train(more, output_dir=str(tmp_path / f"dpo {number}"), print_fn=lambda _: None)
        lines = resuming.untimed(dpo.output_dir / "metrics.jsonl")
        margins = {line["step"]: line["rewards/margins"] for line in lines if "rewards/margins" in line}
        assert margins[1] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_the_dtype_of_exported_adapters(base: dict[str, Any], tmp_path: Path, dtype: str | None) -> None:
    """It is the one that the run asks for, and without a wish that of the parameters, as PEFT writes them."""
    settings = base | {"max_steps": 2, "warmup_steps": 0, "output_dir": str(tmp_path / "run"), "export_dtype": dtype}
    adapters = load_file(horizon_lm.train(settings, print_fn=lambda _: None).model_dir / "adapter_model.safetensors")
    assert {value.dtype for value in adapters.values()} == {torch.bfloat16 if dtype else torch.float32}


def test_the_base_is_not_changed(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    """The bytes of every frozen unit are those that were loaded, after 20 steps."""
    seen: list[dict[str, str]] = []

    def remember() -> None:
        store = runs.loops[-1].model._horizon.engine.store
        slabs = {unit: store.units[unit].plain.weights.view(torch.uint8).numpy() for unit in store.frozen}
        seen.append({unit: hashlib.sha256(slab.data).hexdigest() for unit, slab in slabs.items()})

    runs.before_step = {1: remember, 20: remember}
    runs.train({**base, "max_steps": 20, "output_dir": str(tmp_path / "run")})
    assert len(seen[0]) == 4
    assert seen[0] == seen[1]


def test_dpo_prefers_against_the_model_that_it_starts_from(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference has the adapters that a run goes on with, which have learned something, as in TRL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = horizon_lm.train({**base, "output_dir": str(tmp_path / "first")}, print_fn=lambda _: None)
    pairs = [
        {"prompt": f"Night {n}? ", "chosen": "The keeper counts the stars.", "rejected": "Rain, rain."}
        for n in range(14)
    ]
    rows = tiny.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    dpo = {name: value for name, value in base.items() if not name.startswith("lora_")}
    dpo |= {"objective": "dpo", "datasets": [{"path": str(rows)}], "logging_steps": 1, "precision": "float32"}
    dpo |= {"adapter_name_or_path": str(first.model_dir), "output_dir": str(tmp_path / "dpo"), "max_steps": 2}
    horizon_lm.train(dpo, print_fn=lambda _: None)
    lines = map(json.loads, (tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines())
    loss = next(line["loss"] for line in lines if "loss" in line)
    plain = AutoModelForCausalLM.from_pretrained(base["model_name_or_path"], dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(plain, first.model_dir).eval()
    tokenizer = tiny.build_tokenizer()

    def logprob(prompt: str, answer: str) -> torch.Tensor:
        start, ids = len(tokenizer(prompt).input_ids), torch.tensor([[*tokenizer(prompt + answer).input_ids, 1]])
        values = plain(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
        return values[0, start - 1 :].sum()

    def margin(pair: dict[str, str]) -> torch.Tensor:
        return logprob(pair["prompt"], pair["chosen"]) - logprob(pair["prompt"], pair["rejected"])

    with torch.no_grad():
        policy = torch.stack([margin(pair) for pair in pairs])
        with plain.disable_adapter():
            reference = torch.stack([margin(pair) for pair in pairs])
    against_the_base = -torch.nn.functional.logsigmoid(0.1 * (policy - reference))
    assert loss == pytest.approx(math.log(2), abs=1e-5)
    assert against_the_base.max() < math.log(2) - 1e-3


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "unused": ({"use_peft": False}, "lora_r.*is not used without use_peft"),
    "trainable": ({"trainable": "lm_head"}, "trains adapters alone, so trainable is not used"),
    "no such layer": (
        {"lora_target_modules": ["nothing"]},
        "lora_target_modules: the model has no nothing; set lora_target_modules",
    ),
    "one of them": (
        {"lora_target_modules": ["q_proj", "v_porj"]},
        "the model has no v_porj; .* linear layers of the model: v_proj, ",
    ),
    "a misspelt layer": (
        {"lora_target_modules": ["v_prj"]},
        "v_prj.*; set lora_target_modules to linear layers of the model: v_proj, (?=.*q_proj)(?=.*down_proj)(?!.*lm_head)",
    ),
    "a pattern of no layer": ({"lora_target_modules": ".*mlp.up"}, "linear layers of the model: up_proj, "),
    "no such module": (
        {"lora_modules_to_save": ["embed_token"]},
        "lora_modules_to_save: embed_token: the model has nothing of this name; did you mean embed_tokens",
    ),
    "one module of two": (
        {"lora_modules_to_save": ["embed_tokens", "wte"]},
        "lora_modules_to_save: wte: .*; name one of the model's",
    ),
    "no such parameter": (
        {"lora_target_parameters": ["mlp.experts.gate_up_proj"], "lora_dropout": 0.0},
        "lora_target_parameters: mlp.experts.gate_up_proj: ",
    ),
    "stacked experts with dropout": (
        {"lora_target_parameters": ["mlp.experts.gate_up_proj"], "lora_dropout": 0.05},
        "lora_target_parameters: .*adapters of stacked experts have no dropout; set lora_dropout: 0",
    ),
    "not an adapter": (
        {"lora_r": 16, "lora_target_modules": None, "adapter_name_or_path": "."},
        "has no adapter_config.json",
    ),
    "its own rank": ({"adapter_name_or_path": "."}, "has its own lora_r"),
}


def test_a_target_may_be_one_name(base: dict[str, Any], tmp_path: Path) -> None:
    settings = base | {"lora_target_modules": "q_proj", "max_steps": 1, "output_dir": str(tmp_path / "run")}
    result = horizon_lm.train(settings, print_fn=lambda _: None)
    assert json.loads((result.model_dir / "adapter_config.json").read_text())["target_modules"] == ["q_proj"]


@pytest.mark.parametrize("case", REJECTED)
def test_bad_settings(base: dict[str, Any], tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = REJECTED[case]
    monkeypatch.setattr("horizon_lm.runs.training.setup.load_model", lambda *args: pytest.fail("the weights were read"))
    with pytest.raises(ConfigError, match=message):
        horizon_lm.train({**base, **changes, "output_dir": str(tmp_path / "run")}, print_fn=lambda _: None)
