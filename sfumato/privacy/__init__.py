"""The guarantee: everything that stands between private images and what may be shared.

Read in this order; it takes about an hour:

1. `events`      one use of private data, as a fact (`Event`)
2. `accounting`  what a list of events costs: PLD, RDP, and the honest price of shuffling
3. `budget`      what is promised (`Budget`) and how it is spent (`Plan`, `make_plan`)
4. `ledger`      the append-only record of what was spent (`Ledger`)
5. `sampling`    the run's `Secret`, and Poisson batches as index chunks
6. `flat`        sums by name in one flat vector (`Sums`)
7. `seal`        what names a sum, and what its noise is drawn from
8. `noise`       `privatize`: the only way from private sums to something releasable
9. `secure`      noise from a cryptographic stream, safe against floating-point attacks
10. `kernels`    the same on a GPU
11. `moments`    sums of clipped vectors, the simplest thing to release
12. `tradeoff`   what any attack can reach against all of this, as a ROC curve
13. `lower`      what an attack that succeeds proves: lower bounds on epsilon
14. `checks`     whether a mechanism does what the ledger says, from what canaries saw
15. `lower_noise`  lower bounds for whoever believes that the noise is Gaussian

This room knows tensors and numbers. It knows nothing of images, models or files.
"""
