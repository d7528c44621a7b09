"""Agent-aware policies on the runtime layer, chosen by name; ``docs/guides/policies.md`` lists them.

Order of precedence, lowest number first. In the engine: admission (10), fairness (20), shaping (30), then the cache
policies as they were chosen (100). In the framework, outermost first: safety (10), memo (20), speculation (30),
hedging (40).
"""
