"""Checkpoints: durable before an ack of their groups, written atomically, and verified before use."""
