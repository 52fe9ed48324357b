"""Several processes that train as one: torchrun starts them, FSDP2 shares the model out among them."""
