"""Run modules with other tensors as parameters, look up embeddings, and compute log-probabilities and statistics from logits."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from horizon_lm.model.compiling import compile_function, mark_varying

Place = tuple[nn.Module, str, Any]  # module, name of its parameter, tensor


@contextmanager
def in_place(places: Iterable[Place]) -> Iterator[None]:
    """Context manager: put these tensors into the places of parameters of modules."""
    places = list(places)
    before = [(module, name, module._parameters[name]) for module, name, _ in places]
    for module, name, tensor in places:
        module._parameters[name] = tensor
    try:
        yield
    finally:
        for module, name, param in before:
            module._parameters[name] = param


_TRIAL_SHAPE = (4, 8)  # shape (V, H) of a small table


def look_up(
    module: nn.Module, weight: torch.Tensor, positions: torch.Tensor, padding_position: int | None
) -> torch.Tensor:
    """Return the embedding of tokens whose rows are ``weight[positions]``, (B, T, H) for positions (B, T).

    Args:
        module: embedding module, which may scale the rows.
        weight: rows of the table that the batch reads, (R, H), on the device.
        positions: index of each token's row.
        padding_position: row of the padding token, whose gradient is zero; None if it is not among the rows.
    """
    padding_token: Any = getattr(module, "padding_idx", None)
    if padding_token is not None:
        module.padding_idx = padding_position  # type: ignore[assignment]
    try:
        with in_place([(module, "weight", weight)]):
            hidden: torch.Tensor = type(module).forward(module, positions)
        return hidden
    finally:
        if padding_token is not None:
            module.padding_idx = padding_token


def is_linear(module: nn.Module) -> bool:
    """Return whether the gradient of a lookup in an embedding is the same for any values of its table, determined by a trial."""
    if type(module) is nn.Embedding:
        return True
    positions = torch.arange(_TRIAL_SHAPE[0])[None]
    generator = torch.Generator().manual_seed(0)
    tables = [torch.zeros(_TRIAL_SHAPE), torch.randn(_TRIAL_SHAPE, generator=generator)]
    grad = torch.randn((1, *_TRIAL_SHAPE), generator=generator)
    try:
        first, second = (_gradient(module, table, positions, grad) for table in tables)
    except Exception:  # the embedding requires other sizes: assume that the values matter
        return False
    return torch.equal(first, second)


def _gradient(module: nn.Module, table: torch.Tensor, positions: torch.Tensor, grad: torch.Tensor) -> Any:
    """Return the gradient of a table (V, H), given the gradient of the embedding of all positions."""
    table.requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(look_up(module, table, positions, None), table, grad)[0]


def logprobs_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, names: Sequence[str], compiled: bool = False
) -> list[torch.Tensor]:
    """Return per-token values (n,), one tensor for each name.

    Compiled code makes no tensor (n, V) but the gradient of the logits.

    Args:
        logits: logits (n, V).
        labels: labels (n,), none of them ignored.
        temperature: divisor of the logits.
        names: ``logprobs`` of the labels, ``mean`` log-probability over the vocabulary, ``entropy`` in nats; and, without
            gradients, ``mean_logits`` over the vocabulary, ``log_sum_sq_probs`` (log of the sum of squared
            probabilities), and ``is_top1`` (1 where the label has the largest logit).
        compiled: use compiled code.
    """
    if compiled:
        _mark_tokens(logits, labels)
        return list(compile_function(logprobs_of_logits)(logits, labels, temperature, names))
    scaled = logits.float() / temperature if temperature != 1 else logits.float()
    logs = torch.log_softmax(scaled, dim=-1)
    compute = {
        # Not `gather`, whose gradient is a tensor (n, V) of its own in compiled code.
        "logprobs": lambda: -F.nll_loss(logs, labels, reduction="none"),
        "mean": lambda: logs.mean(-1),
        "entropy": lambda: -(logs.exp() * logs).sum(-1),
        "mean_logits": lambda: scaled.detach().mean(-1),
        "log_sum_sq_probs": lambda: torch.logsumexp(2 * logs.detach(), dim=-1),
        "is_top1": lambda: (scaled.detach().argmax(-1) == labels).float(),
    }
    return [compute[name]() for name in names]


STATISTICS = ("entropy", "is_top1")
_CACHED_LOGITS = 2**21  # logits of a piece on a CPU, 8 MiB in float32: few enough for its cache


@torch.no_grad()
def token_statistics(logits: torch.Tensor, labels: torch.Tensor, compiled: bool = False) -> dict[str, torch.Tensor]:
    """Return the `STATISTICS` of tokens, float32 (N,) each, without a graph.

    They take no more memory on an accelerator than the backward pass of the loss: compiled code makes no tensor (N, V). Without
    it, the loss takes at least 6 more bytes a logit, and each half of the tokens is computed by itself, with at most two tensors
    (N / 2, V). A CPU computes pieces that fit into its cache instead.

    Args:
        logits: logits (N, V).
        labels: labels (N,), none of them ignored.
        compiled: use compiled code.

    Returns:
        ``entropy`` in nats; ``is_top1``, 1 where the label has the largest logit.
    """
    logits = logits.detach()
    if compiled:
        _mark_tokens(logits, labels)
        return dict(compile_function(_fused_statistics)(logits, labels))
    num_tokens, vocabulary = logits.shape
    half = -(-num_tokens // 2)
    size = max(1, _CACHED_LOGITS // vocabulary if logits.device.type == "cpu" else half)
    pieces = [_statistics(*piece) for piece in zip(logits.split(size), labels.split(size), strict=True)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in STATISTICS}


def _mark_tokens(logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Mark that the number of tokens varies, of logits (N, V) and labels (N,)."""
    for tensor in (logits, labels):
        mark_varying(tensor, [0])


def _fused_statistics(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the same as `_statistics`, by operations that torch.compile computes without a tensor (N, V)."""
    logs = torch.log_softmax(logits, -1, dtype=torch.float32)
    # A logit of -inf gives 0 * -inf, which is NaN here and 0 in the sum.
    return {"entropy": -(logs.exp() * logs).nansum(-1), "is_top1": (logits.argmax(-1) == labels).float()}


def _statistics(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the `STATISTICS` (N,) of tokens, from logits (N, V) and labels (N,)."""
    largest, top = logits.max(-1)  # (N,) each; on a CPU in half the time of argmax
    probs = torch.softmax(logits, -1, dtype=torch.float32)  # (N, V)
    # The largest probability is at least 1 / V, so its logarithm is finite, and gives that of the softmax's denominator.
    log_sum = largest.float() - probs.amax(-1).log()
    # entropy = -sum p log p = log_sum - sum p z, in place, since another (N, V) would double the memory. A logit of -inf
    # gives 0 * -inf, which is NaN here and 0 in the sum.
    entropy = log_sum - probs.mul_(logits).nansum(-1)
    return {"entropy": entropy, "is_top1": (top == labels).float()}
