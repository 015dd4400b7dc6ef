"""Programs of other frameworks, which support torch's FSDP1 only; run by test_frameworks."""
