"""Scripts that know nothing of streaming train under ``horizon-lm run`` as they do alone."""

import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import ConfigError
from horizon_lm.integrations.scripts.arguments import reject_unsupported
from horizon_lm.integrations.scripts.observing import observing
from horizon_lm.integrations.scripts.script import Script
from horizon_lm.integrations.scripts.streaming import Options, ScriptModels
from tests.e2e import tiny
from tests.e2e.command import run
from tests.seams.compare import difference
from tests.support import tiny_models
from tests.support.forks import context
from tests.support.thinned_cases import without

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPTS = Path(__file__).with_name("scripts")
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "rows")
SLOW = {"plain_trainer", "own_trainer"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("scripts") / "model")


def _run(arguments: list[str], path: Path) -> None:
    for number in (1, 2):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    if arguments[0] != "run":
        sys.argv, sys.path = arguments, [str(Path(arguments[0]).parent), *sys.path]
        runpy.run_path(arguments[0], run_name="__main__")
        return
    from horizon_lm.cli import main

    sys.argv[1:] = arguments
    main()


def in_process(folder: Path, *arguments: Any) -> tuple[int, str]:
    """Run a script in a process of its own, plain or by ``run``. Return the exit code and all that it printed."""
    path = folder / f"output-{len(list(folder.glob('output-*')))}"
    process = context.Process(target=_run, args=([str(each) for each in arguments], path))
    process.start()
    process.join(200)
    code = process.exitcode
    assert code is not None, path.read_text()
    return code, path.read_text()


