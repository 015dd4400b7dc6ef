"""What torch's caching allocator would reserve on a card, without one.

`python -m tools.reserved` prints the table: each engine trains a GPT of 1B parameters on a card that does not exist
(`fake_cuda`), whose memory is that of a model of the allocator (`allocator`).
"""
