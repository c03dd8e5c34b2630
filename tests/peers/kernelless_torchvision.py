"""Import torchvision beside the CPU wheel of torch, for processors of images and videos, which use no kernel of it."""

import importlib
import importlib.util
from unittest import mock

import torch


def import_torchvision() -> bool:
    """Return False if torchvision is not installed. The wheel's kernels need CUDA's libraries; without them, its operators do not exist."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    if torch.version.cuda is None:
        with mock.patch("torch.library.register_fake", return_value=lambda function: function):
            importlib.import_module("torchvision")
    return True
