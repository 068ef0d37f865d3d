"""How a model learns: one loop, and the steps it can take."""
