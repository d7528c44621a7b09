"""PBKV (arXiv 2605.06472): evict and prefetch by predicted reuse of agents.

``forecast`` says what a predictor is, ``markov`` and ``simple`` hold those that need no training, ``policy`` turns
forecasts into scores and prefetches.
"""
