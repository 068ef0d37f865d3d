"""Per-example gradient norms and clipped sums, at almost the cost of an ordinary backward pass.

Read in this order:

1. `layer_algebra`  products with a weight: norms and sums, two exact ways (`grams` is the one that
                    forms no gradient); `standardised` and `lookups`: the same for standardised
                    weights and for tables; `arithmetic`: how it is added up
2. `batch_axis`     which axis holds the examples: passes with two numbers of them are compared
3. `tape`           how parameters are followed through a model: the `Tape`, `leaf` (what they are
                    on the way) and `param_use` (where they meet the batch)
4. `dispatch`       what an operation with a parameter in it is: the choice of a rule
5. `rules`          one file for each family of operations; most are made of `linear_like`
6. `fallback`       the exact way for operations that have no rule
7. `method_choice`  which method each layer takes, by cost; the table that `--explain` prints
8. `clip`           `GradientClipper.clip`, which puts it together, with `use_gradients`, `factors`,
                    `sums` and `probe`
9. `admit`          the test a model passes before its norms are believed

For speed alone: `gpu_kernels` and `kernels` do the algebra of 1 on a GPU, `compiled` is
`GradientClipper.clip` compiled, `plain_group_norm` lends a kernel to ordinary training.

The idea (Bu et al. 2022, 2023; Goodfellow 2015): the gradient of example i for a weight is
b_i a_i', where a_i is the layer's input and b_i the gradient of its output. Its norm can be had
without its being formed, and the sum of clipped gradients is one more product, of inputs with
output gradients scaled by the clip factors.

How it is wired: rules are keyed by the *operation* in which a parameter meets the batch, not by
the class of a module. A parameter travels as a `LeafTensor`, a tensor that notices its own use. So
subclasses, functional use of a weight, tied weights and raw parameters need no special cases.
What a backward pass learns (norms, per-example gradients, layer inputs) comes back as gradients
of dummy inputs that are zero. No hooks, no state on parameters, and `torch.compile` sees it all.
"""
