"""Uses of a streamed model by other code: each row works as on a plain model, or is rejected by name.

A row's body is run on a plain model and on a streamed one, and the returned values are compared (`seam.run`). A number that
differs, or an error that is not one of Horizon-LM's, fails whatever the row expects. docs/compatibility.md is generated from
the rows: python -m tests.seams.
"""
