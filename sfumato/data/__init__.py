"""Images in memory and on disk.

`images` is the one container, `load` finds images by name or path, `folder`, `arrays` and `named`
read the formats, `embedded` the two sets that ship with packages, `augment` changes batches, and
`alike` holds two sets against each other.
"""
