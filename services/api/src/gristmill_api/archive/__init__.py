"""Acked groups go to disk: the archiver takes them from Redis, the writer appends them to segments."""
