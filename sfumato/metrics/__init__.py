"""Numbers from tensors: accuracy, attacks on members, inversion, and the quality of images."""
