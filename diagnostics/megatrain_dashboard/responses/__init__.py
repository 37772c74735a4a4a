"""Parts that all responses share: bytes with an ETag, refusals, query parameters, arrays, downloads."""
