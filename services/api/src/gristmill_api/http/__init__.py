"""HTTP machinery that both protocols use.

fast_route       routes that skip FastAPI's dependency tree
error_handlers   turns an exception into the error response of the route's protocol
content_coding   gzip for Atropos' JSON
body_limit       bounds the size of request bodies and the memory that they take together
framing          the format of a leased batch
"""
