"""What an adversary does with what they hold.

Fleets of shadow heads (Maciążek & Allison 2025, arXiv 2505.14323), in reading order:

1. `heads`       how one head is trained (`HeadRecipe`), and what it says about features
2. `chance`      all the randomness of a head, named by its number
3. `primal`      heads trained side by side, any recipe
4. `dual`        the same numbers for linear heads, many times faster
5. `fleet`       an endless, replayable sequence of heads
6. `shards`      heads on disk
7. `statistics`  mean and deviation of each weight
"""
