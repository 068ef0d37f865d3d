"""`Geometry`: how a layer applies its weight."""

from typing import NamedTuple


class WeightGeometry(NamedTuple):
    """How a weight is applied: as a matrix on the last axis, or as a convolution."""

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    groups: int = 1

    @property
    def is_linear(self) -> bool:
        """Whether this is a matrix and no convolution."""
        return not self.stride


LINEAR = WeightGeometry()
