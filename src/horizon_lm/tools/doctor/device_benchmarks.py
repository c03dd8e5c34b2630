"""Benchmark the device and its link: matrix products, attention, elementwise operations, and copies."""

from dataclasses import dataclass
from statistics import harmonic_mean

import torch
from torch.nn import functional

from horizon_lm.device.base import Device
from horizon_lm.device.cpu import HostLink
from horizon_lm.memory.arena import Arena
from horizon_lm.model.float8.casting import cast_rows, multiply, multiply_gradients
from horizon_lm.planning.arithmetic.float8 import CAPABILITY
from horizon_lm.tools.doctor.timing import Rounds

# Number of tokens, input width and output width of each projection.
_CPU_PRODUCTS = ((1024, 576, 1536), (1024, 1536, 576), (1024, 2048, 2048))
_CUDA_PRODUCTS = ((8192, 4096, 14336), (8192, 14336, 4096), (8192, 8192, 8192))
_LAYERS = 4  # used alternately, so that not all of their tensors stay in a cache
_TINY_OPERATIONS = 1000


def matmul_rate(device: torch.device, dtype: torch.dtype, rounds: Rounds) -> float:
    """Return the operations per second of a projection: one product in the forward pass, two in the backward pass.

    This is the harmonic mean over several shapes, because small models have small products.
    """
    shapes = ((64, 96, 128),) if rounds.quick else _CUDA_PRODUCTS if device.type == "cuda" else _CPU_PRODUCTS
    rates: list[float] = []
    for tokens, columns_in, columns_out in shapes:
        operations = _LAYERS * 3 * 2.0 * tokens * columns_in * columns_out
        if rates and rounds.too_long(operations / rates[-1]):  # on a CPU without native support for the dtype
            break
        inputs, weights, grads = (
            [torch.randn(size, device=device, dtype=dtype) for _ in range(_LAYERS)]
            for size in ((tokens, columns_in), (columns_out, columns_in), (tokens, columns_out))
        )

        def compute(inputs: list = inputs, weights: list = weights, grads: list = grads) -> None:
            for x, weight, grad in zip(inputs, weights, grads, strict=True):
                x @ weight.t()
                grad @ weight
                grad.t() @ x

        rates.append(operations / rounds.median(compute, device))
    return harmonic_mean(rates)


def float8_rate(device: torch.device, rounds: Rounds) -> float:
    """Return the operations per second of a projection's products in FP8: its output, and the gradient of its input; 0 if the device has
    none. The operands are cast beforehand. This is the harmonic mean over several shapes.
    """
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < CAPABILITY):
        return 0.0
    shapes = ((64, 96, 128),) if rounds.quick else _CUDA_PRODUCTS if device.type == "cuda" else _CPU_PRODUCTS
    rates: list[float] = []
    for tokens, columns_in, columns_out in shapes:
        operations = _LAYERS * 2 * 2.0 * tokens * columns_in * columns_out
        if rates and rounds.too_long(operations / rates[-1]):
            break
        inputs, weights, columns, grads = (
            [cast_rows(torch.randn(size, device=device, dtype=torch.bfloat16)) for _ in range(_LAYERS)]
            for size in (
                (tokens, columns_in), (columns_out, columns_in), (columns_in, columns_out), (tokens, columns_out),
            )
        )  # fmt: skip

        def compute(
            inputs: list = inputs, weights: list = weights, columns: list = columns, grads: list = grads
        ) -> None:
            for x, weight, transpose, grad in zip(inputs, weights, columns, grads, strict=True):
                multiply(x, weight, torch.bfloat16)
                multiply_gradients(grad, transpose, torch.bfloat16)

        rates.append(operations / rounds.median(compute, device))
    return harmonic_mean(rates)


