"""What the HTTP API answers, one file a view: the contract with the page, and with programs.

Times are unix seconds (`_unix_s`), durations seconds (`_s`), ratios parts of one; null is "not known". A field is never
given another meaning: what changes gets another name.
"""
