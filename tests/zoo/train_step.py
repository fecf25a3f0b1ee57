"""Faults in train_step.py."""

from tests.zoo import Fault

SHARE = "loss = loss * (len(chosen) / batch_rows)"
BACKWARD = "        loss.backward()\n"

FAULTS = [
    Fault(
        "divided twice",
        old=SHARE,
        new="loss = loss * (len(chosen) / batch_rows) / gradient_accumulation_steps",
        words="divided twice",
    ),
    Fault(
        "divided by the number of microbatches",
        old=SHARE,
        new="loss = loss / gradient_accumulation_steps",
        words="divided by the number of microbatches",
    ),
    Fault("not weighed", old=SHARE, new="pass", words="as it is"),
    Fault(
        "token mean weighed by rows",
        old="loss = loss * (part_mask.sum() / batch_tokens)",
        new="loss = loss * (len(chosen) / batch_rows)",
        words="token mean is weighed by rows",
    ),
    Fault(
        "constant weighed as a mean",
        old='if loss_normalization == "sequence":',
        new='if loss_normalization in ("sequence", "constant"):',
        words="as if it were a mean",
    ),
    Fault(
        "denominators of the kept rows only",
        old="batch_rows, batch_tokens = mask.shape[0], mask.sum().clamp(min=1)\n"
        "    rows = ((advantages != 0) & mask.any(dim=1)).nonzero().flatten()  # [kept]\n",
        new="rows = ((advantages != 0) & mask.any(dim=1)).nonzero().flatten()\n"
        "    batch_rows, batch_tokens = len(rows), mask[rows].sum().clamp(min=1)\n",
        words="kept rows only",
    ),
    Fault(
        "zero advantages not skipped",
        old="((advantages != 0) & mask.any(dim=1))",
        new="mask.any(dim=1)",
        words="Rows with advantage 0 are run",
    ),
    Fault(
        "only positive advantages",
        old="(advantages != 0) & mask",
        new="(advantages > 0) & mask",
        words="negative advantage",
    ),
    Fault(
        "no gradient without a signal",
        old="parameter.grad = torch.zeros_like(parameter)",
        new="pass",
        words="gradient is None",
    ),
    Fault(
        "clipping per microbatch",
        old=BACKWARD,
        new=BACKWARD + "        clip_gradients(model.parameters(), 1.0)\n",
        words="clipped here",
    ),
    Fault(
        "zeroed at each microbatch",
        old=BACKWARD,
        new="        model.zero_grad()\n" + BACKWARD,
        words="zeroed between microbatches",
    ),
    Fault("no backward", old=BACKWARD, new="", words="There is no gradient"),
    Fault("loss with its graph", old="total + loss.detach()", new="total + loss", words="with its graph"),
    Fault("loss of the last microbatch", old="total = total + loss", new="total = loss", words="last microbatch alone"),
    Fault(
        "backward before the check",
        old="        check_finite(loss, per_token_loss, part_mask, chosen)\n",
        new="        loss.backward(retain_graph=True)\n        check_finite(loss, per_token_loss, part_mask, chosen)\n",
        words="before check_finite",
    ),
    Fault(
        "columns of the batch's first rows",
        old="column[chosen, : widths[start]]",
        new='(column[: len(chosen), : widths[start]] if name == "old_log_probs" else column[chosen, : widths[start]])',
        words="old_log_probs of other rows",
    ),
    Fault(
        "old_log_probs not sliced",
        old='part.get("old_log_probs"),',
        new='batch.get("old_log_probs"),',
        words="old_log_probs has shape",
    ),
    Fault(
        "mask not trimmed with the ids",
        old='        part_mask = part["response_mask"].bool()\n        scored',
        new="        part_mask = mask[chosen]\n        scored",
        words="response_mask has shape",
    ),
    Fault(
        "last token cut off",
        old="column[chosen, : widths[start]]",
        new="column[chosen, : widths[start] - 1]",
        words="cut off too",
    ),
    Fault(
        "width of the whole batch",
        old="column[chosen, : widths[start]]",
        new="column[chosen, : widths[0]]",
        words="width is that of the whole batch",
    ),
    Fault("not sorted", old="rows = rows[used.argsort(descending=True, stable=True)]", new="pass", words="not sorted"),
    Fault(
        "sums never filled",
        old="        sums.add(scored, loss_metadata, part)\n",
        new="",
        words="not given to sums.add",
    ),
    Fault(
        "rounded down",
        old="-(-batch_rows // gradient_accumulation_steps)",
        new="max(1, batch_rows // gradient_accumulation_steps)",
        words="rounded down",
    ),
    Fault(
        "rewards in place of advantages",
        old='{**batch, "advantages": advantages,',
        new='{**batch, "advantages": rewards,',
        words="in place of the advantages",
    ),
    Fault(
        "clipping after the step",
        old="        grad_norm = clip_gradients(model.parameters(), max_grad_norm)\n        optimizer.step()\n",
        new="        optimizer.step()\n        grad_norm = clip_gradients(model.parameters(), max_grad_norm)\n",
        words="Nothing was clipped before the step",
    ),
    Fault(
        "gradients not zeroed before",
        old="    model.zero_grad(set_to_none=True)\n    try:",
        new="    try:",
        words="not zeroed before",
    ),
    Fault(
        "gradients not zeroed after",
        old="    finally:\n        model.zero_grad(set_to_none=True)\n",
        new="    finally:\n        pass\n",
        words="not zeroed after",
    ),
    Fault(
        "a step for each microbatch",
        old="        optimizer.step()\n",
        new="        for _ in range(gradient_accumulation_steps):\n            optimizer.step()\n",
        words="at every microbatch",
    ),
    Fault(
        "no step without a signal",
        old="        optimizer.step()\n",
        new="        if advantages.any():\n            optimizer.step()\n",
        words="without a signal was left out",
    ),
    Fault(
        "baseline not handed on",
        old="rewards, group_size, baseline, adv",
        new='rewards, group_size, "mean", adv',
        words="baseline is not handed on",
    ),
    Fault(
        "old_log_probs not in the batch", old=', "old_log_probs": old_log_probs}', new="}", words="needs old_log_probs"
    ),
    Fault(
        "eps not handed on",
        old="rewards, group_size, baseline, advantage_eps,",
        new="rewards, group_size, baseline, 1e-6,",
        words="advantage_eps is not handed on",
    ),
    Fault(
        "cliprange not handed on",
        old="            importance_reweighting_method,\n            cliprange,\n            loss_normalization,",
        new="            importance_reweighting_method,\n            None,\n            loss_normalization,",
        words="needs cliprange",
    ),
    Fault(
        "rollout_log_probs left out",
        old="for name, column in columns.items()}",
        new='for name, column in columns.items() if name != "rollout_log_probs"}',
        words="'rollout_log_probs'",
    ),
]
