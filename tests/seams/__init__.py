"""Uses of a streamed model by other code: each row either works as on a plain model, or is rejected by name.

The body of a row is run on a plain model and on a streamed model, and the returned values are compared (`seam.run`). A
number that differs, or an error that does not come from Horizon-LM, fails regardless of the row's expectation.
docs/generated/compatibility.md is generated from the rows: python -m tests.seams.
"""
