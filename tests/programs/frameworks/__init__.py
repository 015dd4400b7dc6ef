"""Programs of other frameworks that are written for FSDP1 or FSDP2; `tests.harness.programs` runs each of
them on torch's and under `flatfsdp.as_torch`, and compares their results. `cases` lists them."""
