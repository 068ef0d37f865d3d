"""Networks: the zoo (timm, torchvision, ours), our own, and what to do with BatchNorm."""
