"""Integrations that run code of other frameworks unchanged. They are imported only if a configuration uses them."""
