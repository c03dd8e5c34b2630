"""The 4-bit formats of bitsandbytes: NF4 and FP4, with scales in float32 or quantized themselves (double quantization).

Sources: Dettmers et al., "QLoRA" (arXiv 2305.14314), and the layout of ``bitsandbytes.functional.QuantState``. A tensor is
flattened and cut into blocks; each block has one scale, its largest magnitude. Two codes share a byte, the first in its
upper half. NF4 costs 0.5 + 4 / 64 bytes a parameter, with double quantization 0.5 + 1 / 64 + 4 / (64 * 256).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from horizon_lm.common.ranges import pieces
from horizon_lm.memory.codecs.base import Codec, Component, Part

_NESTED_BLOCK = 256  # scales that share one scale
_AT_ONCE = 1 << 22  # elements that are quantized at once
_HALF_OF_STEPS = 32767.5  # half of the distance between the first and the last of 65,536 steps

# Quantiles of a normal distribution (QLoRA, appendix E), and the values of a sign, two exponent bits and one mantissa bit.
TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bnb4Bit(Codec):
    """A 4-bit format of bitsandbytes.

    Attributes:
        quant_type: ``nf4`` or ``fp4``.
        blocksize: elements that share a scale.
        nested: scales are quantized to 8 bits.
    """

    quant_type: str = "nf4"
    blocksize: int = 64
    nested: bool = False

    def components(self, shape: Sequence[int]) -> dict[str, Component]:
        blocks = -(-prod(shape) // self.blocksize)
        found = {"weight": Component(torch.Size(((prod(shape) + 1) // 2,)), torch.uint8)}
        found["absmax"] = Component(torch.Size((blocks,)), torch.uint8 if self.nested else torch.float32)
        found["quant_map"] = Component(torch.Size((16,)), torch.float32)
        if self.nested:
            found["nested_absmax"] = Component(torch.Size((-(-blocks // _NESTED_BLOCK),)), torch.float32)
            found["nested_quant_map"] = Component(torch.Size((256,)), torch.float32)
            found["nested_offset"] = Component(torch.Size((1,)), torch.float32)
        return found

    def parts(self, shape: Sequence[int], max_bytes: int) -> Iterator[Part]:
        # Groups begin where a scale begins, or with double quantization a scale of scales.
        group = self.blocksize * (_NESTED_BLOCK if self.nested else 1)  # elements
        group_bytes = group // 2 + group // self.blocksize * 4  # codes, and scales in 4 bytes at most
        whole = slice(None)
        for groups in pieces(-(-prod(shape) // group), max(1, max_bytes // group_bytes)):
            start, stop = groups.start * group, min(prod(shape), groups.stop * group)
            blocks = slice(start // self.blocksize, -(-stop // self.blocksize))
            rows = {"weight": slice(start // 2, (stop + 1) // 2), "absmax": blocks, "quant_map": whole}
            if self.nested:
                rows |= {"nested_absmax": groups, "nested_quant_map": whole, "nested_offset": whole}
            yield Part(start, stop, torch.Size((stop - start,)), rows)

    def decode_components(self, components: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Decode n values, each a table entry times the scale of its block.

        Shapes: weight (ceil(n / 2),), two codes a byte; quant_map (16,); absmax (ceil(n / blocksize),); out any of n elements.
        """
        codes, table = components["weight"], components["quant_map"]
        values = table[torch.stack((codes >> 4, codes & 15), dim=-1).int()].view(-1)[: out.numel()]  # (n,)
        scales = self.scales(components)  # (ceil(n / blocksize),)
        # The last block may have fewer values: padded, all blocks are rows of one matrix.
        padded = torch.nn.functional.pad(values, (0, scales.numel() * self.blocksize - values.numel()))
        padded = padded.view(-1, self.blocksize).mul_(scales[:, None])
        out.view(-1).copy_(padded.view(-1)[: out.numel()])

    def scales(self, components: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the scale of each block in float32, decoded if scales are quantized: each table entry times its outer scale, plus the mean."""
        if not self.nested:
            return components["absmax"]
        values = components["nested_quant_map"][components["absmax"].int()]
        outer = components["nested_absmax"].repeat_interleave(_NESTED_BLOCK)[: values.numel()]
        return values.mul_(outer).add_(components["nested_offset"])

    def encode_components(self, weight: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
        """Quantize a weight, some whole blocks at a time. For the shapes of components, see `decode_components`."""
        table = torch.tensor(TABLES[self.quant_type])
        components["quant_map"].copy_(table)
        flat, scales_of_parts = weight.reshape(-1), []
        step = self.blocksize * (_AT_ONCE // self.blocksize)
        for start in range(0, flat.numel(), step):  # a quantized copy of the whole would take 20 bytes an element
            codes, scales_of_part = _quantize(flat[start : start + step].float(), table, self.blocksize)
            codes = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
            components["weight"][start // 2 : (start + step) // 2].copy_(codes[:, 0] << 4 | codes[:, 1])
            scales_of_parts.append(scales_of_part)
        scales = torch.cat(scales_of_parts)
        if self.nested:
            _quantize_scales(scales, components)
        else:
            components["absmax"].copy_(scales)


def _quantize_scales(scales: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
    """Quantize scales, minus their mean, into components: 8-bit codes, and an outer scale for every 256."""
    offset, table = scales.mean(), dynamic_table()
    codes, outer = _quantize(scales - offset, table, _NESTED_BLOCK, in_steps=True)
    components["absmax"].copy_(codes)
    components["nested_absmax"].copy_(outer)
    components["nested_quant_map"].copy_(table)
    components["nested_offset"].copy_(offset)


def _quantize(
    values: torch.Tensor, table: torch.Tensor, blocksize: int, in_steps: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the code of each value, and the scale of each block of values: its largest magnitude. A code is the index of the table entry
    nearest to the value divided by its scale; with ``in_steps`` that quotient is rounded to one of 65,536 steps first, as in bitsandbytes.
    """
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % blocksize)).view(-1, blocksize)
    scales = blocks.abs().amax(dim=1)
    scaled = (blocks * (1.0 / scales)[:, None]).nan_to_num_(0.0).clamp_(-1.0, 1.0)
    if in_steps:
        scaled = ((scaled + 1.0) * _HALF_OF_STEPS + 0.5).floor_() / _HALF_OF_STEPS - 1.0
    ordered, order = table.sort(stable=True)
    middles_of_entries = (ordered[1:] + ordered[:-1]) / 2
    return order[torch.bucketize(scaled, middles_of_entries)].to(torch.uint8).view(-1)[: values.numel()], scales


def dynamic_table() -> torch.Tensor:
    """Return the 256 values of bitsandbytes' signed dynamic format: Dettmers et al. (arXiv 2110.02861), section 2.

    Each exponent has twice as many values as the one below it: the middles of equal parts of 0.1 to 1, times a power of ten.
    """
    values = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2**exponent + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        values += [10.0 ** (exponent - 6) * middles, -(10.0 ** (exponent - 6)) * middles]
    return torch.cat(values).sort().values
