"""KVCMAS in SGLang: shared segments of an opted-in call are filled with corrected KV instead of being computed.

``manager`` decides and keeps what is needed, ``rows`` makes SGLang compute only the rest, ``namespace`` keeps what came
of it out of reach of exact calls, ``sources`` holds the caches that corrections start from, ``pool`` reads and writes
SGLang's KV pool, ``guard`` compares corrected calls with dense ones.
"""
