"""Runs of several ranks: the losses of one process, for each objective, and one folder with one model."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainerCallback

import horizon_lm
from horizon_lm.distributed.mesh import ProcessMesh
from horizon_lm.errors import InterruptedRunError, NonFiniteError
from horizon_lm.planning.arithmetic.request import Limit, Machine
from horizon_lm.runs.admission.this_machine import agree_on_machine
from horizon_lm.runs.data import tokenized_table
from horizon_lm.runs.data.loader import deal
from horizon_lm.runs.training import resume
from tests.distributed.pool import Pool
from tests.distributed.runs import assert_same, environment_of, free_port, interrupted, outputs_of, run_as_rank
from tests.e2e import resuming, tiny
from tests.e2e.processes import RunProcess
from tests.support.thinned_cases import without

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    settings = resuming.settings(folder, Path(tiny.save_model(folder / "model")))
    return settings | {"save_strategy": "no", "precision": "float32", "logging_steps": 1, "max_steps": 6}


def mean_of_targets(model: Any, batch: Any) -> Any:
    """Return the loss of docs/python-api.md, a mean over the targets of a batch."""
    logprobs = horizon_lm.token_logprobs(model, labels=batch.labels, **batch.inputs()).logprobs
    return -logprobs.sum() / batch.num_trained, {"least_likely": logprobs.detach().min()}


def pairs(folder: Path) -> dict[str, Any]:
    rows = [
        {"prompt": f"Night {n}? ", "chosen": "The keeper counts the stars." * (1 + n % 3), "rejected": "Rain."}
        for n in range(14)
    ]
    path = tiny.write_jsonl(folder / "pairs.jsonl", rows)
    return {"objective": "dpo", "datasets": [{"path": str(path)}], "learning_rate": 1e-3}


ADAPTERS = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"per_device_train_batch_size": 2},
    "micro-batches": {"per_device_train_batch_size": 2, "device_micro_batch_size": 1},
    "three ranks": {"world": 3, "per_device_train_batch_size": 2},
    "dropout": {"world": 3, "per_device_train_batch_size": 1, "device_micro_batch_size": 1, "attention_dropout": 0.2},
    "copies": {"world": 4, "per_device_train_batch_size": 1, "dp_replicate_size": 2},
    "packed": {"objective": "pretrain", "packing": True, "max_length": 32, "per_device_train_batch_size": 2},
    "best": {
        "per_device_train_batch_size": 2,
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "learning_rate": 0.05,
        "metric_for_best_model": "eval_mean_token_accuracy",
    },
    "dft": {"loss_type": "dft", "per_device_train_batch_size": 2},
    "dpo": {"objective": "dpo", "per_device_train_batch_size": 2},
    "ipo": {"world": 3, "objective": "dpo", "loss_type": ["ipo"], "per_device_train_batch_size": 3},
    "adapters": {"world": 3, "per_device_train_batch_size": 2, **ADAPTERS},
    "quantized base": {"world": 3, "per_device_train_batch_size": 2, "load_in_4bit": True, **ADAPTERS},
    "dpo of adapters": {"objective": "dpo", "per_device_train_batch_size": 2, **ADAPTERS},
    "dpo of made adapters": {
        "objective": "dpo",
        "adapter_name_or_path": "made",
        "use_peft": True,
        "per_device_train_batch_size": 2,
    },
    "made adapters": {"adapter_name_or_path": "made", "use_peft": True, "per_device_train_batch_size": 2},
}

IN_OTHER_CASES = (
    "sft", "micro-batches", "three ranks", "copies", "dft", "dpo", "adapters", "dpo of adapters", "made adapters",
)  # fmt: skip


def adapters_of_one_process(settings: dict[str, Any], folder: Path) -> str:
    """Train DoRA for a step in one process, and return the folder of these adapters."""
    kinds = {**ADAPTERS, "use_dora": True, "lora_target_modules": ["q_proj", "down_proj"]}
    changes = {**kinds, "adapter_name_or_path": None, "max_steps": 1, "output_dir": str(folder)}
    horizon_lm.train(settings | changes, print_fn=lambda line: None)
    return str(folder / "model")


def with_dropout(model: Path, folder: Path, probability: float) -> str:
    """Copy the folder of a model, with dropout. Return the new folder."""
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"attention_dropout": probability}))
    return str(folder)


@pytest.mark.parametrize("name", without(CASES, IN_OTHER_CASES))
def test_losses_of_one_process(pool: Pool, base: dict[str, Any], tmp_path: Path, name: str) -> None:
    """The last step of each epoch has too few rows for some of the ranks."""
    settings = base | CASES[name]
    world = settings.pop("world", 2)
    if dropout := settings.pop("attention_dropout", 0):
        settings["model_name_or_path"] = with_dropout(Path(settings["model_name_or_path"]), tmp_path / "model", dropout)
    if settings["objective"] == "dpo":
        settings |= pairs(tmp_path)
    if settings["objective"] == "pretrain":
        texts = [{"text": "The keeper counts the stars. " * (1 + n % 4)} for n in range(14)]
        settings |= {
            "datasets": [{"path": str(tiny.write_jsonl(tmp_path / "texts.jsonl", texts))}],
            "sample_prompts": None,
        }
        settings = {name: value for name, value in settings.items() if not name.startswith("sample_")}
    if settings.get("adapter_name_or_path"):
        settings["adapter_name_or_path"] = adapters_of_one_process(settings, tmp_path / "made")
    folders = pool.run(world, run_as_rank, world, settings | {"output_dir": str(tmp_path / "ranks")})
    assert folders == [str(tmp_path / "ranks")] * world
    rows = settings["per_device_train_batch_size"] * world
    alone = {name: value for name, value in settings.items() if not name.startswith("dp_")}
    alone |= {"per_device_train_batch_size": rows, "output_dir": str(tmp_path / "one")}
    horizon_lm.train(alone, print_fn=lambda line: None)
    assert_same(tmp_path / "ranks", tmp_path / "one")
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("ranks", "one")]
    assert files[0] == files[1]


def test_own_loss_of_a_rank_without_rows(pool: Pool, base: dict[str, Any], tmp_path: Path) -> None:
    """The second step of an epoch has two of its eleven rows, and so one of three ranks has none."""
    answers = [{"instruction": f"Night {n}?", "output": "The keeper counts. " * (1 + n % 4)} for n in range(11)]
    settings = base | {"datasets": str(tiny.write_jsonl(tmp_path / "rows.jsonl", answers)), "max_steps": 2}
    settings |= {"output_dir": str(tmp_path / "ranks")}
    pool.run(3, run_as_rank, 3, settings, (), mean_of_targets)
    rows = 3 * settings["per_device_train_batch_size"]
    alone = settings | {"per_device_train_batch_size": rows, "output_dir": str(tmp_path / "one")}
    horizon_lm.train(alone, objective=mean_of_targets, print_fn=lambda line: None)
    ranks, one = (
        [line["loss"] for line in resuming.untimed(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("ranks", "one")
    )
    assert len(ranks) == 2
    assert ranks == pytest.approx(one, rel=1e-5)


def not_finite_on_second(model: Any, batch: Any) -> Any:
    return mean_of_targets(model, batch)[0] * (float("nan") if os.environ["RANK"] == "1" else 1.0)


def rejected_step(rank: int, world: int, settings: dict[str, Any]) -> str:
    with pytest.raises(NonFiniteError) as error:
        run_as_rank(rank, world, settings, objective=not_finite_on_second)
    return str(error.value)


def test_the_rows_of_a_loss_that_is_not_finite_on_one_rank(pool: Pool, base: dict[str, Any], tmp_path: Path) -> None:
    """All ranks know whose rows they are, and the file has those of all ranks, these first."""
    settings = base | {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 2}
    messages = pool.run(2, rejected_step, 2, settings)
    assert all("step 1: the loss is nan. It comes from the rows of rank 1." in message for message in messages)
    places = messages[0].rpartition("check the rows of this step: ")[2].split(", ")
    assert messages[1].endswith(", ".join(places))
    file = json.loads((tmp_path / "run" / "bad-batches" / "step-1.json").read_text())
    assert len(places) == file["num_rows"] == 4
    assert [row["place"] for row in file["rows"]] == [*places[2:], *places[:2]]


def failing_on_first(rank: int, world: int, settings: dict[str, Any]) -> tuple[str, list[bool]]:
    """Train until a callback fails on the first rank. Return the error, and whether the callback was on the first rank, step by step."""
    seen = []

    class OfFirst(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(state.is_world_process_zero)
            if state.is_world_process_zero and state.global_step == 2:
                raise OSError("no room")

    with pytest.raises((OSError, InterruptedRunError)) as error:
        run_as_rank(rank, world, settings, [OfFirst()])
    return f"{type(error.value).__name__}: {error.value}", seen


def test_a_callback_that_fails_on_one_rank_ends_all(pool: Pool, base: dict[str, Any], tmp_path: Path) -> None:
    """It knows which rank is the first, as callbacks do that write files."""
    settings = base | {"per_device_train_batch_size": 1, "save_strategy": "epoch", "output_dir": str(tmp_path / "run")}
    (of_first, seen), (of_second, seen_by_second) = pool.run(2, failing_on_first, 2, settings)
    assert (seen, seen_by_second) == ([True, True], [False, False])
    assert of_first == "OSError: no room"
    assert of_second.startswith("InterruptedRunError: rank 0 has failed: OSError: no room")
    assert (tmp_path / "run" / "checkpoint-2" / "manifest.json").is_file()


def test_runs_go_on_with_other_numbers_of_ranks(pool: Pool, base: dict[str, Any], tmp_path: Path) -> None:
    """A signal to one rank of four saves and ends all; two go on, then three, as one that was not interrupted."""
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    settings = base | saving | {"per_device_train_batch_size": 1, "output_dir": str(tmp_path / "ranks"), "max_steps": 8}
    for world, stop_after in ((4, 3), (2, 5)):
        for error in pool.run(world, interrupted, world, settings, stop_after):
            assert "by SIGTERM" in error
        assert (tmp_path / "ranks" / f"checkpoint-{stop_after}" / "manifest.json").is_file()
    pool.run(3, run_as_rank, 3, settings)
    alone = settings | {"per_device_train_batch_size": 4, "output_dir": str(tmp_path / "one")}
    horizon_lm.train(alone, print_fn=lambda line: None)
    assert_same(tmp_path / "ranks", tmp_path / "one", micro_batches=False)
    assert sorted(path.name for path in (tmp_path / "ranks").glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]


def test_torchrun(base: dict[str, Any], tmp_path: Path) -> None:
    """The command under torchrun: one folder, one set of lines, and no folder of another rank is left."""
    settings = base | {"per_device_train_batch_size": 2, "output_dir": str(tmp_path / "run"), "max_steps": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [*command, "-m", "horizon_lm", "train", str(tmp_path / "run.yaml")],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step 1/2") == 1
    assert not list((tmp_path / "tmp").glob("horizon-lm-rank-*"))
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("tokens", "unit", "ranks", "expected"),
    [
        ([5, 5, 5, 5], 1, 2, [2, 2]),
        ([100, 1, 1, 1, 1, 1], 1, 3, [1, 2, 2]),  # no more than two for each
        ([9, 9, 1, 1], 1, 2, [2, 2]),
        ([1, 1], 1, 4, [1, 1, 0, 0]),
        ([3] * 7, 2, 3, [2, 2, 3]),
        ([3], 1, 2, [1, 0]),
    ],
)
def test_rows_are_dealt(tokens: list[int], unit: int, ranks: int, expected: list[int]) -> None:
    parts = deal(tokens, unit, ranks)
    assert [row for part in parts for row in part] == list(range(len(tokens)))
    assert len(parts) == ranks
    if sum(expected) == len(tokens):
        assert list(map(len, parts)) == expected
    assert max(map(len, parts)) <= -(-len(tokens) // unit // ranks) * unit + unit
    assert all(part.start % unit == 0 for part in parts if part)


def rejected(rank: int, settings: dict[str, Any]) -> str:
    with pytest.raises(horizon_lm.errors.ConfigError) as error:
        run_as_rank(rank, 2, settings)
    return str(error.value)


def agreeing(rank: int) -> Machine:
    own = Machine(
        "a machine", False, None, [Limit("free", (8, 6)[rank])], [Limit("GPU", (3, 4)[rank])], [Limit("disk", (100, 1)[rank])],
        process_bytes=(1, 2)[rank], page_lock_error=("", "no")[rank],
    )  # fmt: skip
    return agree_on_machine(ProcessMesh(1, 2), own)


def test_ranks_plan_for_the_smallest_of_their_machines(pool: Pool) -> None:
    """The run's folder is on the disk of the first rank; the others have none."""
    first, second = pool.run(2, agreeing)
    assert first == second
    assert (first.host_limits[0].bytes, first.device_limits[0].bytes, first.disk_limits[0].bytes) == (
        6,
        3,
        100,
    )
    assert (first.process_bytes, first.page_lock_error) == (2, "no")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dp_shard_size": 3}, "dp_shard_size 3 does not divide the number of all processes, 2"),
        ({"dp_replicate_size": 3}, "does not divide the number of all processes, 2; set a dp_replicate_size that does"),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 2},
            "dp_replicate_size 2 x dp_shard_size 2 is not the number of processes, 2",
        ),
        ({"use_peft": True, "use_dora": True}, "use_dora is not supported with 2 processes"),
    ],
)
def test_bad_settings(pool: Pool, base: dict[str, Any], tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    for error in pool.run(2, rejected, base | settings | {"output_dir": str(tmp_path / "run")}):
        assert problem in error


def with_own_settings(rank: int, settings: dict[str, Any], own: list[dict[str, Any]]) -> str:
    with pytest.raises(horizon_lm.errors.ConfigError) as error:
        run_as_rank(rank, 2, settings | own[rank])
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("learning_rate", (1e-3, 2e-3)),
        ("precision", ("float32", "bf16")),
        ("seed", (1, 2)),
        ("max_steps", (6, 5)),
        ("per_device_train_batch_size", (1, 2)),
    ],
)
def test_other_settings_are_rejected(pool: Pool, base: dict[str, Any], tmp_path: Path, name: str, values: Any) -> None:
    """Machines may have run files of their own."""
    own = [{name: value, "output_dir": str(tmp_path / f"run{rank}")} for rank, value in enumerate(values)]
    for error in pool.run(2, with_own_settings, base, own):
        assert error == (
            f"{name} is {values[0]!r} for rank 0 and {values[1]!r} for rank 1; start all processes with the same run file"
        )


