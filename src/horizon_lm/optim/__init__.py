"""Optimizers on the CPU, over weights, gradients and moments in host memory; `memory.kernels.updates` computes and rounds."""
