"""From holders to owners: who sends what to whom, in which order, in how much memory (pure)."""
