"""Helpers that tests of several folders share: tiny models, devices of their own, disks that fail, and checks."""
