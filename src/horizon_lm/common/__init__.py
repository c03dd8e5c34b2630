"""Code without torch that several packages share: units, ranges, sizes, paths, files, names and tables."""
