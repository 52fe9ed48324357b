"""From leased groups to the tensors of a forward pass: groups -> samples -> packed micro-batches."""
