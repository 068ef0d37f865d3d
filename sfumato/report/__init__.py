"""Quality, leakage, cost, and the pictures and pages that show them."""
