"""What torch's caching allocator would reserve on a card, without one.

`python -m tools.reserved` prints the table: each engine trains a model (`models`) on a card that does not exist
(`card`), whose memory is that of a model of the allocator (`allocator`).
"""