@pytest.mark.parametrize(("more", "named"), [(1, "(6 and 5)"), (0, "(5 each, with other content)")])
def test_other_rows_are_rejected(pool: Pool, base: dict[str, Any], tmp_path: Path, more: int, named: str) -> None:
    own = []
    for rank, answer in enumerate(("Stars.", "Rain.")):
        rows = [{"prompt": f"Night {n}? ", "completion": answer} for n in range(5 + rank * more)]
        file = tiny.write_jsonl(tmp_path / f"{rank}.jsonl", rows)
        own.append({"datasets": [{"path": str(file)}], "output_dir": str(tmp_path / f"run{rank}")})
    settings = {name: value for name, value in base.items() if not name.startswith(("test_", "eval_"))}
    for error in pool.run(2, with_own_settings, settings, own):
        assert f"training data: rank 1 has read other rows than rank 0 {named}" in error


def on_its_own_day(rank: int, settings: dict[str, Any]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "today", lambda: f"2030-01-0{1 + rank}")
        return run_as_rank(rank, 2, settings)


def test_ranks_that_start_at_midnight_have_one_date(pool: Pool, base: dict[str, Any], tmp_path: Path) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}" + tiny.CHATML)
    settings = base | {
        "chat_template_path": str(template),
        "output_dir": str(tmp_path / "run"),
        "save_strategy": "steps",
        "save_steps": 2,
    }
    pool.run(2, on_its_own_day, settings | {"max_steps": 3})
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "training_state.json").read_text())["state"]
    assert state["data"]["origin"]["date"] == "2030-01-01"


