"""What to keep, drop and fetch: policies, the ledger of who used what, and the mathematics behind them."""
