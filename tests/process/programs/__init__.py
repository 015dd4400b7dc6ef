"""Programs of other people's frameworks, which know torch's FSDP1 only; run by test_frameworks."""
