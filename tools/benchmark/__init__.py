"""The benchmark behind `tools/bench`: flatfsdp beside torch's own engines and a process without communication."""
