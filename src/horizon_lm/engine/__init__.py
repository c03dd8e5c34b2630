"""Stream a model through a device: run the schedule of each pass under autograd and Hugging Face's forward method.

The folders stand on each other, and each imports only from those below it:

- ``opening``: from a name, a folder or a model in memory to a streamed model;
- ``calls``: one call of the model;
- ``units``: the computation of the embedding, a block or the head, and its gradients;
- ``passes``: the engine, its buffers, and the schedule of a forward and a backward pass;
- ``host``: host memory as autograd and other code see it.

``streamed.py`` leads from a model to its engine. ``docs/architecture.md`` has a picture and a glossary.

Shapes in this package: B batch rows, T tokens of a row, N tokens of a chunk, H hidden size, D head size, V vocabulary, R
distinct rows of the embedding.
"""
