"""Networks: the zoo (timm, torchvision, ours), our own small ones, and what to do with BatchNorm."""
