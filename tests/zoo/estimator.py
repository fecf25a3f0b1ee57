"""Faults in estimator.py."""

from tests.zoo import Fault

GROUPS = "groups = rewards.reshape(-1, group_size)"
OTHERS = "others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)"
RETURN = "return (groups - others).reshape(-1)"

FAULTS = [
    Fault("sign", old=RETURN, new="return (others - groups).reshape(-1)", words="sign is wrong"),
    Fault("nothing", old=RETURN, new="return torch.zeros_like(rewards)", words="Every advantage is 0"),
    Fault("own reward", old=OTHERS, new="others = groups", words="Every advantage is 0"),
    Fault(
        "sum for mean",
        old=OTHERS,
        new="others = groups.sum(dim=1, keepdim=True)",
        words="contains the response's own reward as a whole",
    ),
    Fault(
        "own reward too often",
        old=OTHERS,
        new="others = groups.sum(dim=1, keepdim=True) + groups",
        words="contains the response's own reward, and too much of it",
    ),
    Fault("distance", old=RETURN, new="return (groups - others).abs().reshape(-1)", words="lost its sign"),
    Fault("square", old=RETURN, new="return ((groups - others) ** 2).reshape(-1)", words="lost its sign"),
    Fault("mean of the batch", old=OTHERS, new="others = groups.mean()", words="of the whole batch"),
    Fault("mean across groups", old=OTHERS, new="others = groups.mean(dim=0)", words="of a column"),
    Fault(
        "spread of the batch",
        old=RETURN,
        new="return ((groups - others) / (groups.std() + 1e-6)).reshape(-1)",
        words="of the whole batch",
    ),
    Fault("interleaved groups", old=GROUPS, new="groups = rewards.reshape(group_size, -1).T", words="interleaved"),
    Fault(
        "interleaved groups, put back in place",
        old=f"{GROUPS}  # [B / G, G]\n    {OTHERS}  # [B / G, G], mean of the other rewards\n    {RETURN}",
        new=f"groups = rewards.reshape(group_size, -1).T\n    {OTHERS}\n    return (groups - others).T.reshape(-1)",
        words="interleaved",
    ),
    Fault(
        "NaN where rewards are equal",
        old=RETURN,
        new="return ((groups - others) / groups.std(dim=1, keepdim=True)).reshape(-1)",
        words="division by 0",
    ),
    Fault(
        "divided by a mean of 0",
        old=RETURN,
        new="return (groups / groups.mean(dim=1, keepdim=True)).reshape(-1)",
        words="so can their mean be",
    ),
    Fault(
        "reward over a spread of almost 0",
        old=RETURN,
        new="return (groups / (groups.std(dim=1, keepdim=True) + 1e-6)).reshape(-1)",
        words="ruins the policy",
    ),
    Fault("sorted", old=GROUPS, new=GROUPS + ".sort(dim=1).values", words="a sort that is not undone"),
    Fault(
        "running mean",
        old=OTHERS,
        new="others = groups.cumsum(dim=1) / torch.arange(1, group_size + 1)",
        words="a running mean",
    ),
    Fault("first response as baseline", old=OTHERS, new="others = groups[:, :1]", words="one response that stands"),
    Fault("groups not made flat", old=RETURN, new="return groups - others", words="Make it flat again"),
    Fault("one number for a group", old=RETURN, new="return groups.mean(dim=1)", words="not each group"),
    Fault("a list", old=RETURN, new="return (groups - others).reshape(-1).tolist()", words="not list"),
    Fault(
        "no return", old=RETURN, new="advantages = (groups - others).reshape(-1)", words="is there a `return`"
    ),
    Fault(
        "whole numbers",
        old=RETURN,
        new="return (groups - others).reshape(-1).sign().long()",
        words="has the type torch.int64",
    ),
    Fault(
        "in place",
        old=RETURN,
        new="groups -= others\n    return groups.reshape(-1)",
        words="in place",
    ),
    Fault(
        "noise to break ties",
        old=RETURN,
        new="return (groups - others).reshape(-1) + 0.01 * torch.randn_like(rewards)",
        words="is random",
    ),
    Fault(
        "metadata as well",
        old=RETURN,
        new="return (groups - others).reshape(-1), {}",
        words="not tuple",
    ),
]  # fmt: skip
