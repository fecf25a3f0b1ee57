"""The algorithms once more, in float64 and plain loops, straight from the formulas: what the fast code is held against.

Nothing here is shared with the code under test. Gradients come from autograd over float64 scalars.
"""

import math

import torch


def advantages(rewards, group_size, baseline, normalizer, eps=1e-6):
    """A = (r - b) / n for each response; `rewards` is a list of floats."""
    result = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean = math.fsum(group) / len(group)
        equal = max(group) == min(group)
        for reward in group:
            top = reward - mean if baseline == "mean" else reward
            if normalizer == "std":
                variance = math.fsum((r - mean) ** 2 for r in group) / (len(group) - 1)
                bottom = math.sqrt(variance) + eps
            else:
                bottom = mean + eps if normalizer == "mean" else 1.0
            result.append(0.0 if equal and baseline == "mean" else top / bottom)
    return result


def _smaller(a, b):
    return a if a.item() <= b.item() else b


def _clip(x, low, high):
    if x.item() < low:
        return torch.tensor(low, dtype=torch.float64)
    return torch.tensor(high, dtype=torch.float64) if x.item() > high else x


def batch_loss(log_probs, old_log_probs, mask, advantage, method, eps, normalization, constant):
    """The loss of a whole batch, a float64 scalar; `log_probs` is float64 [B, T] with gradient, the others lists."""
    total = torch.zeros((), dtype=torch.float64)
    rows = len(advantage)
    for row in range(rows):
        positions = [t for t in range(len(mask[row])) if mask[row][t]]
        a = advantage[row]
        if method == "gspo" and positions:
            mean = sum(log_probs[row, t] - old_log_probs[row][t] for t in positions) / len(positions)
            s = torch.exp(mean)
        for t in positions:
            log_p = log_probs[row, t]
            if method == "none":
                objective = a * log_p
            else:
                w = s if method == "gspo" else torch.exp(log_p - old_log_probs[row][t])
                if method == "noclip":
                    objective = a * w
                elif method == "cispo":
                    objective = min(w.item(), 1 + eps) * a * log_p
                else:
                    objective = _smaller(a * w, a * _clip(w, 1 - eps, 1 + eps))
            share = 1 / constant if normalization == "constant" else 1 / (rows * len(positions))
            total = total - objective * share
    return total


def next_token_log_probs(model, input_ids, labels):
    """log p(label) in float64, a row at a time, by the definition of softmax; `model` is in float64."""
    rows = []
    for ids, row_labels in zip(input_ids, labels, strict=True):
        logits = model(ids.unsqueeze(0)).logits[0]  # [T, V]
        exps = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
        rows.append(torch.log(exps / exps.sum(dim=-1, keepdim=True))[range(len(row_labels)), row_labels])
    return torch.stack(rows)
