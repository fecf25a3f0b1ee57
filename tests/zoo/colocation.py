"""Faults in colocation.py."""

from tests.zoo import Fault

VERIFY = """\
    have, want = engine.checksums(), trainer.checksums()
    if have != want:
        wrong = min(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
        raise RuntimeError(f"The engine's weight {wrong} is not the trainer's after loading; do not generate with it.")
"""
CACHE = """\
    engine.wake_up(["kv_cache"])  # after the load, which may need room of its own
    engine.reset_prefix_cache()
"""
UPDATE = """
    trainer.take_card()
    metrics = trainer.update(rollouts)
    trainer.release_card()

"""
LOAD = '    engine.wake_up(["weights"])\n    engine.load_weights(trainer.weights())\n'
GENERATE = """\
    rollouts = list(engine.generate(prompts))  # all of them: an engine that is busy must not sleep
    engine.sleep(level=2)  # its weights are about to be old, so it need not keep them
"""

FAULTS = [
    Fault(
        "one weight verified",
        old="    if have != want:\n",
        new='    if have["lm_head"] != want["lm_head"]:\n',
        words="compare all of the engine's checksums",
    ),
    Fault(
        "sleep before generation",
        old=GENERATE,
        new="    engine.sleep(level=2)\n    rollouts = list(engine.generate(prompts))\n",
        words="The engine is asleep; it must wake before it generates",
    ),
    Fault(
        "rollouts not collected before sleep",
        old="list(engine.generate(prompts))",
        new="engine.generate(prompts)",
        words="The engine is busy: 3 rollouts are not taken yet",
    ),
    Fault(
        "first rollout alone",
        old="trainer.update(rollouts)",
        new="trainer.update(rollouts[:1])",
        words="The update saw the first rollout alone",
    ),
    Fault(
        "trainer takes the card too early",
        old=GENERATE + "\n    trainer.take_card()\n",
        new="    rollouts = list(engine.generate(prompts))\n    trainer.take_card()\n    engine.sleep(level=2)\n",
        words="it must sleep before the trainer takes the card",
    ),
    Fault(
        "engine never sleeps",
        old="    engine.sleep(level=2)",
        new="    pass",
        words="The engine still holds 10.8 GiB of the card",
    ),
    Fault(
        "update without the card",
        old="    trainer.take_card()\n",
        new="",
        words="it must take the card before an update",
    ),
    Fault(
        "card not released",
        old="    trainer.release_card()\n",
        new="",
        words="it must release the card before the engine wakes",
    ),
    Fault(
        "weights loaded while asleep",
        old=LOAD,
        new='    engine.load_weights(trainer.weights())\n    engine.wake_up(["weights"])\n',
        words='wake "weights" before loading',
    ),
    Fault(
        "keys and values woken with the weights",
        old='    engine.wake_up(["weights"])',
        new="    engine.wake_up()",
        words="Keys and values were to wake before the weights are in",
    ),
    Fault(
        "old weights kept on the host",
        old="    engine.sleep(level=2)",
        new="    engine.sleep(level=1)",
        words="Level 1 keeps old weights in the host's memory",
    ),
    Fault(
        "level 1, and all woken",
        old="    engine.sleep(level=2)  # its weights are about to be old, so it need not keep them\n" + UPDATE + LOAD,
        new="    engine.sleep(level=1)\n" + UPDATE + LOAD.replace('["weights"]', ""),
        words="Keys and values have taken the room that a load may need",
    ),
    Fault(
        "weights not loaded",
        old="    engine.load_weights(trainer.weights())\n",
        new="",
        words="load them first",
    ),
    Fault(
        "old weights sent",
        old=GENERATE + UPDATE + LOAD,
        new="    weights = trainer.weights()\n" + GENERATE + UPDATE + LOAD.replace("trainer.weights()", "weights"),
        words="The weights of before the update were sent",
    ),
    Fault(
        "no verification",
        old=VERIFY,
        new="",
        words="The loaded weights were not verified",
    ),
    Fault(
        "checksums read but not compared",
        old="    if have != want:",
        new="    if have is None:",
        words="After loading, compare all of the engine's checksums with the trainer's",
    ),
    Fault(
        "one weight verified",
        old="    if have != want:",
        new='    if have["embed_tokens"] != want["embed_tokens"]:',
        words="After loading, compare all of the engine's checksums with the trainer's",
    ),
    Fault(
        "verification the wrong way round",
        old=VERIFY,
        new="    if engine.checksums() == trainer.checksums():\n        raise RuntimeError('all differ')\n",
        words="so the comparison is wrong",
    ),
    Fault(
        "prefix cache not reset",
        old="    engine.reset_prefix_cache()\n",
        new="",
        words="The prefix cache may still hold keys and values of the old weights",
    ),
    Fault(
        "prefix cache reset before there is one",
        old=CACHE,
        new='    engine.reset_prefix_cache()\n    engine.wake_up(["kv_cache"])\n',
        words="nothing can be reset",
    ),
    Fault(
        "keys and values not woken",
        old=CACHE,
        new="",
        words='wake "kv_cache" before it generates',
    ),
    Fault(
        "metrics not returned",
        old="    return metrics",
        new="    return None",
        words="is there a `return`",
    ),
]