def results(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the saved weights of a script."""
    weights = next((folder / "model").glob("*.safetensors"))
    return json.loads((folder / "losses.json").read_text()), load_file(weights)


@pytest.mark.parametrize("name", without(NAMES, SLOW))
def test_equal_to_the_script_alone(tmp_path: Path, model: Path, name: str) -> None:
    script = SCRIPTS / f"{name}.py"
    code, printed = in_process(tmp_path, script, model, "--output", tmp_path / "plain")
    assert code == 0, printed
    code, printed = in_process(tmp_path, "run", script, model, "--output", tmp_path / "streamed")
    assert code == 0, printed
    (losses, weights), (streamed_losses, streamed_weights) = (
        results(tmp_path / each) for each in ("plain", "streamed")
    )
    assert len(losses) >= 4
    assert max(losses) - min(losses) > 0.005
    assert difference(losses, streamed_losses, 5e-5) is None
    assert difference(weights, streamed_weights, 5e-5) is None
    # In this order: what is streamed, the plan, and the rate.
    places = [printed.index(text) for text in ("is streamed to cpu in float32", "plan: host memory", " tokens/s")]
    assert places == sorted(places)
    assert f"{name}.py:" in printed[: places[0]].splitlines()[-1]


@pytest.mark.slow
def test_two_processes(tmp_path: Path, model: Path) -> None:
    for how in ([], ["-m", "horizon_lm", "run"]):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *how]
        done = subprocess.run(
            [*command, SCRIPTS / "plain_trainer.py", model, "--output", tmp_path / str(len(how))],
            capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    (losses, weights), (streamed_losses, streamed_weights) = (results(tmp_path / each) for each in ("0", "3"))
    assert done.stdout.count("is streamed to cpu") == 1
    assert difference(losses, streamed_losses, 5e-5) is None
    assert difference(weights, streamed_weights, 5e-5) is None


def test_the_plan_alone(tmp_path: Path, model: Path) -> None:
    for name in ("plain_trainer", "bare_loop"):
        output = tmp_path / name
        code, printed = in_process(tmp_path, "run", "--plan", SCRIPTS / f"{name}.py", model, "--output", output)
        assert code == 0, printed
        assert "plan: host memory" in printed
        assert "the first" not in printed
        assert not (output / "losses.json").exists()


def test_the_plan_for_another_machine(tmp_path: Path, model: Path) -> None:
    for name in ("plain_trainer", "bare_loop"):
        there = ("--plan", "--device", "rtx-4090", "--host-memory", "128GiB")
        code, printed = in_process(tmp_path, "run", *there, SCRIPTS / f"{name}.py", model, "--output", tmp_path / "out")
        assert code == 0, printed
        assert "available (memory of RTX 4090 24 GB" in printed
        assert "128.00 GiB available (host_memory)" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "rtx-4090"], "--device rtx-4090 is a machine to plan for; add --plan"),
        (["--plan", "--device", "cpu"], "--device cpu: the script chooses the device of this machine"),
        (["--host-memory", "1GiB"], "--host-memory is for the machine that --device names"),
        (["--precision", "fp16"], "--precision fp16: choose one of"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str) -> None:
    result = run("run", *options, SCRIPTS / "lora.py")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_module(tmp_path: Path, model: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": f"{n}"}]} for n in range(4)
    ]
    (tmp_path / "data").mkdir()
    data = tiny.write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    code, printed = in_process(
        tmp_path, "run", "--precision", "bf16", "-m", "trl.scripts.sft", "--model_name_or_path", model, "--dataset_name", data.parent,
        "--output_dir", tmp_path / "out", "--max_steps", 1, "--use_cpu", "--bf16", "false", "--report_to", "none",
    )  # fmt: skip
    assert code == 0, printed
    assert "is streamed to cpu in bf16" in printed
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.fixture
def _restored() -> Iterator[None]:
    arguments, path = sys.argv, list(sys.path)
    yield
    sys.argv, sys.path = arguments, path


LOAD = "from transformers import *\nimport sys, torch\n"
REJECTED = {
    "AutoModelForCausalLM.from_pretrained(sys.argv[1], load_in_8bit=True)": "load_in_8bit=True is not supported",
    "LlamaForCausalLM.from_pretrained(sys.argv[1], quantization_config=BitsAndBytesConfig(load_in_8bit=True))": "8 bits is not",
    "AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan='auto')": "tp_plan='auto' is not supported",
    "AutoModelForCausalLM.from_pretrained(sys.argv[1], variant='fp16')": "variant='fp16' is not supported",
    "AutoModelForCausalLM.from_pretrained(sys.argv[1], use_kernels=True)": "use_kernels=True is not supported",
    "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); Trainer(m, TrainingArguments(use_liger_kernel=True, use_cpu=True))": (
        "use_liger_kernel=True is not supported"
    ),
    "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); Trainer(m, TrainingArguments(fp16=True, use_cpu=True))": (
        "fp16=True is not supported"
    ),
    "m = BertForMaskedLM(BertConfig(hidden_size=8, num_attention_heads=1)); Trainer(m, TrainingArguments(use_cpu=True))": (
        "BertForMaskedLM"
    ),
}


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("code", REJECTED)
def test_what_is_not_supported_is_rejected_with_its_line(tmp_path: Path, model: Path, code: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOAD + code)
    result = run("run", script, model)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: script.py:3: ")
    assert REJECTED[code] in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("precision", "kind", "message"),
    [("fp16", "NO", "mixed_precision='fp16' is not supported"), ("bf16", "FSDP", "accelerate is set up for FSDP")],
)
def test_what_accelerate_is_set_up_for_is_rejected(precision: str, kind: str, message: str) -> None:
    accelerator = SimpleNamespace(mixed_precision=precision, distributed_type=SimpleNamespace(value=kind))
    with pytest.raises(ConfigError, match=message):
        reject_unsupported(accelerator)
    reject_unsupported(SimpleNamespace(mixed_precision="bf16", distributed_type=SimpleNamespace(value="NO")))


@pytest.mark.usefixtures("_restored")
def test_a_script_that_streams_nothing_fails(tmp_path: Path, model: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOAD + "AutoModelForCausalLM.from_pretrained(sys.argv[1])\nsys.exit(0)")
    result = run("run", script, model)
    assert result.exit_code == 2
    assert "script.py ended, and no model was streamed" in result.stderr
    script.write_text("import sys\nsys.exit(7)")
    assert run("run", script).exit_code == 7
    assert "no such script" in run("run", tmp_path / "other.py").stderr
    assert "no such module" in run("run", "-m", "other_module_of_nobody").stderr
    assert run("run").exit_code == 2


@pytest.fixture
def models(tmp_path: Path) -> Iterator[ScriptModels]:
    found = ScriptModels(Script(tmp_path / "script.py", ()), Options())
    signature = inspect.signature(Trainer.__init__).parameters.keys() - {"self"}
    with observing(found):
        assert inspect.signature(Trainer).parameters.keys() == signature
        yield found
    assert inspect.signature(Trainer).parameters.keys() == signature
    assert "__call__" not in vars(PreTrainedModel)
    assert type(Trainer.__new__(Trainer)) is Trainer


def test_moves_to_a_device_that_is_missing_do_nothing(models: ScriptModels, model: Path) -> None:
    loaded = LlamaForCausalLM.from_pretrained(model)
    assert loaded.to("cuda").cuda().to(torch.bfloat16) is loaded
    assert (loaded.device.type, loaded.dtype) == ("cpu", torch.bfloat16)
    models.loaded[loaded].device = None
    loaded(input_ids=torch.zeros(1, 1, dtype=torch.long))  # streams it
    assert models.num_streamed == 1
    assert loaded._horizon.engine.store.precision.name == "bf16"
    assert loaded.cuda().to("cuda:1").to("cpu") is loaded


def test_weights_in_float16_become_bfloat16(
    models: ScriptModels, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float16, device_map="auto", use_cache=False)
    assert loaded.dtype == torch.bfloat16
    assert not loaded.config.use_cache
    printed = capsys.readouterr().out
    assert "dtype=float16 is bfloat16" in printed
    assert printed.count("device_map='auto' is left out") == 1


def test_a_model_that_cannot_be_streamed_is_computed_whole(
    models: ScriptModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path).to("cpu")
    assert loaded(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits.shape == (1, 2)
    assert loaded(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits.shape == (1, 2)
    assert (
        capsys.readouterr().out.count(
            "BertForSequenceClassification is computed as a whole on cpu; it is not streamed: "
        )
        == 1
    )
    assert not models.num_streamed


def test_a_base_of_4_bits_is_streamed_when_it_is_loaded(models: ScriptModels, model: Path) -> None:
    loaded = LlamaForCausalLM.from_pretrained(model, load_in_4bit=True, device_map="auto")
    assert loaded._horizon.engine.store.codecs
    assert models.num_streamed == 1


def test_a_model_that_generates_first_is_streamed_then(models: ScriptModels, model: Path) -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(tiny_models.build("llama").config)
    loaded = LlamaForCausalLM._from_config(plain.config)
    loaded.load_state_dict(plain.state_dict())
    ids = torch.ones(1, 3, dtype=torch.long)
    expected = plain.generate(ids, max_new_tokens=4, do_sample=False)
    assert models.num_streamed == 0
    assert torch.equal(loaded.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert models.num_streamed == 1


@pytest.mark.parametrize("first", ["generate", "__call__", "trainer"])
def test_adapters_train_in_whatever_streams_them(models: ScriptModels, model: Path, tmp_path: Path, first: str) -> None:
    """The model inside PEFT's is streamed when it is called, and a trainer takes over what was streamed before."""
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(model), LoraConfig(r=4, task_type="CAUSAL_LM"))
    assert adapted.to("cuda") is adapted
    models.loaded[adapted.get_base_model()].device = None
    ids = torch.tensor([[5, 9, 3]])
    if first != "trainer":
        _ = adapted.generate(input_ids=ids, max_new_tokens=2) if first == "generate" else adapted(input_ids=ids)
        assert len(models.in_loops) == models.num_streamed == 1
    rows = [{"input_ids": ids[0].tolist(), "labels": ids[0].tolist()}] * 2
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, report_to="none", save_strategy="no")
    trainer = Trainer(adapted, arguments, train_dataset=rows)
    before = {name: param.detach().clone() for name, param in adapted.named_parameters() if param.requires_grad}
    trainer.train()
    assert (len(models.in_loops), models.num_streamed) == (0, 1)
    changed = [not torch.equal(adapted.get_parameter(name), each) for name, each in before.items() if "lora_B" in name]
    assert changed
    assert all(changed)


@pytest.mark.parametrize("kind", ["instance", "subclass"])
def test_weights_in_16_bits_with_an_optimizer_of_the_script_stay_in_them(
    models: ScriptModels, model: Path, tmp_path: Path, kind: str
) -> None:
    class OwnOptimizer(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            return self.optimizer

    loaded = LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path=model, dtype=torch.bfloat16)
    arguments = TrainingArguments(tmp_path / "out", max_steps=1, report_to="none", use_cpu=True)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8), "attention_mask": None}] * 2
    collate = {
        "data_collator": lambda batch: {name: each if each is None else each[None] for name, each in batch[0].items()}
    }
    if kind == "instance":
        own = torch.optim.AdamW(loaded.parameters(), lr=1e-2)
        trainer = Trainer(loaded, arguments, train_dataset=rows, optimizers=(own, None), **collate)
    else:
        trainer = OwnOptimizer(loaded, arguments, train_dataset=rows, **collate)
    assert engine_of(trainer.model).store.precision.name == "bf16"
    trainer.train()


def test_help_of_a_script_is_no_error(tmp_path: Path) -> None:
    script = tmp_path / "helps.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    code, printed = in_process(tmp_path, "run", script, "--help")
    assert code == 0, printed
    assert "usage: helps.py" in printed
