"""Every argument of transformers' methods, by its signature, docstring or source, is honoured, ignored or rejected, as a table says."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

import peft
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

import horizon_lm
from horizon_lm.engine.opening.hf_arguments import FROM_PRETRAINED, HONOURED, IGNORED, SAVE_PRETRAINED, Unsupported
from horizon_lm.errors import ConfigError, IgnoredArgumentWarning, StreamingError
from tests.seams.use import evaluated
from tests.support import tiny_models


def documented(function: Callable[..., Any]) -> set[str]:
    """Return the arguments of a function: of its signature, its docstring, and those that its source takes out of ``kwargs``."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    named = (
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    )
    found = {each.name for each in named} | set(re.findall(r"^ {12}(\w+) ?\(`", function.__doc__ or "", re.MULTILINE))
    return (found | set(_taken(function))) - {"self", "cls", "kwargs", ""}


def _taken(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names that a function pops from ``kwargs``, also by a loop over a list of names."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("kwargs.pop", "kwargs.get"):
            yield str(ast.literal_eval(node.args[0])) if isinstance(node.args[0], ast.Constant) else ""
        if isinstance(node, ast.For) and "kwargs.pop" in ast.unparse(node) and isinstance(node.iter, ast.List):
            yield from (str(each.value) for each in node.iter.elts if isinstance(each, ast.Constant))


def test_all_arguments_of_from_pretrained_are_in_the_table() -> None:
    of_transformers = documented(PreTrainedModel.from_pretrained) | documented(_BaseAutoModelClass.from_pretrained)
    assert {
        "cache_dir",
        "device_map",
        "proxies",
        "_fast_init",
        "code_revision",
    } <= of_transformers  # all ways to find one
    assert of_transformers - FROM_PRETRAINED.keys() == set()


def test_all_arguments_of_save_pretrained_are_in_the_table() -> None:
    of_transformers = documented(PreTrainedModel.save_pretrained) | documented(PreTrainedModel.push_to_hub)
    assert {"max_shard_size", "repo_id", "tags", "distributed_checkpoint"} <= of_transformers
    assert of_transformers - SAVE_PRETRAINED.keys() == set()
    ours, theirs = (
        list(inspect.signature(cls.save_pretrained).parameters) for cls in (type(streamed()), PreTrainedModel)
    )
    named = [name for name in theirs if name != "kwargs"]
    assert ours[: len(named)] == named  # also by position


def streamed() -> Any:
    return horizon_lm.stream(tiny_models.build("llama"), precision="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_models.build("llama", seed=2).save_pretrained(path)
    return path


def opened(folder: Path, **arguments: Any) -> Any:
    return horizon_lm.from_pretrained(folder, "cpu", "float32", **arguments)


@pytest.mark.parametrize("name", [name for name, rule in FROM_PRETRAINED.items() if rule != HONOURED])
def test_from_pretrained_ignores_or_rejects(folder: Path, name: str) -> None:
    """Before any weight is read: values that change nothing are accepted, others rejected, or all are ignored."""
    rule, other = FROM_PRETRAINED[name], object()
    if rule == IGNORED:
        opened(folder, **{name: other})
        return
    assert isinstance(rule, Unsupported)
    for value in rule.neutral:
        assert rule.accepts(value)
    opened(folder, **{name: rule.neutral[-1]})
    with pytest.raises(ConfigError, match=rf"from_pretrained: {name}=.* is not supported by a streamed model: "):
        opened(folder, **{name: other})
    if False in rule.neutral:  # which 0 equals
        assert not rule.accepts(0)


@pytest.mark.parametrize("name", [name for name, rule in SAVE_PRETRAINED.items() if isinstance(rule, Unsupported)])
def test_save_pretrained_saves_whatever_it_is_given(name: str, tmp_path: Path) -> None:
    model = streamed()
    rule = SAVE_PRETRAINED[name]
    assert isinstance(rule, Unsupported)
    with pytest.warns(IgnoredArgumentWarning, match=f"{name}=.* has no effect"):
        model.save_pretrained(tmp_path, **{name: not rule.neutral[-1]})
    assert evaluated(opened(tmp_path)) == pytest.approx(evaluated(model), rel=1e-6)


def test_names_of_the_model_and_the_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    taken: dict[str, Any] = {}

    def snapshot(name: str, **download: Any) -> str:
        taken.update(download, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    horizon_lm.from_pretrained("a/model", "cpu", revision="r", cache_dir="c", use_auth_token="t", local_files_only=True)
    assert (taken["name"], taken["revision"], taken["cache_dir"], taken["token"]) == ("a/model", "r", "c", "t")


def test_the_name_and_a_config_elsewhere(folder: Path, tmp_path: Path) -> None:
    model = horizon_lm.from_pretrained(pretrained_model_name_or_path=folder, device="cpu", precision="float32")
    model.config.attention_dropout = 0.25
    model.config.save_pretrained(tmp_path)
    other = opened(folder, config=str(tmp_path))
    assert other.config.attention_dropout == 0.25
    assert evaluated(other) == evaluated(model)
    for wrong in ({}, {"pretrained_model_name_or_path": None}):
        with pytest.raises(ConfigError, match=r"needs a folder or hub id; horizon_lm\.from_config"):
            horizon_lm.from_pretrained(device="cpu", **wrong)


def test_the_generation_config_of_the_call_is_used(folder: Path) -> None:
    given = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    model = opened(folder, generation_config=given)
    assert model.generation_config.max_new_tokens == 3
    assert model.generation_config is not given
    assert model.generate(tiny_models.batch(rows=1, padding="none")["input_ids"]).shape[1] == 11 + 3


def test_uploads_get_all_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import HfApi

    calls: dict[str, Any] = {}

    class Url:
        repo_id = "me/model"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **given: calls.update(create=(name, given)) or Url())
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **given: calls.update(upload=given, token=self.token))
    monkeypatch.setattr(huggingface_hub, "metadata_update", lambda repo, data, **given: calls.update(tags=data))
    told = {"commit_message": "end", "commit_description": "all", "create_pr": True, "revision": "branch"}
    streamed().save_pretrained(tmp_path, push_to_hub=True, repo_id="model", private=True, token="t", tags=["a"], **told)
    assert calls["create"] == ("model", {"private": True, "exist_ok": True})
    assert calls["upload"] == {"repo_id": "me/model", "folder_path": tmp_path, **told}
    assert (calls["token"], calls["tags"]) == ("t", {"tags": ["a"]})


def test_a_value_of_another_shape_does_not_lose_a_training(tmp_path: Path) -> None:
    model = streamed()
    with pytest.warns(UserWarning, match=r"state_dict has lm_head.weight of shape \(3,\).*own weight was written"):
        model.save_pretrained(tmp_path, state_dict=model.state_dict() | {"lm_head.weight": torch.zeros(3)})
    assert evaluated(opened(tmp_path)) == pytest.approx(evaluated(model), rel=1e-6)


PEFT: dict[str, Any] = {
    "safe_serialization": False, "selected_adapters": ["default"], "save_embedding_layers": True, "is_main_process": True,
    "path_initial_model_for_weight_conversion": None, "state_dict": None, "save_function": torch.save,
}  # fmt: skip


def test_all_arguments_of_pefts_save_pretrained(tmp_path: Path) -> None:
    """PEFT's own method runs; the folders have the same files."""
    assert documented(peft.PeftModel.save_pretrained) - PEFT.keys() == {"save_directory"}
    files: list[Any] = []
    for kind, model in (("plain", tiny_models.build("llama")), ("streamed", streamed())):
        tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        for name, value in PEFT.items():
            tuned.save_pretrained(tmp_path / kind / name, **{name: value})
        files.append(sorted(path.relative_to(tmp_path / kind).as_posix() for path in (tmp_path / kind).rglob("*")))
    assert files[0] == files[1]


def _generated(model: Any, arguments: dict[str, Any]) -> Any:
    """Return what a model generates, or the class of the error that it raises."""
    ids = tiny_models.batch(rows=1, padding="none")["input_ids"]
    torch.manual_seed(0)
    try:
        found = model.generate(
            ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "pad_token_id": 0} | arguments
        )
    except Exception as error:
        return type(error)
    return (found if isinstance(found, torch.Tensor) else found.sequences).tolist()


