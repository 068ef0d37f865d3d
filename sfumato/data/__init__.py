"""Images in memory and on disk.

`images` is the one container, `load` finds images by name or path, `folder`, `arrays` and
`torchvision_sets` read the formats, `embedded` the two sets that ship with packages, `augment`
changes batches, and
`overlap` holds two sets against each other.
"""
