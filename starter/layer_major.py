"""The layer-major pass: one layer at a time, every microbatch through it."""

from typing import Any


def layer_major_backward(*args: Any) -> Any:
    """placeholder"""
    ### BEGIN YOUR CODE: up with stashed inputs, head, down with recomputation (notebook 09)
    raise NotImplementedError("up with stashed inputs, head, down with recomputation (notebook 09)")
    ### END YOUR CODE