# By name, a value for ``generate``, in place of another value than its default where that changes the tokens.
GENERATE: dict[str, Any] = {
    "_from_model_config": False, "assistant_confidence_threshold": 0.3, "assistant_early_exit": 1, "assistant_ensemble_weight": None,
    "assistant_lookbehind": 3, "bad_words_ids": [[5]], "begin_suppress_tokens": [7], "bos_token_id": 1, "cache_config": None,
    "cache_implementation": "static", "compile_config": None, "constraints": None, "continuous_batching_config": None,
    "decoder_start_token_id": 1, "disable_compile": True, "diversity_penalty": 0.0, "do_sample": True, "dola_layers": "low",
    "early_stopping": True, "encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.5, "eos_token_id": 3,
    "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "exponential_decay_length_penalty": (1, 1.5), "force_words_ids": [[3]],
    "forced_bos_token_id": 4, "forced_eos_token_id": 4, "guidance_scale": 1.5, "is_assistant": False, "length_penalty": 2.0,
    "low_memory": False, "max_cache_len": 32, "max_length": 15, "max_matching_ngram_size": 2, "max_new_tokens": 3, "max_time": 60.0,
    "min_length": 13, "min_new_tokens": 2, "min_p": 0.1, "no_repeat_ngram_size": 2, "num_assistant_tokens": 2,
    "num_assistant_tokens_schedule": "constant", "num_beam_groups": 1, "num_beams": 3, "num_return_sequences": 2,
    "output_attentions": True, "output_hidden_states": True, "output_logits": True, "output_scores": True, "pad_token_id": 2,
    "penalty_alpha": 0.6, "prefill_chunk_size": 4, "prompt_lookup_num_tokens": 3, "remove_invalid_values": True,
    "renormalize_logits": True, "repetition_penalty": 1.3, "return_dict_in_generate": True, "sequence_bias": {(5,): 2.0},
    "speculation_type": None, "stop_strings": ["a"], "suppress_tokens": [9], "target_lookbehind": 3, "temperature": 0.7,
    "token_healing": True, "top_h": 0.4, "top_k": 5, "top_p": 0.8, "transformers_version": "5", "typical_p": 0.8, "use_cache": False,
    "use_mtp": True, "watermarking_config": {"bias": 2.0},
    # the signature of generate, and what its source takes out of kwargs
    "inputs": None, "generation_config": GenerationConfig(max_new_tokens=2), "logits_processor": [], "stopping_criteria": [],
    "prefix_allowed_tokens_fn": lambda batch, ids: [3, 4, 5], "synced_gpus": False, "assistant_model": None, "streamer": None,
    "negative_prompt_ids": None, "negative_prompt_attention_mask": None, "custom_generate": None, "trust_remote_code": None,
    "tokenizer": None, "assistant_tokenizer": None, "logits_to_keep": 1, "input_ids": None, "position_ids": None, "use_model_defaults": None,
}  # fmt: skip
_WITH: dict[str, dict[str, Any]] = {
    **{key: {"do_sample": True} for key in ("temperature", "top_h", "top_k", "top_p", "typical_p", "min_p", "epsilon_cutoff", "eta_cutoff")},
    **{key: {"num_beams": 2} for key in ("early_stopping", "length_penalty", "num_return_sequences", "force_words_ids")},
    "max_length": {"max_new_tokens": None}, "num_assistant_tokens": {"prompt_lookup_num_tokens": 3},
    "max_matching_ngram_size": {"prompt_lookup_num_tokens": 3},
    **{key: {"return_dict_in_generate": True} for key in ("output_scores", "output_logits", "output_hidden_states")},
}  # fmt: skip


@pytest.fixture(scope="module")
def generating() -> tuple[Any, Any]:
    return tiny_models.build("llama").eval(), streamed().eval()


def test_all_arguments_of_generate_are_in_the_table() -> None:
    inside = {"attention_mask", "past_key_values", "encoder_outputs", "mm_encoder_outputs", "inputs_tensor", "cache"}
    of_transformers = documented(PreTrainedModel.generate) if hasattr(PreTrainedModel, "generate") else set()
    of_transformers |= documented(type(tiny_models.build("llama")).generate) | set(GenerationConfig().to_dict())
    assert {"num_beams", "streamer", "prefill_chunk_size", "trust_remote_code"} <= of_transformers
    assert of_transformers - GENERATE.keys() - inside == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GENERATE)
def test_generate_does_what_a_plain_model_does(generating: tuple[Any, Any], name: str) -> None:
    """The same tokens, or the same error. Only drafts with some of the blocks are rejected."""
    plain, ours = (_generated(model, {name: GENERATE[name]} | _WITH.get(name, {})) for model in generating)
    assert ours == (StreamingError if name == "assistant_early_exit" else plain)
