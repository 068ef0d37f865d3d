"""The guarantee: everything that stands between private images and what may be shared.

Read in this order; it takes about an hour. First *the guarantee*: what is guaranteed, what is
spent, and the one way out.

1. `releases`      one use of private data, as a fact (`Release`)
2. `budget`      what is guaranteed (`Budget`), and how it is spent (`Plan`, `make_plan`)
3. `ledger`      the append-only record of what was spent (`Ledger`)
4. `session_key` what all chance of a run derives from (`SessionKey`)
5. `sampling`    Poisson batches, as index chunks
6. `moments`     sums of clipped vectors, the simplest thing to release
7. `noise`       `privatize`: the only way from private sums to something releasable

Then *how it is computed*: prices, and noise that is fast and safe. No guarantee is made here that
is not made above.

8. `search`      the least noise, and the most steps, that a price allows
9. `accounting`  what a list of events costs: PLD, RDP, and the honest price of shuffling
10. `flat`       sums by name in one flat vector (`Sums`)
11. `seal`       the tag of a sum, and the keys that its noise is drawn from
12. `secure`     noise from a cryptographic stream, safe against floating-point attacks
13. `kernels`    the same on a GPU

Last *what attacks prove* (`proof`): what any attack can reach, and what one that succeeds shows.

14. `proof.tradeoff`     what any attack can reach against a plan, as a ROC curve
15. `proof.lower`        what an attack that succeeds proves: lower bounds on epsilon
16. `proof.checks`       whether a mechanism does what the ledger says, from what canaries saw
17. `proof.lower_noise`  lower bounds for those who believe that the noise is Gaussian

This room knows tensors and numbers. It knows nothing of images, models or files.
"""
