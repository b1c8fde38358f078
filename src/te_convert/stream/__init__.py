"""Checkpoints converted shard by shard, without the model in memory, and back again."""
