"""The guarantee: everything that stands between private images and what may be shared.

Read in this order; it takes about an hour:

1. `events`      one use of private data, as a fact (`Event`)
2. `accounting`  what a list of events costs: PLD, RDP, and the honest price of shuffling
3. `budget`      what is promised (`Budget`) and how it is spent (`Plan`, `make_plan`)
4. `ledger`      the append-only record of what was spent (`Ledger`)
5. `sampling`    the run's `Secret`, and Poisson batches as index chunks
6. `noise`       `privatize`: the only way from private sums to something releasable
7. `secure`      noise from a cryptographic stream, safe against floating-point attacks
8. `moments`     sums of clipped vectors, the simplest thing to release
9. `tradeoff`    what any attack can reach against all of this, as a ROC curve
10. `lower`      what an attack that succeeds proves: lower bounds on epsilon
11. `checks`     whether a mechanism does what the ledger says, from what canaries saw
12. `lower_noise`  lower bounds for whoever believes that the noise is Gaussian

This room knows tensors and numbers. It knows nothing of images, models or files.
"""
