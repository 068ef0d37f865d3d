"""What attacks can reach, what they prove when they succeed, and whether a mechanism is sound.

Nothing of the guarantee depends on this: it judges the guarantee from outside. Read in this order:

1. `tradeoff`     what any attack can reach against a plan, as a ROC curve
2. `lower`        what an attack that succeeds proves: lower bounds on epsilon
3. `checks`       whether a mechanism does what the ledger says, from what canaries saw
4. `lower_noise`  lower bounds for those who believe that the noise is Gaussian
"""
