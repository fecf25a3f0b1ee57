"""An advantage estimator of your own."""

from torch import Tensor


def estimate_advantages(raw_rewards: Tensor, group_size: int) -> Tensor:
    """placeholder"""
    ### BEGIN YOUR CODE: any estimator whose expected gradient is right (notebook 12)
    raise NotImplementedError("any estimator whose expected gradient is right (notebook 12)")
    ### END YOUR CODE
