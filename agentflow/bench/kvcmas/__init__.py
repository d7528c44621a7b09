"""How well one agent's KV of a segment serves another: `agentflow bench kvcmas`."""