def attention_rate(device: torch.device, dtype: torch.dtype, rounds: Rounds) -> float:
    """Return the operations per second of fused causal attention in the forward and backward pass.

    Operations are counted as in the FlashAttention papers: 2 x tokens x length x width in the forward pass, half the
    number without a mask, and 2.5 times as many in the backward pass. This is the harmonic mean over several lengths.
    """
    heads, width, tokens, lengths = (
        (32, 128, 8192, (4096,)) if device.type == "cuda" else (9, 64, 1024, (256, 512, 1024))
    )
    if rounds.quick:
        heads, width, tokens, lengths = 2, 32, 128, (64,)
    rates = []
    for length in lengths:
        query, key, value, grad = (
            torch.randn(tokens // length, heads, length, width, device=device, dtype=dtype) for _ in range(4)
        )
        inputs = [each.requires_grad_() for each in (query, key, value)]

        def attend(inputs: list = inputs, grad: torch.Tensor = grad) -> None:
            query, key, value = inputs
            output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(output, inputs, grad)

        operations = 3.5 * 2.0 * tokens * length * heads * width
        rates.append(operations / rounds.median(attend, device))
    return harmonic_mean(rates)


def elementwise_bandwidth(device: torch.device, rounds: Rounds) -> float:
    """Return the bytes per second that elementwise operations read and write: x * y, x + y and silu(x).

    A CPU computes in float32, as the engine does on a CPU; a GPU in bf16, on tensors larger than its caches.
    """
    shape, dtype = ((16384, 8192), torch.bfloat16) if device.type == "cuda" else ((1024, 1536), torch.float32)
    if rounds.quick:
        shape = (128, 256)
    layers = [[torch.randn(shape, device=device, dtype=dtype) for _ in range(2)] for _ in range(_LAYERS)]

    def operate() -> None:
        for x, y in layers:
            x * y
            x + y
            functional.silu(x)

    # Tensors that are read and written: three by x * y and by x + y, two by silu.
    num_bytes = len(layers) * (3 + 3 + 2) * layers[0][0].numel() * dtype.itemsize
    return num_bytes / rounds.median(operate, device)


def operation_seconds(device: torch.device, rounds: Rounds) -> float:
    """Return the seconds of a tiny elementwise operation, in a forward pass with autograd and its backward pass.

    Many operations are enqueued together, so on a GPU this is the launch time.
    """
    start = torch.ones(8, device=device, requires_grad=True)
    factor = torch.ones(8, device=device)
    grad = torch.ones(8, device=device)

    def operate() -> None:
        value = start
        for _ in range(_TINY_OPERATIONS):
            value = value * factor
        torch.autograd.grad(value, start, grad)

    return rounds.median(operate, device) / (2 * _TINY_OPERATIONS)


_BLOCK_PARAMETERS = 3_540_096  # of a block of SmolLM2-135M
_NUM_BLOCKS = 16  # together too large for any cache
_CUDA_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Transfer rates in bytes per second, in the host's dtype: to the device, back, and in both directions together."""

    copy_in: float
    copy_out: float
    both: float


def link_rates(device: Device, rounds: Rounds) -> LinkRates:
    """Return the transfer rates of an open device's link."""
    return _cuda_link_rates(device, rounds) if device.torch_device.type == "cuda" else _cpu_link_rates(rounds)


def _cpu_link_rates(rounds: Rounds) -> LinkRates:
    """Return the rates of inline copies: weights widened from bf16 to fp32, and gradients landed in bf16 and squared.

    Copies run in one thread and never overlap, so ``both`` is the rate of consecutive copies.
    """
    size, num_blocks = (_BLOCK_PARAMETERS // 16, 4) if rounds.quick else (_BLOCK_PARAMETERS, _NUM_BLOCKS)
    arena = Arena(2 * num_blocks * 2 * size + 2 * num_blocks * 4096)  # with room to align each slab to a page
    weights = [arena.take(size, torch.bfloat16).fill_(1.0) for _ in range(num_blocks)]
    grads = [arena.take(size, torch.bfloat16).fill_(1.0) for _ in range(num_blocks)]
    slots = [torch.ones(size) for _ in range(2)]
    link = HostLink()

    def copy_in() -> None:
        for number, block in enumerate(weights):
            link.copy(slots[number % 2], block)

    def copy_out() -> None:
        for number, block in enumerate(grads):
            link.land(block, slots[number % 2], add=False)

    num_bytes = 2.0 * size * num_blocks
    to_device, back = (num_bytes / rounds.median(work) for work in (copy_in, copy_out))
    return LinkRates(copy_in=to_device, copy_out=back, both=2 / (1 / to_device + 1 / back))


def _cuda_link_rates(device: Device, rounds: Rounds) -> LinkRates:
    """Return the rates of copies of registered memory (page-locked if possible), with one stream for each direction."""
    where, num_bytes = device.torch_device, 2**20 if rounds.quick else _CUDA_BYTES
    on_host = [device.host_buffer(num_bytes).zero_() for _ in range(2)]
    on_device = [torch.zeros(num_bytes, dtype=torch.uint8, device=where) for _ in range(2)]
    streams = [torch.cuda.Stream(where) for _ in range(2)]

    def copy_in() -> None:
        with torch.cuda.stream(streams[0]):
            on_device[0].copy_(on_host[0], non_blocking=True)

    def copy_out() -> None:
        with torch.cuda.stream(streams[1]):
            on_host[1].copy_(on_device[1], non_blocking=True)

    def copy_both() -> None:
        copy_in()
        copy_out()

    seconds_in, seconds_out, seconds_both = (rounds.median(work, where) for work in (copy_in, copy_out, copy_both))
    return LinkRates(num_bytes / seconds_in, num_bytes / seconds_out, 2 * num_bytes / seconds_both)
