"""Formats of quantized weights: bytes in host memory that are decoded on the device."""
