"""PEFT's prompts around a streamed model, and inside of it: log-probabilities, gradients and losses of plain PEFT."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

import peft
from peft import get_peft_model
from torch.nn import functional as F

import horizon_lm
from horizon_lm.errors import ConfigError, ModelNotSupportedError, StreamingError, TokenError
from tests.seams.compare import difference
from tests.support import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore")
CAUSAL = {"task_type": "CAUSAL_LM"}
PROMPTS: dict[str, Callable[[], Any]] = {
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "encoder": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **CAUSAL),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": {"head_chunk_tokens": 4},
    "whole": {"head": "whole"},
    "micro-batches": {"device_micro_batch_size": 1},
}


def adapted(model: Any, config: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, config).eval()


def worlds(config: Callable[[], Any], **settings: Any) -> tuple[Any, list[Any]]:
    """Return a plain model with a prompt, and streamed ones whose prompt was added before and after."""
    plain, first, second = (tiny_models.build("llama") for _ in range(3))
    early = horizon_lm.stream(adapted(first, config()), precision="float32", **settings)
    return adapted(plain, config()), [
        early,
        adapted(horizon_lm.stream(second, precision="float32", **settings), config()),
    ]


def batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return arguments, and labels of which the first of some rows are trained: a prompt comes before them."""
    given = tiny_models.batch(padding="right")
    labels = given.pop("labels").clone()
    labels[0, :2] = -100
    return given, labels


def of_logits(model: Any, labels: torch.Tensor, **given: Any) -> torch.Tensor:
    """Return log-probabilities (B, P + T) of the labels (B, T), from all logits (B, P + T, V) of a plain model."""
    logs = torch.log_softmax(model(**given).logits, -1)
    targets = F.pad(labels, (logs.shape[1] - labels.shape[1], 1), value=-100)[:, 1:]
    return logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", PROMPTS)
def test_logprobs_of_a_model_with_a_prompt(kind: str, settings: str) -> None:
    """Each token is predicted from the prompt and the tokens before it, the first one from the prompt alone."""
    plain, models = worlds(PROMPTS[kind], **SETTINGS[settings])
    given, labels = batch()
    expected = of_logits(plain, labels, **given)
    weight = torch.linspace(0.5, 1.5, expected.numel()).view_as(expected)
    (expected * weight).sum().backward()
    assert (expected[:, 2] != 0).any()  # that of first tokens
    for model in models:
        got = horizon_lm.token_logprobs(model, labels=labels, **given).logprobs
        assert difference(expected.detach(), got.detach(), 1e-5) is None
        (got * weight).sum().backward()
        assert difference(gradients(plain), gradients(model), 2e-5) is None
        loss = plain(labels=labels, **given).loss
        assert -float(got.detach().sum()) / int((labels != -100).sum()) == pytest.approx(float(loss), rel=1e-5)


def test_prompts_that_are_switched_off() -> None:
    plain, (early, late) = worlds(PROMPTS["prompt"])
    given, labels = batch()
    with plain.disable_adapter(), late.disable_adapter(), torch.no_grad():
        expected = of_logits(plain, labels, **given)
        got = horizon_lm.token_logprobs(late, labels=labels, **given).logprobs
    assert difference(expected, got[:, : expected.shape[1]], 1e-5) is None
    with early.disable_adapter(), pytest.raises(StreamingError, match="add the prompt after stream"):
        horizon_lm.token_logprobs(early, labels=labels, **given)
    with early.disable_adapter(), pytest.raises(StreamingError):
        early(labels=labels, **given)


OTHERS: dict[str, Callable[[], Any]] = {
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "CPT": lambda: peft.CPTConfig(cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 1], **CAUSAL),
    "MULTITASK_PROMPT_TUNING": lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=3, num_tasks=2, **CAUSAL),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_prompts_are_rejected_by_name(kind: str) -> None:
    model = adapted(horizon_lm.stream(tiny_models.build("llama"), precision="float32"), OTHERS[kind]())
    given, labels = batch()
    with pytest.raises(ModelNotSupportedError, match=f"PEFT's {kind} is not streamed"):
        horizon_lm.token_logprobs(model, labels=labels, **given)


def test_shifted_labels_without_the_prompt_are_rejected() -> None:
    _, (_, late) = worlds(PROMPTS["prompt"])
    given, labels = batch()
    with pytest.raises(TokenError, match="labels have shape"):
        late(labels=labels, shift_labels=labels, **given)


def test_our_optimizer_of_a_prompt_around_the_model() -> None:
    _, (early, late) = worlds(PROMPTS["prompt"])
    horizon_lm.AdamW(early)
    with pytest.raises(ConfigError, match="a prompt that PEFT added after stream"):
        horizon_lm.AdamW(late, params=late.parameters())
