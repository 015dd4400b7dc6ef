"""Element-wise optimizers over original parameters that step on runs of a shard."""
