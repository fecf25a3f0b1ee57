"""Faults in adamw.py."""

from tests.zoo import Fault

DECAY = "    weight.mul_(1 - lr * weight_decay)\n"
MOMENTS = """\
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
"""
DENOMINATOR = "    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)\n"
UPDATE = "    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))\n"

FAULTS = [
    Fault(
        "no bias correction",
        old=DENOMINATOR + UPDATE,
        new="    weight.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(eps), value=-lr)\n",
        words="bias correction is missing",
    ),
    Fault("first moment not corrected", old="value=-lr / (1 - beta1**step)", new="value=-lr", words="Only the second"),
    Fault(
        "second moment not corrected",
        old=DENOMINATOR,
        new="    denominator = exp_avg_sq.sqrt().add_(eps)\n",
        words="Only the first",
    ),
    Fault(
        "correction of step 1 at every step",
        old=DENOMINATOR + UPDATE,
        new="    denominator = (exp_avg_sq / (1 - beta2)).sqrt() + eps\n"
        "    weight.sub_(lr * exp_avg / (1 - beta1) / denominator)\n",
        words="beta to the power `step`",
    ),
    Fault(
        "eps inside the root",
        old=DENOMINATOR,
        new="    denominator = (exp_avg_sq / (1 - beta2**step) + eps).sqrt()\n",
        words="inside the root",
    ),
    Fault("betas swapped", old="beta1, beta2 = betas", new="beta2, beta1 = betas", words="swapped"),
    Fault("gradient not squared", old="addcmul_(grad, grad, value", new="add_(grad, alpha", words="square of the grad"),
    Fault(
        "decay coupled into the gradient",
        old=DECAY,
        new="    grad = grad + weight_decay * weight\n",
        words="coupled into the gradient",
    ),
    Fault("decay without lr", old="1 - lr * weight_decay", new="1 - weight_decay", words="lacks its factor lr"),
    Fault(
        "decay after the step",
        old=DECAY + MOMENTS + DENOMINATOR + UPDATE,
        new=MOMENTS + DENOMINATOR + UPDATE + DECAY,
        words="decay comes first",
    ),
    Fault(
        "weight not changed in place",
        old=UPDATE,
        new="    weight = weight - lr * exp_avg / (1 - beta1**step) / denominator\n",
        words="did not change",
    ),
    Fault(
        "noise only up", old="torch.randint(0, 1 << 16,", new="torch.randint((1 << 16) - 1, 1 << 16,", words="went up"
    ),
    Fault("noise too small", old="torch.randint(0, 1 << 16,", new="torch.randint(0, 1 << 8,", words="went down"),
    Fault("noise too large", old="torch.randint(0, 1 << 16,", new="torch.randint(0, 1 << 17,", words="noise"),
    Fault("up or down by a coin", old="+ noise", new="+ noise % 2 * 65535", words="equally likely"),
    Fault(
        "lower half not cut off",
        old="bits.bitwise_and(-(1 << 16)).view",
        new="bits.view",
        words="rounded to nearest after the noise",
    ),
    Fault("one number for all", old="values.shape, dtype", new="(1,), dtype", words="for each element"),
    Fault("another generator", old=", generator=generator)\n    bits", new=")\n    bits", words="do not come from"),
    Fault(
        "step not counted",
        old='state["step"] += 1',
        new='state["step"] = 1',
        words="Add 1 at each call",
    ),
    Fault(
        "step off by one",
        old='exp_avg_sq, state["step"], lr',
        new='exp_avg_sq, state["step"] + 1, lr',
        words="number of the next step",
    ),
    Fault(
        "betas not handed on",
        old="lr, betas, eps, weight_decay)\n    if",
        new="lr, (0.9, 0.95), eps, weight_decay)\n    if",
        words="betas are not handed on",
    ),
    Fault(
        "moments in the wrong dtype",
        old='state["exp_avg"].copy_(exp_avg)',
        new='state["exp_avg"] = exp_avg.bfloat16()',
        words="wrong dtype",
    ),
    Fault("moments not stored", old='state["exp_avg"].copy_(exp_avg)', new="pass", words="not stored"),
    Fault(
        "master not used",
        old='wide = state["master"] if state_precision == "fp32" else weight.float()',
        new="wide = weight.float()",
        words="master is not used",
    ),
    Fault(
        "second moment rounded to nearest",
        old='        exp_avg_sq = algo.round_stochastically(exp_avg_sq, state["generator"])\n',
        new="",
        words="second moment is rounded to nearest",
    ),
    Fault(
        "a new generator at each step",
        old='algo.round_stochastically(wide, state["generator"])',
        new="algo.round_stochastically(wide, torch.Generator().manual_seed(0))",
        words="same weights move",
    ),
    Fault(
        "compensation with the wrong sign",
        old="copy_(wide - weight.float())",
        new="copy_(weight.float() - wide)",
        words="wrong sign",
    ),
    Fault(
        "compensation never stored",
        old='state["compensation"].copy_(wide - weight.float())',
        new="pass",
        words="never stored",
    ),
    Fault(
        "compensation not added",
        old='wide += state["compensation"].float()',
        new="pass",
        words="not added",
    ),
]
