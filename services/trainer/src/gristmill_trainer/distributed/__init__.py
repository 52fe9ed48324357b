"""Distributed training: torchrun starts several processes, and FSDP2 shards the model among them."""
