"""Commands beside a run, on which nothing else depends: doctor, report, translation of settings, GGUF files, merging."""
