"""Faults in advantages.py."""

from tests.zoo import Fault

RESHAPE = "groups = rewards.reshape(-1, group_size)"
MEAN = "mean = groups.mean(dim=1, keepdim=True)"
BASELINE = 'advantages = groups - mean if baseline == "mean" else groups'
BY_STD = "advantages = advantages / (groups.std(dim=1, keepdim=True) + advantage_eps)"
BY_MEAN = "advantages = advantages / (mean + advantage_eps)"
ZEROS = """\
    if baseline == "mean" or advantage_normalizer == "std":
        advantages = torch.where(all_equal, 0.0, advantages)
"""
SHARE = '{"zero_variance_groups": all_equal.float().mean().item()}'

FAULTS = [
    Fault(
        "biased standard deviation",
        old="groups.std(dim=1, keepdim=True)",
        new="groups.std(dim=1, keepdim=True, correction=0)",
        words="divided by G and not by G - 1",
    ),
    Fault(
        "variance for standard deviation",
        old="groups.std(dim=1, keepdim=True)",
        new="groups.var(dim=1, keepdim=True)",
        words="variance was divided by",
    ),
    Fault(
        "standard deviation of the batch",
        old="groups.std(dim=1, keepdim=True)",
        new="groups.std()",
        words="standard deviation is over the whole batch",
    ),
    Fault("mean of the batch", old=MEAN, new="mean = groups.mean()", words="mean is over the whole batch"),
    Fault(
        "mean across groups",
        old=MEAN,
        new="mean = groups.mean(dim=0, keepdim=True)",
        words="taken across groups",
    ),
    Fault(
        "interleaved groups",
        old=RESHAPE,
        new="groups = rewards.reshape(group_size, -1).T",
        words="(groups, G), not (G, groups)",
    ),
    Fault("no baseline", old=BASELINE, new="advantages = groups", words="mean was not subtracted"),
    Fault("baseline always", old=BASELINE, new="advantages = groups - mean", words="still subtracts the mean"),
    Fault("sign", old=BASELINE, new=BASELINE.replace("groups - mean", "mean - groups"), words="sign is wrong"),
    Fault(
        "mean normaliser divides by the standard deviation",
        old=BY_MEAN,
        new=BY_STD,
        words='"mean" divides by the standard deviation',
    ),
    Fault(
        "none normaliser divides",
        old='elif advantage_normalizer == "mean":\n        ' + BY_MEAN,
        new="else:\n        " + BY_STD,
        words='"none" still divides',
    ),
    Fault(
        "eps inside the root",
        old=BY_STD,
        new="advantages = advantages / (groups.var(dim=1, keepdim=True) + advantage_eps).sqrt()",
        words="inside the root",
    ),
    Fault(
        "eps without brackets",
        old=BY_STD,
        new="advantages = advantages / groups.std(dim=1, keepdim=True) + advantage_eps",
        words="brackets are missing",
    ),
    Fault(
        "eps as a lower bound",
        old=BY_STD,
        new="advantages = advantages / groups.std(dim=1, keepdim=True).clamp(min=advantage_eps)",
        words="smallest divisor",
    ),
    Fault("eps forgotten", old=BY_MEAN, new="advantages = advantages / mean", words="eps is missing"),
    Fault("equal rewards give NaN", old=ZEROS, new="", words="from 0 / 0"),
    Fault(
        "rounding noise",
        old="all_equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)",
        new="all_equal = groups.std(dim=1, keepdim=True) == 0",
        words="compare the rewards with each other",
    ),
    Fault(
        "equal rewards always zero",
        old='if baseline == "mean" or advantage_normalizer == "std":\n        adv',
        new="if True:\n        adv",
        words="though nothing is compared",
    ),
    Fault(
        "zeros only after subtracting",
        old='if baseline == "mean" or advantage_normalizer == "std":\n        adv',
        new='if baseline == "mean":\n        adv',
        words="gives a million",
    ),
    Fault(
        "number for share",
        old=SHARE,
        new='{"zero_variance_groups": all_equal.float().sum().item()}',
        words="divide by the number of groups",
    ),
    Fault(
        "only zeros counted",
        old=SHARE,
        new='{"zero_variance_groups": (groups == 0).all(dim=1).float().mean().item()}',
        words="Only the groups of zeros",
    ),
    Fault(
        "share as a tensor", old="all_equal.float().mean().item()", new="all_equal.float().mean()", words="Python float"
    ),
    Fault(
        "NaN times zero",
        old="torch.where(all_equal, 0.0, advantages)",
        new="advantages * ~all_equal",
        words="Multiplying by 0 leaves NaN",
    ),
    Fault("no metadata", old=", " + SHARE, new="", words="two things"),
    Fault(
        "groups not made flat",
        old="return advantages.reshape(-1),",
        new="return advantages,",
        words="has the shape (1, 4) and not (4,)",
    ),
    Fault(
        "raw rewards",
        old=RESHAPE,
        new="groups = raw_rewards.reshape(-1, group_size)",
        words="Got: Long",
    ),
]
