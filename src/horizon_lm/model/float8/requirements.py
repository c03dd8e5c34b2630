"""The GPUs that have products in FP8, and the messages about those that have none. A plan, which runs without torch, reads them, too."""

CAPABILITY = (8, 9)
"""The first compute capability with products in FP8: that of Ada. Hopper has 9.0, Blackwell 10.0 and 12.0."""
LEAVE_OUT = "leave products: plain"


def needs_capability(name: str, capability: str) -> str:
    """Return why a GPU of this name and compute capability has no products in FP8."""
    first = ".".join(map(str, CAPABILITY))
    return (
        f"products: float8 needs a GPU with compute capability {first} or later (Ada, Hopper, Blackwell); {name} has {capability}. "
        f"{LEAVE_OUT.capitalize()}"
    )


NEEDS_BFLOAT16 = (
    f"products: float8 needs weights in bfloat16 on a GPU; use precision fp32_master or bf16, or {LEAVE_OUT}"
)
