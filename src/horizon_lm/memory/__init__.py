"""Host memory of a model: where its bytes lie, the slabs that hold them, their formats, and the compiled loops over them."""
