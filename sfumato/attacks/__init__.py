"""What an adversary does with what they hold.

Shadow heads (Maciążek & Allison 2025, arXiv 2505.14323), in reading order:

1. `heads`                 how one head is trained (`HeadRecipe`), and what it says about features
2. `head_randomness`       all the randomness of a head, named by its number
3. `batched_heads`         heads trained side by side, any recipe
4. `batched_linear_heads`  the same numbers for linear heads, many times faster
5. `shadow_heads`          an endless, replayable sequence of heads
6. `head_statistics`       mean and deviation of each weight

Model inversion (Yuan et al. 2023, arXiv 2302.09814):

1. `access`           what the target gives: answers, and their gradients
2. `inversion_loss`   how far its answers are from what is wished for
3. `top_n_selection`  public images that it takes for each class
4. `random_views`     random looks at an image, differentiable
5. `gan_losses`       losses of two networks against each other
6. `gan_training`     a generator that learns from these images and from the target
7. `latent_search`    codes of that generator, searched for what the target names
"""
