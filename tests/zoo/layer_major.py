"""Faults in layer_major.py."""

from tests.zoo import Fault

FAULTS = [
    Fault(
        "graph kept on the way up",
        old="""\
    with torch.no_grad():
        kept = [[embed(model, ids) for ids in microbatches]]  # kept[i][m]: what goes into layer i, [b, T, H]
        for index in layers:
            kept.append([run_layer(model, index, hidden) for hidden in kept[index]])
""",
        new="""\
    kept = [[embed(model, ids) for ids in microbatches]]
    for index in layers:
        kept.append([run_layer(model, index, hidden) for hidden in kept[index]])
    kept = [[hidden.detach() for hidden in hiddens] for hiddens in kept]
""",
        words="A graph is kept on the way up",
    ),
    Fault(
        "kept inputs not detached",
        old="    with torch.no_grad():\n        kept",
        new="    if True:\n        kept",
        words="the kept input must have no graph of its own",
    ),
    Fault(
        "outputs kept instead of inputs",
        old="    for m, hidden in enumerate(kept.pop()):\n        hidden.requires_grad_()\n        loss",
        new="    for m, hidden in enumerate(kept[-1]):\n        hidden = hidden.clone().requires_grad_()\n        loss",
        words="This is what comes out of the layer",
    ),
    Fault(
        "microbatch by microbatch on the way up",
        old="""\
        for index in layers:
            kept.append([run_layer(model, index, hidden) for hidden in kept[index]])
""",
        new="""\
        kept += [[] for _ in layers]
        for m in range(len(microbatches)):
            for index in layers:
                kept[index + 1].append(run_layer(model, index, kept[index][m]))
""",
        words="the loop over layers must be the outer one",
    ),
    Fault(
        "down from the first layer",
        old="    for index in reversed(layers):",
        new="    for index in layers:",
        words="The way down starts at the first layer",
    ),
    Fault(
        "only the last microbatch's gradient stays",
        old="            run_layer(model, index, hidden).backward(gradients[m])",
        new=(
            "            model.model.layers[index].zero_grad()\n"
            "            run_layer(model, index, hidden).backward(gradients[m])"
        ),
        words="last microbatch's gradient alone",
    ),
    Fault(
        "one gradient for all microbatches",
        old="            run_layer(model, index, hidden).backward(gradients[m])",
        new="            run_layer(model, index, hidden).backward(gradients[-1])",
        words="Both are microbatch 1's: keep one gradient for each microbatch",
    ),
    Fault(
        "gradients of the wrong microbatch",
        old="        gradients.append(hidden.grad)",
        new="        gradients.insert(0, hidden.grad)",
        words="exchanged between the microbatches",
    ),
    Fault(
        "gradient not passed on",
        old="            gradients[m] = hidden.grad\n        report",
        new="            pass\n        report",
        words="Pass on the gradient of the input that the layer above had",
    ),
    Fault(
        "embedding forgotten",
        old="        embed(model, ids).backward(gradient)",
        new="        pass",
        words="The embedding has no gradient",
    ),
    Fault(
        "final norm outside the graph",
        old="        hidden.requires_grad_()\n        loss = loss_of(final_norm(model, hidden), m)",
        new="        hidden = final_norm(model, hidden).detach().requires_grad_()\n        loss = loss_of(hidden, m)",
        words="The final norm has no gradient",
    ),
    Fault(
        "loss averaged once more",
        old="        loss = loss_of(final_norm(model, hidden), m)",
        new="        loss = loss_of(final_norm(model, hidden), m) / len(microbatches)",
        words="divided by the number of microbatches; loss_of gives shares",
    ),
    Fault(
        "mean of the losses",
        old="    return torch.stack(losses).sum()",
        new="    return torch.stack(losses).mean()",
        words="This is the mean",
    ),
    Fault(
        "loss keeps its graph",
        old="        losses.append(loss.detach())",
        new="        losses.append(loss)",
        words="The loss still holds its graph",
    ),
    Fault(
        "kept input asks for no gradient",
        old="            hidden.requires_grad_()\n            run_layer",
        new="            run_layer",
        words="must ask for its gradient before it runs again",
    ),
    Fault(
        "head's input asks for no gradient",
        old="        hidden.requires_grad_()\n        loss",
        new="        loss",
        words="must ask for its gradient before it runs again",
    ),
    Fault(
        "layers reported for each microbatch",
        old='            gradients[m] = hidden.grad\n        report(f"layer {index}")',
        new='            gradients[m] = hidden.grad\n            report(f"layer {index}")',
        words="Report the head, then the layers",
    ),
    Fault(
        "layers reported too early",
        old="""\
        for m, hidden in enumerate(kept.pop()):
            hidden.requires_grad_()
            run_layer(model, index, hidden).backward(gradients[m])
            gradients[m] = hidden.grad
        report(f"layer {index}")
""",
        new="""\
        report(f"layer {index}")
        for m, hidden in enumerate(kept.pop()):
            hidden.requires_grad_()
            run_layer(model, index, hidden).backward(gradients[m])
            gradients[m] = hidden.grad
""",
        words="reported before its last microbatch",
    ),
    Fault(
        "microbatches of one size",
        old="        losses.append(loss.detach())\n        gradients.append(hidden.grad)",
        new="        losses.append(loss.detach())\n        gradients.append(hidden.grad / len(hidden))",
        words="Nothing in the pass may depend on the size of a microbatch",
    ),
    Fault(
        "gradients zeroed before",
        old="    with torch.no_grad():\n        kept",
        new="    model.zero_grad()\n    with torch.no_grad():\n        kept",
        words="the caller zeroes them",
    ),
]
