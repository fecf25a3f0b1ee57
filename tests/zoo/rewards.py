"""Faults in rewards.py."""

from tests.zoo import Fault

COUNTS = 'if response.count("</think> <answer>") != 1 or response.count("</answer>") != 1:'
LAST_LINE = 'return "" if rest.strip() else answer.strip()'
BODY = """    if response.count("</think> <answer>") != 1 or response.count("</answer>") != 1:
        return None
    answer_and_rest = response.partition("</think> <answer>")[2]
    if "</answer>" not in answer_and_rest:
        return None
    answer, _, rest = answer_and_rest.partition("</answer>")
    return "" if rest.strip() else answer.strip()
"""
IN_RANGE = "if 0.0 <= value <= 1.0:"
BIN = "histogram[min(int(value * 10), 9)] += 1"
HISTOGRAM = """[0] * 10
        for value in values.tolist():
            if 0.0 <= value <= 1.0:
                histogram[min(int(value * 10), 9)] += 1
"""
PAID = 'torch.tensor([rewards["reward"] for rewards in graded], dtype=torch.float32)'


def search(pattern: str, flags: str = "") -> str:
    """A body that takes the first match of a regular expression, with white space removed."""
    found = f"    import re\n    found = re.search(r'{pattern}', response{flags})\n"
    return found + "    return found[1].strip() if found else None\n"


FAULTS = [
    Fault(
        "closings not counted",
        old=COUNTS,
        new='if response.count("</think> <answer>") != 1:',
        words="Count `</answer>`",
    ),
    Fault("openings not counted", old=COUNTS, new='if response.count("</answer>") != 1:', words="Two openings"),
    Fault(
        "lenient white space",
        old=BODY,
        new=search(r"</think>\s*<answer>(.*)</answer>", ", re.DOTALL"),
        words="strict format was not asked for: no space",
    ),
    Fault(
        "any answer tag will do",
        old=BODY,
        new=search("<answer>(.*?)</answer>", ", re.DOTALL"),
        words="`</think>` was not asked for",
    ),
    Fault(
        "a dot that stops at a line break",
        old=BODY,
        new=search("</think> <answer>(.*)</answer>"),
        words="`.` does not match it",
    ),
    Fault(
        "a greedy pattern",
        old=BODY,
        new=search("</think> <answer>(.*)</answer>", ", re.DOTALL"),
        words="from the first tag to the last",
    ),
    Fault(
        "the last block wins",
        old=BODY,
        new=search("</think> <answer>.*<answer>(.*)</answer>|</think> <answer>(.*)</answer>", ", re.DOTALL").replace(
            "found[1]", "(found[1] or found[2])"
        ),
        words="The last of several answers was taken",
    ),
    Fault(
        "a think tag that the prompt has already written",
        old=COUNTS,
        new='if "<think>" not in response or response.count("</answer>") != 1:',
        words="do you ask for a `<think>`",
    ),
    Fault(
        "a closing tag that is not there",
        old=BODY,
        new="""    start = response.find("</think> <answer>")
    if start < 0 or response.count("</think> <answer>") > 1 or response.count("</answer>") > 1:
        return None
    return response[start + 17 : response.find("</answer>")].strip()
""",
        words="`find` gives -1",
    ),
    Fault(
        "the order of the tags",
        old='if "</answer>" not in answer_and_rest:',
        new="if False:",
        words="The order of the tags",
    ),
    Fault(
        "white space kept", old=LAST_LINE, new='return "" if rest.strip() else answer', words="White space at the ends"
    ),
    Fault(
        "an empty answer is none", old=LAST_LINE, new=LAST_LINE + " or None", words="An empty answer was taken for none"
    ),
    Fault("the rest thrown away", old=LAST_LINE, new="return answer.strip()", words="was thrown away"),
    Fault(
        "the rest malformed",
        old=LAST_LINE,
        new="return None if rest.strip() else answer.strip()",
        words="Text after the block was treated as malformed",
    ),
    Fault(
        "a final line break is text", old=LAST_LINE, new='return "" if rest else answer.strip()', words="taken for text"
    ),
    Fault(
        "the format paid", old=PAID, new=PAID.replace('["reward"]', '["format_reward"]'), words="The format was paid"
    ),
    Fault(
        "the rewards added",
        old=PAID,
        new=PAID.replace('rewards["reward"]', "sum(rewards.values())"),
        words="were added",
    ),
    Fault("double precision", old=PAID, new=PAID.replace("float32", "float64"), words="dtype=torch.float32"),
    Fault("a list", old=PAID, new='[rewards["reward"] for rewards in graded]', words="make a tensor"),
    Fault("arguments swapped", old="reward_fn(r, truth)", new="reward_fn(truth, r)", words="wrong order"),
    Fault(
        "the first truth for all",
        old="reward_fn(r, truth)",
        new="reward_fn(r, repeated_ground_truths[0])",
        words="against the first ground truth",
    ),
    Fault(
        "one name logged",
        old="for name in graded[0]:",
        new='for name in ["reward"]:',
        words='Only "reward" was summarised',
    ),
    Fault("sample deviation", old="correction=0", new="correction=1", words="divide by B."),
    Fault("the variance", old="values.std(correction=0)", new="values.var(correction=0)", words="take its root"),
    Fault("a sum for a mean", old="values.mean()", new="values.sum()", words="divide by the number of responses"),
    Fault("a tensor in the log", old="values.mean().item()", new="values.mean()", words="`.item()`"),
    Fault("the last bin open", old=IN_RANGE, new="if 0.0 <= value < 1.0:", words="the reward 1 was lost"),
    Fault(
        "eleven bins",
        old=HISTOGRAM,
        new=HISTOGRAM.replace("[0] * 10", "[0] * 11").replace("min(int(value * 10), 9)", "int(value * 10)"),
        words="There are eleven bins",
    ),
    Fault("rounded bins", old=BIN, new="histogram[min(round(value * 10), 9)] += 1", words="round down"),
    Fault("outside counted", old=IN_RANGE, new="if True:", words="a negative index"),
    Fault("above one counted", old=IN_RANGE, new="if 0.0 <= value:", words="Values above 1"),
    Fault("not finite", old="if not values.isfinite().all():", new="if False:", words="was let through"),
    Fault(
        "half an opening counted",
        old='response.count("</think> <answer>") != 1',
        new='response.count("</think> <answer>") != 1 or response.count("<answer>") != 1',
        words="Half of the opening",
    ),
]
