"""Stream a model through a device: run the schedule of each pass under autograd and Hugging Face's forward method.

``executor.py`` begins with a training step, line by line; ``docs/architecture.md`` has a picture and a glossary.

Shapes in this package: B batch rows, T tokens of a row, N tokens of a chunk, H hidden size, D head size, V vocabulary, R
distinct rows of the embedding.
"""
