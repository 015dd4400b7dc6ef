"""The benchmark behind `tools/bench`: flatfsdp, torch's own engines and a process without communication."""