def num_tokenized(rank: int, cache: str, settings: dict[str, Any]) -> int:
    """Return how many rows a rank has tokenized itself. All of them are on one machine."""
    rows = 0
    own = tokenized_table._tokenize_rows

    def counted(batch: dict[str, list[Any]], *args: Any, **kwargs: Any) -> Any:
        nonlocal rows
        time.sleep(1)  # longer than the other rank takes to come here
        rows += len(next(iter(batch.values())))
        return own(batch, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenized_table, "_tokenize_rows", counted)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
        run_as_rank(rank, 2, settings)
    return rows


def test_rows_are_tokenized_once_on_each_machine(pool: Pool, base: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": f"{tmp_path.name} {n}? ", "completion": "The keeper counts the stars."} for n in range(8)]
    settings = {name: value for name, value in base.items() if not name.startswith(("test_", "eval_", "sample_"))} | {
        "datasets": [{"path": str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))}],
        "max_steps": 1, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    assert pool.run(2, num_tokenized, str(tmp_path / "cache"), settings) == [8, 0]


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_cannot_start_ends_the_other(base: dict[str, Any], tmp_path: Path, failing: int) -> None:
    """Something else than torchrun has started them, so the first process keeps the store through which they meet."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base | {"output_dir": str(tmp_path / "run")}))
    port = free_port()
    files = [tmp_path / ("missing.yaml" if rank == failing else "run.yaml") for rank in range(2)]
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    processes = [RunProcess(file, environment=environment_of(rank, 2, port) | alone) for rank, file in enumerate(files)]
    for each in processes:
        each.end()
    errors = [each.stderr for each in processes]
    missing = f"{tmp_path / 'missing.yaml'}: No such file"
    assert f"error: {missing}" in errors[failing]
    assert f"error: rank {failing} has failed: {missing}" in errors[1 - failing]


@pytest.mark.slow
@pytest.mark.parametrize("keeps_store", [0, 1])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [("missing.yaml", "missing.yaml"), ("run.yaml --dp_shards_size 2", "--dp_shards_size is not a setting")],
)
def test_a_machine_that_cannot_start_ends_the_other(
    base: dict[str, Any], tmp_path: Path, wrong: str, message: str, failing: int, keeps_store: int
) -> None:
    """torchrun numbers the machines in an order of its own, whichever keeps its store."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base | {"output_dir": str(tmp_path / "run"), "dp_shard_size": 2}))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    command.append(f"--rdzv-endpoint=localhost:{free_port()}")
    agents = [
        subprocess.Popen(
            [
                *command, f"--rdzv-conf=is_host={'true' if number == keeps_store else 'false'}", "-m", "horizon_lm", "train",
                *(wrong if number == failing else "run.yaml").split(),
            ],
            cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for number in range(2)
    ]  # fmt: skip
    errors = [error for _, error in outputs_of(agents, 60)]
    assert f"error: {message}" in errors[failing]
    assert errors[failing].count("error: ") == 1
    assert f" has failed: {message}" in errors[1 - failing]


@pytest.mark.slow
def test_an_error_of_all_processes_is_printed_once(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base | {"output_dir": str(tmp_path / "run")}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "horizon_lm"]
    for wrong in (["--learning_rat", "1"], ["--dp_shard_size", "3"], ["--datasets", "nowhere.jsonl"]):
        done = subprocess.run(
            [*command, "train", str(tmp_path / "run.yaml"), *wrong],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.count("error: ") == 1, done.stderr
