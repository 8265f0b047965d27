"""``deepspeed.runtime.zero.tiling``."""

from shardfold.compat.deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias, split_tensor_along_last_dim

__all__ = ["TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"]
