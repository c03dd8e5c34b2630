"""Constants that several packages share. Each is defined only here."""

import mmap

IGNORE_INDEX = -100
"""Label of a token without loss, as in torch.nn.functional.cross_entropy and in transformers."""

MOMENT_BLOCK = 256
"""Elements of an 8-bit moment that share an fp32 scale, as in Dettmers et al. (arXiv 2110.02861)."""

SLAB_ALIGNMENT = MOMENT_BLOCK
"""Elements to which each tensor in a slab is padded, so that several ranks can cut it between two blocks of 8-bit moments.
It is enough for vector loads, too."""

COMPONENT_ALIGNMENT = 16
"""Bytes to which each component of a quantized tensor is padded, for vector loads."""

PACKED_ALIGNMENT = 256
"""Bytes to which each quantized tensor in a slab is padded: enough for vector loads of a decoding kernel."""

PAGE = mmap.PAGESIZE
"""Bytes of a page of host memory, to which each slab is aligned."""

ORTHOGONALIZING_STEPS = 5
"""Steps of the iteration by which Muon orthogonalizes a matrix, as in torch.optim.Muon; each has three products."""

ORTHOGONALIZED_AT_ONCE = 1 << 27
"""Elements of experts that are orthogonalized together: enough for a GPU, in a gigabyte."""

COLLECTIVE_BYTES = 64 * 2**20
"""Bytes of the gradients of other ranks that a rank sums at once on its device."""

DEVICE_MARGIN = 0.05
"""Share of the device memory that is left to fragmentation in the framework's allocator."""

BATCHES_AHEAD = 2
"""Batches with images that a run holds besides the current one, each built by a thread of its own."""

LANGUAGE_MODEL = " (text)"
"""End of the name of the language model in a multimodal model that is known by name."""
